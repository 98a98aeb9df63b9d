"""Element types: their names in config.json, safetensors files and flags, and their sizes."""

from __future__ import annotations

from tonnage.planner.errors import ConfigError

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes per element of the dtypes that a model may be loaded in."""

ELEMENT_BYTES = {**DTYPE_BYTES, "bool": 1, "int64": 8, "complex64": 8}
"""Bytes per element of the model dtypes and of the dtypes that buffers have."""

KV_DTYPE_BYTES = {**DTYPE_BYTES, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
"""Bytes per element of vLLM's --kv-cache-dtype values that have no scales (vllm/config/cache.py, 0.32.0)."""

HF_KV_DTYPE_BYTES = {
    **DTYPE_BYTES,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_per_token_head": 1,
    "int8_per_token_head": 1,
}
"""Bytes per element of the hf engine's --kv-cache-dtype values, which have vLLM's names."""

KV_SCALE_BYTES = {"fp8_per_token_head": 4, "int8_per_token_head": 4}
"""KV cache dtype -> bytes of the fp32 scale stored per token and head, once for K and once for V."""

SAFETENSORS_BITS = {
    "F64": 64,
    "F32": 32,
    "F16": 16,
    "BF16": 16,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F4": 4,
    "I64": 64,
    "I32": 32,
    "I16": 16,
    "I8": 8,
    "U64": 64,
    "U32": 32,
    "U16": 16,
    "U8": 8,
    "BOOL": 8,
}
"""Bits per element of the safetensors dtypes (safetensors 0.6, safetensors/src/tensor.rs)."""

SAFETENSORS_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def config_dtype(name: object) -> str | None:
    """Return the dtype that config.json's `dtype` or `torch_dtype` names, or None if it is absent or "auto".

    The result is a key of DTYPE_BYTES.

    Raises:
        ConfigError: the config names a dtype that is not supported.
    """
    if name is None or name == "auto":
        return None
    if isinstance(name, str):
        short = name.removeprefix("torch.")
        short = {"half": "float16", "float": "float32"}.get(short, short)
        if short in DTYPE_BYTES:
            return short
    raise ConfigError(f"{name!r:.60} is not float32, float16 or bfloat16", field="dtype")


SPELLINGS = (
    frozenset({"float32", "fp32", "float", "f32", "torch.float32"}),
    frozenset({"float16", "fp16", "half", "f16", "torch.float16"}),
    frozenset({"bfloat16", "bf16", "torch.bfloat16"}),
)
"""Sets of names for the same dtype, as used by torch, papers, vLLM's --dtype and llama.cpp."""
