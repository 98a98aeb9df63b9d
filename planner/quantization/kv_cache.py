"""The KV cache that a quantized checkpoint requests in its `quantization_config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class StoredCache:
    """The KV cache format that a quantized checkpoint requests.

    Attributes:
        method: the tool that wrote the checkpoint: modelopt, compressed-tensors or fp8.
        dtype: the cache's dtype by vLLM's names, None if vLLM ignores the request.
        static_fp8: whether SGLang stores the cache as 8-bit floating point values with scales from the
            checkpoint.
        algorithm: ModelOpt's quant_algo, empty for other tools.
    """

    method: str
    dtype: str | None
    static_fp8: bool
    algorithm: str = ""


def stored_cache(config: Mapping[str, Any]) -> StoredCache | None:
    """Return the KV cache format that a checkpoint's config requests, None if it requests none.

    ModelOpt states it as kv_cache_quant_algo or kv_cache_scheme, compressed-tensors as kv_cache_scheme.
    Sources, vLLM 0.32.0: utils/torch_utils.py get_kv_cache_quant_algo_string,
    model_executor/layers/attention/attention.py. SGLang 0.5.23: compressed_tensors.py, modelopt_quant.py and
    fp8.py of layers/quantization.
    """
    found = config.get("quantization_config")
    if not isinstance(found, Mapping):
        return None
    method = str(found.get("quant_method", ""))
    if method == "compressed-tensors":
        scheme = found.get("kv_cache_scheme")
        return StoredCache(method, "fp8", _is_static_tensor(scheme)) if scheme else None
    if method in ("fp8", "mxfp8"):
        static = str(found.get("kv_cache_quant_algo", "")).lower() == "fp8"
        return StoredCache("fp8", None, True) if static else None
    if method.startswith("modelopt"):
        return _of_modelopt(found)
    # SGLang treats a config that has quant_algo but no quant_method as ModelOpt's. vLLM's layers ignore the
    # cache dtype that such a config requests.
    if not method and "quant_algo" in found:
        stored = _of_modelopt(found)
        return None if stored is None else replace(stored, dtype=None)
    return None


def _is_static_tensor(scheme: object) -> bool:
    """Return whether a KV cache scheme is static, symmetric fp8 with one scale per tensor."""
    return (
        isinstance(scheme, Mapping)
        and scheme.get("type") == "float"
        and scheme.get("num_bits") == 8
        and scheme.get("strategy") == "tensor"
        and bool(scheme.get("symmetric", True))
        and not scheme.get("dynamic", False)
    )


def _of_modelopt(found: Mapping[str, Any]) -> StoredCache | None:
    inner = found.get("quantization")
    places = [inner, found] if isinstance(inner, Mapping) else [found]
    keys = ("kv_cache_scheme", "kv_cache_quant_algo")
    asked = next((place[key] for key in keys for place in places if place.get(key)), None)
    algorithm = str(next((place["quant_algo"] for place in places if place.get("quant_algo")), ""))
    static = isinstance(asked, str) and asked.lower() == "fp8"
    if isinstance(asked, Mapping):
        bits, kind = asked.get("num_bits"), asked.get("type")
        static = (bits, kind) == (8, "float")
        eight = static and asked.get("dynamic") is False
        asked = "fp8" if eight else "nvfp4" if (bits, kind) == (4, "float") else None
    dtype = {"fp8": "fp8_e4m3", "nvfp4": "nvfp4"}.get(asked.lower()) if isinstance(asked, str) else None
    return None if dtype is None and not static else StoredCache("modelopt", dtype, static, algorithm)
