"""Encoders (BERT and its kin) under any engine: no pool, and what vLLM's own classes hold.

An encoder reads a whole text in one step and keeps nothing between steps, so its cache costs zero bytes per
token by the model's own nature. vLLM 0.32.0 registers no cache for such layers (EncoderOnlyAttention
.get_kv_cache_spec) and keeps one block, the null block (get_kv_cache_config_from_groups in
v1/core/kv_cache_utils.py). Chunked prefill and prefix caching are off
(ModelConfig.is_chunked_prefill_supported), so one step must hold the longest text.
"""

from __future__ import annotations

from tonnage.planner.architecture import Architecture, TensorSpec
from tonnage.planner.dtypes import KV_DTYPE_BYTES
from tonnage.planner.engines.pool import PoolCapacity, PoolSpec
from tonnage.planner.errors import DeploymentError, UnsupportedArchitecture
from tonnage.planner.layout import KVLayout
from tonnage.planner.plans import Deployment, Term
from tonnage.planner.records import replace

_VOCAB_PADDING = 64  # vLLM: DEFAULT_VOCAB_PADDING_SIZE, model_executor/layers/vocab_parallel_embedding.py

# Classes whose vectors vLLM 0.32.0 gives (model_executor/models/registry.py, _EMBEDDING_MODELS).
VLLM_CLASSES = ("BertModel", "RobertaModel", "XLMRobertaModel", "ModernBertModel")

NOTE = (
    "an encoder reads a whole text in one step and keeps nothing between steps: no KV cache, 0 bytes per token"
)
_UNUSED = "--kv-cache-memory-bytes has no effect: there is no pool to size"


def build_pool(architecture: Architecture, flags: Deployment, block_size: int) -> PoolSpec:
    """The pool of nothing. Raises UnsupportedArchitecture for a class that the engine does not have."""
    if flags.engine == "vllm" and architecture.class_name not in VLLM_CLASSES:
        raise UnsupportedArchitecture(
            f"vLLM 0.32 gives no embeddings by {architecture.class_name}: it has no class for it",
            field="architectures",
            hint=f"of the encoders it has {', '.join(VLLM_CLASSES)}",
        )
    if flags.engine not in ("hf", "vllm"):
        raise UnsupportedArchitecture(
            f"{flags.engine} is not planned with an encoder", field="model_type", hint="--engine vllm"
        )
    dtype = flags.kv_cache_dtype
    layout = KVLayout(
        groups=(), block_size=block_size, layer_slots=0, kv_heads=architecture.kv_heads,
        head_size=architecture.head_size, dtype=dtype, dtype_bytes=KV_DTYPE_BYTES.get(dtype, 0),
    )  # fmt: skip
    notes = (NOTE,) if flags.kv_cache_memory_bytes is None else (NOTE, _UNUSED)
    return PoolSpec(layout, (), notes)


def capacity(max_num_seqs: int) -> PoolCapacity:
    """The null block; as many texts at once as the scheduler takes."""
    return PoolCapacity(1, 0, 0, 0, float(max_num_seqs))


def whole_texts(deployment: Deployment, max_model_len: int, tokens: int) -> tuple[Deployment, int]:
    """Flags of an engine that takes a text in one step: no prefix cache, and a step as long as the longest text
    (vLLM's own default for pooling models, engine/arg_utils.py). Raises DeploymentError for a smaller step."""
    asked = deployment.max_num_batched_tokens
    if asked is not None and asked < max_model_len:
        raise DeploymentError(
            f"{asked} is below --max-model-len {max_model_len}: an encoder takes a text in one step",
            field="--max-num-batched-tokens",
            hint=f"at least {max_model_len}",
        )
    return replace(deployment, enable_prefix_caching=False), max(tokens, max_model_len)


def terms() -> list[Term]:
    return [Term("kv_pool_bytes", 0, NOTE, "model_type")]


def vllm_tensors(architecture: Architecture) -> tuple[TensorSpec, ...]:
    """Tensors of vLLM's classes (models/bert.py, roberta.py, modernbert.py): every table of embeddings padded
    to 64 rows, no pooler and no head, position ids kept, token types decoded from the ids; one cos/sin table
    for each rope; four scales in each attention layer."""
    out = []
    for tensor in architecture.tensors:
        if (
            tensor.role == "head"
            or "pooler." in tensor.name
            or (tensor.role == "norm" and _of_head(tensor.name))
        ):
            continue
        if tensor.role == "buffer" and not tensor.name.endswith("position_ids"):
            continue
        if tensor.role == "embedding":
            rows = -(-tensor.shape[0] // _VOCAB_PADDING) * _VOCAB_PADDING
            tensor = replace(tensor, shape=(rows, *tensor.shape[1:]))
        out.append(tensor)
    if architecture.rotary is not None:
        table = (architecture.rotary.positions or architecture.max_model_len, architecture.rotary.dim)
        out += [
            TensorSpec(f"rotary_emb.{i}.cos_sin_cache", table, "buffer", "RotaryEmbedding")
            for i in range(architecture.rotary.tables)
        ]
    for layer in range(architecture.layers):
        name = f"layers.{layer}.encoder.quant_scales"
        out.append(TensorSpec(name, (4,), "buffer", "Attention", layer, dtype="float32"))
    return tuple(out)


def _of_head(name: str) -> bool:
    return name.startswith(("lm_head.", "head."))
