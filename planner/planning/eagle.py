"""EAGLE and EAGLE-3 drafts: one decoder layer, or a few, that read the model's hidden states.

Modules as vLLM 0.32.0 builds them (model_executor/models/llama_eagle.py, llama_eagle3.py, qwen3_eagle3.py):
EAGLE joins embedding and hidden state in ``fc``; EAGLE-3 joins the hidden states of several layers in it, and
its first layer attends to embedding and hidden state side by side; its head may be of a smaller vocabulary,
with the place of each row in the model's. The embedding is the model's own, and EAGLE's head where the draft
stores none (v1/worker/gpu/spec_decode/eagle/utils.py); an embedding that is stored with the draft stays beside
the model's if a value differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tonnage.planner.engines.tensors import padded_rows
from tonnage.planner.errors import ConfigError, DeploymentError, UnsupportedArchitecture
from tonnage.planner.families.registry import build_architecture
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.tensor import HeaderTensor, TensorSpec
from tonnage.planner.records import dataclass, replace

_FIELD = "--speculative-model"
# Class names by the family of the layer (model_executor/models/registry.py); a plain class name is EAGLE's
# where the draft's own name says so (config/speculative.py)
_EAGLE3 = {
    "Eagle3LlamaForCausalLM": "llama", "LlamaForCausalLMEagle3": "llama", "PEagleDraftModel": "llama",
    "Eagle3MiniMaxM2ForCausalLM": "llama", "Eagle3Qwen2_5vlForCausalLM": "llama",
    "Eagle3Qwen3vlForCausalLM": "llama", "PeagleLlamaForCausalLM": "llama", "Eagle3Qwen3ForCausalLM": "qwen3",
    "PeagleQwen3ForCausalLM": "qwen3",
}  # fmt: skip
_EAGLE = {"EagleLlamaForCausalLM": "llama"}
_PLAIN = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3"}
_CLASS = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_AUX = 3  # hidden states that EAGLE-3 reads where the file does not list them
# Fields of drafts that no plain model has; those that shape a tensor are read here
_OWN_FIELDS = (
    "draft_vocab_size", "target_hidden_size", "eagle_config", "num_aux_hidden_states", "norm_before_fc",
    "fc_norm", "norm_before_residual", "norm_output", "eagle_aux_hidden_state_layer_ids", "parallel_drafting",
    "mask_token_id", "target_model_type", "target_layer_count", "truncated_vocab_size", "ptd_token_id",
    "modal_type",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Eagle:
    """``method``: vLLM's name of it. ``optional``: an embedding stored with the draft, that is held only if its
    values differ. ``reads``: hidden states of so many of the model's layers, beside the last one's."""

    architecture: Architecture
    method: str
    optional: TensorSpec | None = None
    reads: int = 0


def is_eagle(config: Mapping[str, Any], name: str) -> bool:
    if config.get("speculators_model_type") in ("eagle", "eagle3"):
        return True
    listed = config.get("architectures")
    first = listed[0] if isinstance(listed, list) and listed else None
    return first in _EAGLE3 or first in _EAGLE or (first in _PLAIN and _named(name) is not None)


def _named(name: str) -> int | None:
    """Which EAGLE a name says, as vLLM reads it (config/speculative.py)."""
    low = name.lower()
    return 1 if "eagle-" in low else 3 if "eagle3" in low else None


def eagle_draft(
    config: Mapping[str, Any], name: str, model: Architecture, tensors: tuple[HeaderTensor, ...] | None
) -> Eagle:
    """Of ``model``, the target. Raises TonnageError for a draft that does not go with it or is not known."""
    stored = config.get("speculators_model_type")
    if stored is not None:  # the speculators library: the layer's config apart
        outer, layer = config, config.get("transformer_layer_config")
        if not isinstance(layer, Mapping):
            raise ConfigError("missing or no object", field="transformer_layer_config")
        family = layer.get("model_type")
        third = stored == "eagle3"
        if family not in _CLASS:
            raise UnsupportedArchitecture(f"drafts of {family!r:.40} layers are not known", field="model_type")
    else:
        outer = layer = config
        first = config["architectures"][0]
        third = first in _EAGLE3 or (first in _PLAIN and _named(name) == 3)
        family = (_EAGLE3 if first in _EAGLE3 else _EAGLE if first in _EAGLE else _PLAIN)[first]
    plain = {key: value for key, value in layer.items() if key not in _OWN_FIELDS}
    plain |= {"model_type": family, "architectures": [_CLASS[family]], "tie_word_embeddings": False}
    plain.setdefault("num_hidden_layers", 1)
    made = build_architecture(plain)
    if made.vocab_size != model.vocab_size:
        raise DeploymentError(
            f"its vocabulary of {made.vocab_size:,} is not the model's {model.vocab_size:,}", field=_FIELD
        )
    embedding = next(tensor for tensor in made.tensors if tensor.role == "embedding")
    names = {tensor.name for tensor in tensors or ()}
    reads = _reads(outer) if third else 0
    kept = _third(made, outer, model) if third else _first(made, names if tensors is not None else None)
    held = any(name.endswith("embed_tokens.weight") for name in names)
    made = replace(made, tensors=tuple(kept), recipe=None)
    return Eagle(made, "eagle3" if third else "eagle", embedding if held else None, reads)


def _first(made: Architecture, names: set[str] | None) -> list[TensorSpec]:
    """EAGLE: no norm before the first layer and none behind the last; no head unless one is stored."""
    out = [_joined(made, 2 * made.hidden_size)]
    for tensor in made.tensors:
        outside = tensor.layer is None and tensor.role != "buffer"
        headed = tensor.role == "head" and any("lm_head" in name for name in names or ())
        if headed or not (outside or (tensor.layer == 0 and tensor.name.endswith("input_layernorm.weight"))):
            out.append(tensor)
    return out


def _inner(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = config.get("eagle_config")
    return inner if isinstance(inner, Mapping) else {}


def _listed(config: Mapping[str, Any]) -> Any:
    """Hidden states of the model that go into ``fc``, not yet checked."""
    ids = _inner(config).get("eagle_aux_hidden_state_layer_ids") or config.get(
        "eagle_aux_hidden_state_layer_ids"
    )
    return config.get("num_aux_hidden_states") or (len(ids) if isinstance(ids, list) and ids else _AUX)


def _reads(config: Mapping[str, Any]) -> int:
    """As many as it has no fc for are none."""
    return _listed(config) if _inner(config).get("use_aux_hidden_state", True) else 0


def _third(made: Architecture, config: Mapping[str, Any], model: Architecture) -> list[TensorSpec]:
    inner = _inner(config)
    aux = _listed(config)
    width = config.get("target_hidden_size") or made.hidden_size
    rows = config.get("draft_vocab_size") or made.vocab_size
    for field, value, most in (
        ("num_aux_hidden_states", aux, 64), ("target_hidden_size", width, 1 << 20),
        ("draft_vocab_size", rows, made.vocab_size),
    ):  # fmt: skip
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise ConfigError(f"{value!r:.40} is not between 1 and {most}", field=field)
    if width != model.hidden_size:
        raise DeploymentError(
            f"it reads hidden states of {width:,} values, the model's have {model.hidden_size:,}", field=_FIELD
        )
    out = []
    if inner.get("use_aux_hidden_state", True):
        out.append(_joined(made, width * aux))
        if inner.get("norm_before_fc", config.get("norm_before_fc", False)):
            out.append(TensorSpec("model.input_norm.weight", (width * aux,), "norm", "RMSNorm"))
        if config.get("fc_norm"):
            out += [TensorSpec(f"model.fc_norm.{i}.weight", (width,), "norm", "RMSNorm") for i in range(aux)]
    if rows != made.vocab_size:
        out.append(TensorSpec("draft_id_to_target_id", (rows,), "head", "Parameter", dtype="int64"))
    for tensor in made.tensors:
        if tensor.role == "embedding":
            continue
        if tensor.role == "head":
            tensor = padded_rows(replace(tensor, shape=(rows, *tensor.shape[1:]), tied_to=None))
        elif tensor.layer == 0 and tensor.name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            tensor = replace(tensor, shape=(tensor.shape[0], 2 * tensor.shape[1]))
        out.append(tensor)
    out += [
        TensorSpec(f"model.layers.{i}.hidden_norm.weight", (made.hidden_size,), "norm", "RMSNorm", i)
        for i in range(made.layers)
    ]
    return out


def _joined(made: Architecture, into: int) -> TensorSpec:
    """Whole on every rank."""
    return TensorSpec("model.fc.weight", (made.hidden_size, into), "mlp", "Linear")
