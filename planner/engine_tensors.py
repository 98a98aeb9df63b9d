"""The tensors an engine really holds for an Architecture, where it differs from transformers' modules."""

from __future__ import annotations

from tonnage.planner.architecture import Architecture, TensorSpec
from tonnage.planner.engines.version import parse_version
from tonnage.planner.plans import Deployment
from tonnage.planner.records import replace

_VOCAB_PADDING = 64  # vLLM: DEFAULT_VOCAB_PADDING_SIZE, model_executor/layers/vocab_parallel_embedding.py


# Positions of pictures and videos may run ahead of the tokens: MRotaryEmbedding's table is four times as long
# (model_executor/layers/rotary_embedding/mrope.py). vLLM 0.32.0 keeps one length for models whose positions do
# not (models/qwen3_vl.py mrope_positions_factor); pull request 44738 measured four for Qwen3-VL in June 2026.
_MROPE_FACTOR = 4
_ONE_LENGTH = ("qwen3_vl", "qwen3_5", "qwen3_next")
_ONE_LENGTH_SINCE = (0, 32, 0)


def _position_factor(architecture: Architecture, deployment: Deployment) -> int:
    if architecture.rotary is None or not architecture.rotary.mrope or deployment.engine != "vllm":
        return 1
    given = deployment.engine_version
    recent = given is None or parse_version(given) >= _ONE_LENGTH_SINCE
    return 1 if recent and architecture.model_type.startswith(_ONE_LENGTH) else _MROPE_FACTOR


def tensors_of(architecture: Architecture, deployment: Deployment) -> tuple[TensorSpec, ...]:
    """hf: as transformers. vllm: vocabulary rows padded to 64, one cos/sin table instead of frequencies, four
    scales in each attention layer."""
    if deployment.engine == "hf":
        return architecture.tensors
    if architecture.kind == "encoder" and deployment.engine == "vllm":
        from tonnage.planner.engines.encoder import vllm_tensors

        return vllm_tensors(architecture)
    out = []
    for tensor in architecture.tensors:
        if tensor.role == "buffer":
            continue
        if tensor.role in ("embedding", "head") and tensor.shape[0] == architecture.vocab_size:
            rows = -(-tensor.shape[0] // _VOCAB_PADDING) * _VOCAB_PADDING
            tensor = replace(tensor, shape=(rows, *tensor.shape[1:]))
        out.append(tensor)
    if architecture.rotary is not None:
        # get_rope caches one table per distinct rope, [positions, rotated dimensions]
        shape = (
            architecture.max_model_len * _position_factor(architecture, deployment),
            architecture.rotary.dim,
        )
        for i in range(architecture.rotary.tables):
            out.append(TensorSpec(f"rotary_emb.{i}.cos_sin_cache", shape, "buffer", "RotaryEmbedding"))
    if deployment.engine == "vllm":
        # of queries, keys, values and probabilities, whatever the cache's dtype (set_default_quant_scales in
        # model_executor/layers/attention/attention.py)
        for layer in architecture.cache_layers:
            if layer.kind != "state":
                name = f"model.layers.{layer.layer}.{layer.kind}.quant_scales"
                out.append(TensorSpec(name, (4,), "buffer", "Attention", layer.layer, dtype="float32"))
    return tuple(out)
