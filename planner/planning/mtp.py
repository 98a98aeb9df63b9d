"""Draft layers stored in the model's own checkpoint: multi-token prediction (MTP), as vLLM 0.32.0 builds it.

An MTP layer is a decoder layer of the model plus a joining matrix and norms. The matrix maps the concatenated
hidden state and embedding of the last drafted token to the layer's input. config.json states the number of MTP
layers, but not their tensors. The planner gives these tensors the names that they have in checkpoints, so that
a quantization's list of excluded modules matches them.

The draft layers use the model's embedding and output head (v1/worker/gpu/spec_decode/eagle/utils.py), with two
exceptions. In some families the draft layers have heads of their own. Under pipeline parallelism the draft has
its own embedding, because the model's embedding is on another stage.

Sources: hf_config_override in config/speculative.py and model_executor/models/*_mtp.py. Tests compare the
tensors with vLLM's modules (tests/planner/test_drafts.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tonnage.planner.errors import DeploymentError
from tonnage.planner.model.architecture import Architecture, CacheLayer
from tonnage.planner.model.fields import Fields
from tonnage.planner.model.tensor import HeaderTensor, TensorSpec

FIELD = "--speculative-model"
_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")


@dataclass(frozen=True, slots=True)
class DraftFamily:
    """Rules by which a model family builds the draft layers (MTP) that its checkpoint contains.

    Attributes:
        count: config field with the number of draft layers.
        default_count: number of layers if the field is missing.
        max_count: maximum number of draft layers that vLLM builds; None for no maximum.
        at: pattern of the prefix of a draft layer's tensor names in checkpoints. `{i}` is the layer's index
            among the draft layers, `{n}` its index in the whole model.
        joined: name of the matrix that maps the concatenated embedding and hidden state to the hidden size.
        norms: names of the norms of each layer.
        outside: prefix of the names of the joining matrix and the norms if all draft layers share them; None if
            each layer has its own.
        split: whether tensor parallelism divides the joining matrix between ranks.
        kind: kind of the draft layer's attention, such as `full` or `sliding`.
        dense: whether the layer's MLP is dense although the model has experts.
        heads: whether each layer has an output head of its own.
        block: prefix of the names of the decoder layer's tensors, after the draft layer's own prefix (`at`).
        pattern: whether a draft layer consists of several parts, each with one mixer (attention or experts), as
            in Nemotron-H.
        last: names of the norms in the last part of a layer with `pattern`.
        plain: whether the draft layer has no token compression although the model has it.
        streams: default of `hc_mult`, the number of residual streams that the layer reads; 0 for one plain
            stream.
    """

    count: str = "num_nextn_predict_layers"
    default_count: int = 0
    max_count: int | None = None
    at: str = "model.layers.{n}"
    joined: str = "eh_proj"
    norms: tuple[str, ...] = ("enorm", "hnorm", "shared_head.norm")
    outside: str | None = None
    split: bool = False
    kind: str = "full"
    dense: bool = False
    heads: bool = False
    block: str = ""
    pattern: bool = False
    last: tuple[str, ...] = ()
    plain: bool = False
    streams: int = 0


_DEEPSEEK = DraftFamily()
_QWEN = DraftFamily(
    count="mtp_num_hidden_layers", at="mtp.layers.{i}", joined="fc", outside="mtp", split=True,
    norms=("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding"),
)  # fmt: skip
_FAMILIES = {
    **dict.fromkeys(("deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe", "glm4_moe_lite"), _DEEPSEEK),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text"), _QWEN),
    "qwen3_next": replace(_QWEN, count="num_nextn_predict_layers", default_count=1),
    "ernie4_5_moe": DraftFamily(
        at="model.mtp_block.{i}", joined="mtp_linear_proj", norms=("mtp_emb_norm", "mtp_hidden_norm"),
        dense=True,
    ),
    "mimo": DraftFamily(
        at="model.mtp_layers.{i}", joined="input_proj",
        norms=("token_layernorm", "hidden_layernorm", "final_layernorm"),
    ),
    "mimo_v2_flash": DraftFamily(
        default_count=1, max_count=1, at="model.mtp.layers.{i}", norms=("enorm", "hnorm", "final_layernorm"),
        kind="sliding", dense=True,
    ),
    **dict.fromkeys(("step3p7", "step3p7_text"), DraftFamily(dense=True, heads=True)),
    **dict.fromkeys(
        ("minimax_m3", "minimax_m3_vl"),
        DraftFamily(
            count="num_mtp_modules", at="model.mtp.layers.{i}", norms=("enorm", "hnorm", "final_layernorm"),
            block="transformer_layer.",
        ),
    ),
    **dict.fromkeys(
        ("deepseek_v4", "deepseek_ref"), DraftFamily(at="mtp.{i}", kind="sliding", plain=True, streams=4)
    ),
    "nemotron_h": DraftFamily(
        at="mtp.layers.{i}", norms=("enorm", "hnorm"), split=True, pattern=True, last=("final_layernorm",)
    ),
}  # fmt: skip


def mtp_draft(
    architecture: Architecture, config: Mapping[str, Any], tensors: tuple[HeaderTensor, ...] | None,
    tokens: int, stages: int,
) -> Architecture:  # fmt: skip
    """Return an architecture that has only the draft layers (MTP) of the checkpoint, numbered from 0.

    Args:
        architecture: the target model.
        config: the target model's config.json.
        tensors: the checkpoint's tensor headers, or None if they are not known.
        tokens: tokens drafted per step.
        stages: number of pipeline stages.

    Raises:
        DeploymentError: the model has no draft layers, the checkpoint lacks their tensors, or vLLM refuses
            `tokens`.
    """
    count = _count(architecture, config)
    family = _family(architecture, config)
    if tokens > count and tokens % count:
        raise DeploymentError(
            f"{tokens} is not a multiple of the {count} draft layers ({family.count})",
            field="--num-speculative-tokens", hint=f"for example {count}",
        )  # fmt: skip
    first = family.at.format(i=0, n=architecture.layers)
    if tensors is not None and not any(f"{first}." in tensor.name for tensor in tensors):
        raise DeploymentError(
            f"the checkpoint holds no tensors of its own draft layers ({first})",
            field=FIELD,
            hint=f"leave out {FIELD}",
        )
    if family.pattern:
        return _patterned(architecture, family, _parts(config), stages)
    found = [*_layers(architecture, family, count)]
    if stages > 1:
        found.append(_vocabulary(architecture, "mtp.embed_tokens.weight", "embedding"))
    model = _template(architecture, family)
    cache = tuple(replace(model, layer=i, shares=None) for i in range(count))
    return replace(
        architecture, layers=count, tensors=tuple(found), cache_layers=cache, rotary=None, recipe=None
    )


def streams_of(architecture: Architecture, config: Mapping[str, Any]) -> int:
    """Return how many hidden states per token the MTP draft layers receive from the target model."""
    return _family(architecture, config).streams or 1


def _family(architecture: Architecture, config: Mapping[str, Any]) -> DraftFamily:
    """Return the rules by which the model's family builds its draft layers (MTP).

    The number of residual streams (`hc_mult`) is read from `config`.
    """
    family = _FAMILIES[architecture.model_type]
    if not family.streams:
        return family
    return replace(family, streams=Fields(config).integer("hc_mult", family.streams, limit="width"))


def _count(architecture: Architecture, config: Mapping[str, Any]) -> int:
    """Return the number of MTP draft layers that the config states.

    Raises:
        DeploymentError: the model has no draft layers.
    """
    text = config.get("text_config")
    places = [text, config] if isinstance(text, Mapping) else [config]
    known = _FAMILIES.get(architecture.model_type)
    names = (known.count,) if known is not None else _COUNTS
    stated = next((place[name] for name in names for place in places if place.get(name) is not None), None)
    if stated is not None and (
        isinstance(stated, bool) or not isinstance(stated, int) or not 0 <= stated <= 64
    ):
        raise DeploymentError(f"{stated!r:.40} is not a number of draft layers (0 to 64)", field=names[0])
    if known is None:
        why = "is not planned" if stated else f"does not exist in {architecture.model_type} models"
        raise DeploymentError(
            f"multi-token prediction {why}: config.json states {stated or 'no'} draft layers",
            field=FIELD, hint=f"leave out {FIELD}, or name a draft model",
        )  # fmt: skip
    count = known.default_count if stated is None else stated
    if not count:
        raise DeploymentError(
            f"the model has no multi-token prediction layers: {known.count} in config.json is missing or 0",
            field=FIELD, hint=f"leave out {FIELD}, or name a draft model",
        )  # fmt: skip
    return min(count, known.max_count or count)


def _template(architecture: Architecture, family: DraftFamily) -> CacheLayer:
    """Return a KV cache layer of the model with the same heads and head sizes as the MTP draft layers.

    If some of the model's matching layers have an indexer (sparse attention), the result is one of those.
    """
    kinds = (family.kind, "mla") if family.kind == "full" else (family.kind,)
    compress = any(layer.compression > 1 for layer in architecture.cache_layers)
    like = [layer for layer in architecture.cache_layers if layer.kind in kinds]
    if (compress and not family.plain) or not like:
        raise DeploymentError(
            f"the attention of the draft layers of {architecture.model_type} is not supported",
            field=FIELD, hint=f"leave out {FIELD}",
        )  # fmt: skip
    return [layer for layer in like if layer.index_size == max(every.index_size for every in like)][-1]


def _layers(architecture: Architecture, family: DraftFamily, count: int) -> Iterator[TensorSpec]:
    """Yield the tensors of `count` MTP draft layers, with the names that the checkpoint gives them."""
    attention, mlp = _template(architecture, family).layer, _mlp_of(architecture, family)
    hidden = architecture.hidden_size
    for i in range(count):
        at = family.at.format(i=i, n=architecture.layers + i)
        for tensor in architecture.tensors:
            from_mlp = tensor.role in ("mlp", "expert", "router") or ".mlp." in tensor.name
            if tensor.layer is None or tensor.layer != (mlp if from_mlp else attention):
                continue
            if family.plain and ".compressor." in tensor.name:
                continue
            rest = tensor.name.partition(f".{tensor.layer}.")[2]
            yield replace(tensor, name=f"{at}.{family.block}{rest}", layer=i)
        if family.outside is None:
            yield from _beside(family, at, hidden, i)
        if family.heads:
            yield _vocabulary(architecture, f"{at}.shared_head.head.weight", "head", i)
    if family.outside is not None:
        yield from _beside(family, family.outside, hidden, None)


_KINDS = {"attention": "*", "full_attention": "*", "moe": "E", "*": "*", "E": "E"}


def _parts(config: Mapping[str, Any]) -> str:
    """Return the parts of Nemotron-H's draft layer (NemotronHConfig), one letter each.

    `*` is an attention part and `E` an experts part.
    """
    listed = config.get("mtp_hybrid_override_pattern") or config.get("mtp_layers_block_type") or "*E"
    if not isinstance(listed, (str, list)) or not all(str(kind) in _KINDS for kind in listed):
        raise DeploymentError(
            f"{listed!r:.40} is not supported: vLLM builds only attention and experts",
            field="mtp_hybrid_override_pattern", hint=f"leave out {FIELD}",
        )  # fmt: skip
    return "".join(_KINDS[kind] for kind in listed)


def _patterned(architecture: Architecture, family: DraftFamily, parts: str, stages: int) -> Architecture:
    """Return the architecture of a Nemotron-H draft layer; each letter of `parts` counts as one layer."""
    attention = next((each for each in architecture.cache_layers if each.kind == "full"), None)
    routed = next((each.layer for each in architecture.tensors if each.role == "expert"), None)
    if (attention is None and "*" in parts) or (routed is None and "E" in parts):
        raise DeploymentError(
            "the draft has a kind of layer that the model lacks, so its widths are unknown", field=FIELD,
            hint=f"leave out {FIELD}",
        )  # fmt: skip
    found, cache = [], []
    for i, kind in enumerate(parts):
        at = family.at.format(i=i)
        like = attention.layer if kind == "*" and attention is not None else routed
        for tensor in architecture.tensors:
            if tensor.layer == like is not None:
                rest = tensor.name.partition(f".{like}.")[2]
                found.append(replace(tensor, name=f"{at}.{rest}", layer=i))
        if kind == "*" and attention is not None:
            cache.append(replace(attention, layer=i))
        if i == 0:
            found += _beside(family, at, architecture.hidden_size, i)
    end = family.at.format(i=len(parts) - 1)
    width = (architecture.hidden_size,)
    found += [
        TensorSpec(f"{end}.{name}.weight", width, "norm", "RMSNorm", len(parts) - 1) for name in family.last
    ]
    if stages > 1:
        found.append(_vocabulary(architecture, "mtp.embed_tokens.weight", "embedding"))
    return replace(
        architecture, layers=len(parts), tensors=tuple(found), cache_layers=tuple(cache), rotary=None,
        recipe=None,
    )  # fmt: skip


def _beside(family: DraftFamily, at: str, hidden: int, layer: int | None) -> Iterator[TensorSpec]:
    """Yield the norms of an MTP draft layer and the matrix that joins embedding and hidden state.

    Tensor parallelism divides the matrix in some families. Only in these families is the matrix quantized.
    """
    if family.streams:
        yield from _streams(family, at, hidden, layer)
        return
    kind, shard = ("Linear", 0) if family.split else ("KeptLinear", None)
    yield TensorSpec(f"{at}.{family.joined}.weight", (hidden, 2 * hidden), "mlp", kind, layer, shard_dim=shard)
    for name in family.norms:
        yield TensorSpec(f"{at}.{name}.weight", (hidden,), "norm", "RMSNorm", layer)


def _streams(family: DraftFamily, at: str, hidden: int, layer: int | None) -> Iterator[TensorSpec]:
    """Yield the matrices and norms of a DeepSeek-V4 draft layer that joins several residual streams.

    There is one matrix for the embedding and one for each stream, in the model's linear format. The head that
    combines the streams has a few hundred KiB in float32. Source: models/deepseek_v4/nvidia/mtp.py.
    """
    for name in ("e_proj", "h_proj"):
        yield TensorSpec(f"{at}.{name}.weight", (hidden, hidden), "mlp", "Linear", layer)
    for name in family.norms:
        yield TensorSpec(f"{at}.{name}.weight", (hidden,), "norm", "RMSNorm", layer)
    name, shape = f"{at}.hc_head_fn", (family.streams, family.streams * hidden)
    yield TensorSpec(name, shape, "norm", "HyperHead", layer, dtype="float32")


def _mlp_of(architecture: Architecture, family: DraftFamily) -> int:
    """Return the index of a layer of the model whose MLP has the shapes of the draft layers' MLP."""
    experts = {tensor.layer for tensor in architecture.tensors if tensor.role == "expert"}
    if not family.dense:
        return architecture.layers - 1
    plain = [layer.layer for layer in architecture.cache_layers if layer.layer not in experts]
    if not plain:
        raise DeploymentError(
            "the draft layers are dense but no layer of the model is, so their width is unknown", field=FIELD,
            hint=f"leave out {FIELD}",
        )  # fmt: skip
    return plain[0]


def _vocabulary(architecture: Architecture, name: str, role: Any, layer: int | None = None) -> TensorSpec:
    """Return a tensor [vocabulary, hidden] named `name`: an embedding or an output head of the draft."""
    shape = (architecture.vocab_size, architecture.hidden_size)
    return TensorSpec(name, shape, role, "Embedding", layer, shard_dim=0)
