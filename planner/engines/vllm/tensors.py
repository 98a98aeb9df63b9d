"""The tensors that vLLM holds: the weights of its merged modules, and four scales per attention layer."""

from __future__ import annotations

from dataclasses import replace

from tonnage.planner.deployment import Deployment
from tonnage.planner.engines.tensors import merged_tensors, padded_rows, rotary_tables
from tonnage.planner.engines.version import parse_version
from tonnage.planner.engines.vllm.multimodal import is_lost, lost_towers
from tonnage.planner.engines.vllm.versions import NEWEST, rules
from tonnage.planner.families.registry import family_of
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.tensor import TensorSpec

# MRotaryEmbedding's table has this multiple of the maximum length as rows, because positions of images and
# videos may exceed the token count (model_executor/layers/rotary_embedding/mrope.py).
_MROPE_FACTOR = 4


_GATES = (".gate.weight", ".router.weight")


def tensors_of(architecture: Architecture, flags: Deployment) -> tuple[TensorSpec, ...]:
    """Return the tensors that vLLM holds for one rank's share of the model."""
    if architecture.kind == "encoder":
        return _encoder_tensors(architecture)
    version = NEWEST if flags.engine_version is None else parse_version(flags.engine_version)
    lost = lost_towers(architecture, flags, version)
    if lost:
        left = tuple(tensor for tensor in architecture.tensors if not is_lost(tensor, lost))
        architecture = replace(architecture, tensors=left)
    # Each attention layer has scales of queries, keys, values and probabilities, for every cache dtype
    # (set_default_quant_scales in model_executor/layers/attention/attention.py).
    scales = [
        _scales(f"model.layers.{layer.layer}.{layer.kind}.quant_scales", layer.layer)
        for layer in architecture.cache_layers
        if layer.kind != "state"
    ]
    held = merged_tensors(architecture, _position_factor(architecture, flags))
    # The checkpoint of MiMo has MTP layers, which vLLM loads only as a draft (model_executor/models/mimo.py).
    held = tuple(tensor for tensor in held if tensor.layer is not None or ".mtp_layers." not in tensor.name)
    if flags.runner == "pooling":  # pooling models have no output head (model_executor/models/adapters.py)
        held = tuple(tensor for tensor in held if tensor.role != "head")
    wide = family_of(architecture.model_type).vllm.wide_router
    if wide:
        held = tuple(
            replace(tensor, dtype="float32")
            if tensor.role == "router" and tensor.name.endswith(_GATES)
            else tensor
            for tensor in held
        )
    # The router's correction bias is a parameter in vLLM, not a buffer (model_executor/models/deepseek_v2.py).
    biases = [
        replace(tensor, dtype="float32")
        for tensor in architecture.tensors
        if tensor.role == "buffer" and tensor.name.endswith("correction_bias")
    ]
    return (*held, *biases, *scales)


def _position_factor(architecture: Architecture, flags: Deployment) -> int:
    if architecture.rotary is None or not architecture.rotary.mrope:
        return 1
    version = NEWEST if flags.engine_version is None else parse_version(flags.engine_version)
    one = rules(version).one_mrope_length and family_of(architecture.model_type).vllm.one_mrope_length
    return 1 if one else _MROPE_FACTOR


def _encoder_tensors(architecture: Architecture) -> tuple[TensorSpec, ...]:
    """Return the tensors of vLLM's encoder classes (models/bert.py, roberta.py, modernbert.py).

    - Every embedding table is padded to 64 rows.
    - There is no pooler and no output head. Position ids are stored. Token types are not, because vLLM decodes
      them from the token ids.
    - There is one cos/sin table per rotary embedding, and four scales in each attention layer.
    """
    out = []
    for tensor in architecture.tensors:
        if (
            tensor.role == "head"
            or "pooler." in tensor.name
            or (tensor.role == "norm" and tensor.name.startswith(("lm_head.", "head.")))
        ):
            continue
        if tensor.role == "buffer" and not tensor.name.endswith("position_ids"):
            continue
        out.append(padded_rows(tensor) if tensor.role == "embedding" else tensor)
    if architecture.rotary is not None:
        out += rotary_tables(architecture, architecture.rotary.positions or architecture.max_model_len)
    out += [_scales(f"layers.{layer}.encoder.quant_scales", layer) for layer in range(architecture.layers)]
    return tuple(out)


def _scales(name: str, layer: int) -> TensorSpec:
    return TensorSpec(name, (4,), "buffer", "Attention", layer, dtype="float32")
