"""EAGLE and EAGLE-3 draft models: one or a few decoder layers that read the target model's hidden states.

vLLM 0.32.0 builds the same modules (model_executor/models/llama_eagle.py, llama_eagle3.py, qwen3_eagle3.py).

* EAGLE: the matrix `fc` maps the concatenated embedding and hidden state to the draft's hidden size.
* EAGLE-3: `fc` maps the concatenated hidden states of several layers of the target model. The first draft layer
attends to embedding and hidden state side by side. The draft's output head may have a smaller vocabulary, with
a table of the target's token ids.
* Both use the target's embedding. EAGLE also uses the target's output head if the draft stores none
(v1/worker/gpu/spec_decode/eagle/utils.py). An embedding stored with the draft is held in addition if its values
differ from the target's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tonnage.planner.engines.tensors import padded_rows
from tonnage.planner.errors import ConfigError, DeploymentError, UnsupportedArchitecture
from tonnage.planner.families.registry import build_architecture
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.tensor import HeaderTensor, TensorSpec

_FIELD = "--speculative-model"
# Class name of a draft -> model family of its decoder layer (vLLM model_executor/models/registry.py). A plain
# class such as LlamaForCausalLM is a draft only if the model's name contains "eagle" (config/speculative.py).
_EAGLE3 = {
    "Eagle3LlamaForCausalLM": "llama", "LlamaForCausalLMEagle3": "llama", "PEagleDraftModel": "llama",
    "Eagle3MiniMaxM2ForCausalLM": "llama", "Eagle3Qwen2_5vlForCausalLM": "llama",
    "Eagle3Qwen3vlForCausalLM": "llama", "PeagleLlamaForCausalLM": "llama", "Eagle3Qwen3ForCausalLM": "qwen3",
    "PeagleQwen3ForCausalLM": "qwen3",
}  # fmt: skip
_EAGLE = {"EagleLlamaForCausalLM": "llama"}
_PLAIN = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3"}
_CLASS = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_AUX = 3  # number of target layers whose hidden states EAGLE-3 reads if the config does not list them.
# Config fields that only drafts have. They are removed before the draft's layers are built as a plain model's.
_OWN_FIELDS = (
    "draft_vocab_size", "target_hidden_size", "eagle_config", "num_aux_hidden_states", "norm_before_fc",
    "fc_norm", "norm_before_residual", "norm_output", "eagle_aux_hidden_state_layer_ids", "parallel_drafting",
    "mask_token_id", "target_model_type", "target_layer_count", "truncated_vocab_size", "ptd_token_id",
    "modal_type",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Eagle:
    """An EAGLE draft model and its connection to the target model.

    Attributes:
        architecture: the draft's tensors and cache layers.
        method: vLLM's name of the method, `eagle` or `eagle3`.
        optional: an embedding stored with the draft, held only if its values differ from the target's; or None.
        reads: number of inner layers of the target model whose hidden states the draft reads, in addition to
            the last layer's.
    """

    architecture: Architecture
    method: str
    optional: TensorSpec | None = None
    reads: int = 0


def is_eagle(config: Mapping[str, Any], name: str) -> bool:
    """Return whether a model is an EAGLE or EAGLE-3 draft, by its config.

    If the config has the class of a plain model, such as LlamaForCausalLM, the model's name decides.
    """
    if config.get("speculators_model_type") in ("eagle", "eagle3"):
        return True
    listed = config.get("architectures")
    first = listed[0] if isinstance(listed, list) and listed else None
    return first in _EAGLE3 or first in _EAGLE or (first in _PLAIN and _version_in_name(name) is not None)


def _version_in_name(name: str) -> int | None:
    """Return the EAGLE version (1 or 3) that vLLM reads from a model's name, or None.

    Source: config/speculative.py of vLLM 0.32.0.
    """
    low = name.lower()
    return 1 if "eagle-" in low else 3 if "eagle3" in low else None


def eagle_draft(
    config: Mapping[str, Any], name: str, model: Architecture, tensors: tuple[HeaderTensor, ...] | None
) -> Eagle:
    """Build the draft of the target `model` from the draft's config and stored tensors.

    Raises:
        TonnageError: the draft does not match the target, or its class is not known.
    """
    stored = config.get("speculators_model_type")
    if stored is not None:  # the speculators library keeps the layer's config in a nested object
        outer, layer = config, config.get("transformer_layer_config")
        if not isinstance(layer, Mapping):
            raise ConfigError("is missing or not an object", field="transformer_layer_config")
        family = layer.get("model_type")
        third = stored == "eagle3"
        if family not in _CLASS:
            raise UnsupportedArchitecture(
                f"drafts with {family!r:.40} layers are not supported", field="model_type"
            )
    else:
        outer = layer = config
        first = config["architectures"][0]
        third = first in _EAGLE3 or (first in _PLAIN and _version_in_name(name) == 3)
        family = (_EAGLE3 if first in _EAGLE3 else _EAGLE if first in _EAGLE else _PLAIN)[first]
    plain = {key: value for key, value in layer.items() if key not in _OWN_FIELDS}
    plain |= {"model_type": family, "architectures": [_CLASS[family]], "tie_word_embeddings": False}
    plain.setdefault("num_hidden_layers", 1)
    made = build_architecture(plain)
    if made.vocab_size != model.vocab_size:
        raise DeploymentError(
            f"the draft's vocabulary of {made.vocab_size:,} is not the model's {model.vocab_size:,}",
            field=_FIELD,
            hint="name a draft that was made for this model",
        )
    embedding = next(tensor for tensor in made.tensors if tensor.role == "embedding")
    names = {tensor.name for tensor in tensors or ()}
    reads = _states_read(outer) if third else 0
    kept = _eagle3_tensors(made, outer, model) if third else _eagle_tensors(made, names)
    held = any(name.endswith("embed_tokens.weight") for name in names)
    made = replace(made, tensors=tuple(kept), recipe=None)
    return Eagle(made, "eagle3" if third else "eagle", embedding if held else None, reads)


def _eagle_tensors(made: Architecture, names: set[str]) -> list[TensorSpec]:
    """Return the tensors of an EAGLE (version 1) draft: those of its decoder layers, `fc` and a stored head.

    The draft has no norm before its first layer or after its last. It has an output head only if the draft's
    checkpoint stores one.
    """
    out = [_joining_matrix(made, 2 * made.hidden_size)]
    for tensor in made.tensors:
        outside = tensor.layer is None and tensor.role != "buffer"
        headed = tensor.role == "head" and any("lm_head" in name for name in names)
        if headed or not (outside or (tensor.layer == 0 and tensor.name.endswith("input_layernorm.weight"))):
            out.append(tensor)
    return out


def _eagle_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the object `eagle_config` of the draft's config.json, empty without one."""
    inner = config.get("eagle_config")
    return inner if isinstance(inner, Mapping) else {}


def _joined_states(config: Mapping[str, Any]) -> Any:
    """Return the number of the target model's hidden states that an EAGLE-3 draft's matrix `fc` concatenates.

    The value is the draft config's and is not validated.
    """
    field = "eagle_aux_hidden_state_layer_ids"
    ids = _eagle_config(config).get(field) or config.get(field)
    return config.get("num_aux_hidden_states") or (len(ids) if isinstance(ids, list) and ids else _AUX)


def _states_read(config: Mapping[str, Any]) -> int:
    """Return how many hidden states of the target model the draft reads; 0 without the matrix `fc`."""
    return _joined_states(config) if _eagle_config(config).get("use_aux_hidden_state", True) else 0


def _eagle3_tensors(made: Architecture, config: Mapping[str, Any], model: Architecture) -> list[TensorSpec]:
    """Return the tensors of an EAGLE-3 draft: `fc` and its norms, the decoder layers, and the output head.

    The head has the draft's own vocabulary, which may be smaller than the target's.
    """
    inner = _eagle_config(config)
    aux = _joined_states(config)
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
            f"the draft reads hidden states of {width:,} values, the model's have {model.hidden_size:,}",
            field=_FIELD,
            hint="name a draft that was made for this model",
        )
    out = []
    if inner.get("use_aux_hidden_state", True):
        out.append(_joining_matrix(made, width * aux))
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


def _joining_matrix(made: Architecture, into: int) -> TensorSpec:
    """Return the draft's matrix `fc` [hidden, into], which maps `into` input values to its hidden size.

    Every rank holds it in full.
    """
    return TensorSpec("model.fc.weight", (made.hidden_size, into), "mlp", "Linear")
