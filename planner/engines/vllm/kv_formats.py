"""vLLM's --kv-cache-dtype: the effective cache format, and the bytes of one token in one layer.

Source files are from vLLM 0.32.0. A layer's attention backend defines how its cache is packed (customize_spec):

- Per-token-head and UltraQuant store their scales (v1/attention/backends/triton_attn.py,
  ops/ultraquant/format.py).
- TurboQuant stores K and V in one slot of an even number of bytes (layers/quantization/turboquant/config.py).
- NVFP4 has an fp8 scale per 16 values (nvfp4_kv_cache_full_dim in utils/torch_utils.py).
- Octave exists from 0.33 on (v1/attention/ops/rocm_octave.py).

tests/planner/test_kv_formats.py compares page sizes with the spec classes.
"""

from __future__ import annotations

from collections.abc import Callable

from tonnage.planner.deployment import Deployment
from tonnage.planner.devices.catalogue import capability_of, is_amd
from tonnage.planner.engines.version import Version
from tonnage.planner.engines.vllm.versions import rules
from tonnage.planner.errors import DeploymentError
from tonnage.planner.model.architecture import Architecture, CacheLayer
from tonnage.planner.model.dtypes import KV_DTYPE_BYTES
from tonnage.planner.quantization.kv_cache import StoredCache
from tonnage.planner.units import ceil_div

_FLAG = "--kv-cache-dtype"

# Format -> bytes of one token's latent and its scales in sparse MLA (get_kv_cache_spec in
# layers/attention/mla_attention.py). In fp8_ds_mla, a token has 512 fp8 values, 16 bytes of scales and 64 bf16
# rotary values. nvfp4_ds_mla, for Blackwell, has 4-bit values.
ROW_BYTES = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}

# TurboQuant format -> (bits of a key element, bits of a value element); 8 means fp8 without a scale
# (TQ_PRESETS).
_TURBOQUANT = {
    "turboquant_k8v4": (8, 4),
    "turboquant_4bit_nc": (4, 4),
    "turboquant_k3v4_nc": (3, 4),
    "turboquant_3bit_nc": (3, 3),
}
# Octave format -> (bits of a value element, whether a whole key has one scale).
_OCTAVE = {"octave_k3v4": (4, False), "octave_k3v3": (3, False), "octave_k3v3_compact": (3, True)}
_OCTAVE_BLOCK, _OCTAVE_HEAD = 64, 256  # Octave's HADAMARD_BLOCK, and the only head size of its kernels

# Cache format -> first vLLM version that has it (config/cache.py of 0.31 to 0.33).
_SINCE = {"ultraquant_4bit": (0, 32, 0), **dict.fromkeys(_OCTAVE, (0, 33, 0))}


def _per_token_head(bits: int) -> Callable[[int, int], int]:
    return lambda key, value: (key * bits) // 8 + (value * bits) // 8 + 2 * 4  # K and V have an fp32 scale each


def _turboquant(key_bits: int, value_bits: int) -> Callable[[int, int], int]:
    def slot(key: int, value: int) -> int:
        keys = key if key_bits == 8 else ceil_div(key * key_bits, 8) + 2  # each key has an fp16 norm of 2 bytes
        values = ceil_div(key * value_bits, 8) + 4  # each value has an fp16 scale and an fp16 zero point
        return keys + values + (keys + values) % 2

    return slot


def _grouped_4bit(group: int) -> Callable[[int, int], int]:
    return lambda key, value: 2 * (key // 2 + key // group)  # each group of values has a scale of one byte


# Packed format -> function from the head sizes of K and V to the bytes of one token in one KV head. Octave is
# missing because its bytes also depend on the rotary dimensions.
PACKED: dict[str, Callable[[int, int], int]] = {
    "int4_per_token_head": _per_token_head(4),
    "int8_per_token_head": _per_token_head(8),
    "fp8_per_token_head": _per_token_head(8),
    "nvfp4": _grouped_4bit(16),
    "nvfp4_4over6": _grouped_4bit(16),
    "ultraquant_4bit": _grouped_4bit(32),  # values per scale: GROUP_SIZE in ops/ultraquant/format.py
    **{name: _turboquant(*bits) for name, bits in _TURBOQUANT.items()},
}

PLAIN = {**KV_DTYPE_BYTES, "fp8_inc": 1}
NAMES = (*PLAIN, *ROW_BYTES, *PACKED, *_OCTAVE)


def choose(
    flags: Deployment, dtype: str, architecture: Architecture, version: Version,
    stored: StoredCache | None,
) -> str:  # fmt: skip
    """Return the KV cache format of a deployment, after resolving ``auto``.

    ``stored`` is the KV cache format that the checkpoint's config requests, or None.

    Raises:
        DeploymentError: no attention backend supports the format for this deployment.
    """
    found = flags.kv_cache_dtype
    if found == "auto" and stored is not None and stored.dtype is not None and rules(version).stored_kv_dtype:
        found = stored.dtype
    if sparse_latent(architecture):
        found = _of_sparse(found, flags, architecture, version)
    found = dtype if found == "auto" else found
    _check(found, flags, architecture, version)
    return found


def sparse_latent(architecture: Architecture) -> bool:
    """Return whether the model has sparse MLA, where an indexer selects the tokens to attend to.

    Examples are DeepSeek-V3.2 and GLM-5.
    """
    return any(
        layer.kind == "mla" and layer.index_size and layer.compression == 1
        for layer in architecture.cache_layers
    )


def _of_sparse(found: str, flags: Deployment, architecture: Architecture, version: Version) -> str:
    """Return the KV cache format of sparse MLA (an indexer selects the latents to read), by GPU and version.

    FlashMLA converts any 8-bit format to fp8_ds_mla. FlashInfer on SM10x keeps plain fp8, and SM12x supports
    only fp8_ds_mla (_canonicalize_sparse_mla_kv_cache_dtype in mla_attention.py, _get_backend_priorities in
    platforms/cuda.py).
    """
    known = rules(version)
    nvidia = flags.device == "cuda" and not is_amd(flags.gpu)
    if not nvidia:
        return found
    major = (capability_of(flags.gpu) or (9, 0))[0]
    if found == "auto" and known.sparse_default_fp8 and architecture.model_type == "deepseek_v32":
        found = "fp8_ds_mla"
    if found == "auto" and known.glm_sparse_fp8 and architecture.model_type == "glm_moe_dsa" and major == 10:
        found = "fp8_e4m3"
    if major == 12:
        return "fp8_ds_mla" if found in ("auto", "fp8", "fp8_e4m3") else found
    plain = known.sparse_flashinfer and major == 10
    return "fp8_ds_mla" if found.startswith("fp8") and not plain else found


def _check(kv_dtype: str, flags: Deployment, architecture: Architecture, version: Version) -> None:
    """Raise DeploymentError for a KV cache format that none of vLLM's attention backends supports."""
    if kv_dtype in PLAIN:
        return
    layers = architecture.cache_layers

    def refuse(why: str) -> None:
        raise DeploymentError(f"{kv_dtype}: {why}", field=_FLAG, hint="use fp8 or auto")

    since = _SINCE.get(kv_dtype, version)
    if version < since:
        refuse(f"vLLM has it from {since[0]}.{since[1]} on")
    if kv_dtype == "fp8_ds_mla" and any(layer.compression > 1 for layer in layers):
        return  # DeepSeek-V4 has its own cache format, also on a CPU
    if flags.device == "cpu":
        refuse("vLLM's CPU attention has no such cache")
    if kv_dtype in ROW_BYTES:
        if not any(layer.kind == "mla" and layer.index_size for layer in layers):
            refuse("a format of sparse latent attention, and this model has none")
        if kv_dtype == "nvfp4_ds_mla" and (capability_of(flags.gpu) or (10, 0))[0] != 10:
            refuse("only GPUs of compute capability 10 read it")
        return
    if any(layer.kind == "mla" for layer in layers):
        refuse("latent attention has no backend for it")
    if packs_whole_layers(kv_dtype) and any(layer.kind in ("sliding", "chunked") for layer in layers):
        refuse("its backend has no sliding windows")
    for layer in layers:
        if kv_dtype.startswith("nvfp4") and layer.value_head_size not in (None, layer.head_size):
            refuse("keys and values of unlike sizes are not supported")
        if kv_dtype in _OCTAVE and layer.kind != "state" and layer.head_size != _OCTAVE_HEAD:
            refuse(f"its kernels are for heads of {_OCTAVE_HEAD} values, this model has {layer.head_size}")


def packs_whole_layers(kv_dtype: str) -> bool:
    """Return whether the KV cache format ``kv_dtype`` stores K and V of a head together in one slot.

    With such a format, the first and last layers of a model without recurrent states are cached in the model's
    own dtype (get_boundary_skip_layers in engine/arg_utils.py).
    """
    return kv_dtype in _TURBOQUANT or kv_dtype == "ultraquant_4bit"


def boundary_layers(architecture: Architecture, kv_dtype: str) -> frozenset[int]:
    """Return the indices of layers cached in the model's dtype if ``kv_dtype`` is a packed format.

    They are the first two and the last two layers, but at most half of all layers. A model with recurrent
    states has no such layers.
    """
    layers = architecture.layers
    if not packs_whole_layers(kv_dtype) or any(layer.kind == "state" for layer in architecture.cache_layers):
        return frozenset()
    edge = min(2, layers // 2)
    return frozenset((*range(edge), *range(layers - edge, layers)))


def head_bytes(kv_dtype: str, key: int, value: int, rotary: int) -> int:
    """Return the KV cache bytes of one token in a KV head; ``rotary`` is the rotated dimensions of a key."""
    if kv_dtype in PACKED:
        return PACKED[kv_dtype](key, value)
    if kv_dtype in _OCTAVE:
        return _octave(*_OCTAVE[kv_dtype], key, rotary)
    return (key + value) * PLAIN[kv_dtype]


def _octave(value_bits: int, compact: bool, head: int, rotary: int) -> int:
    """Return the KV cache bytes of one token in one KV head, in an Octave format.

    Rotated dimensions of a key have 4 bits, all others 3. There is one fp16 scale per 64 dimensions of a key
    (in compact form, one per key) and one for the value. The sum is rounded up to 8 bytes (4 in compact form).
    """
    wide = 0 if compact else rotary
    scales = 1 + (1 if compact else head // _OCTAVE_BLOCK)
    size = wide * 4 // 8 + (head - wide) * 3 // 8 + head * value_bits // 8 + 2 * scales
    unit = 4 if compact else 8
    return ceil_div(size, unit) * unit


def latent_bytes(layer: CacheLayer, kv_dtype: str) -> int:
    """Return the KV cache bytes of one token's MLA latent, which is the same on every rank."""
    return ROW_BYTES.get(kv_dtype) or layer.head_size * PLAIN[kv_dtype]
