"""vLLM's KV pool of DeepSeek-V4: pages of five sizes, packed side by side in one block.

The source is vLLM 0.32.0. Each layer's caches are registered in models/deepseek_v4/attention.py and
compressor.py and v1/attention/backends/mla/sparse_swa.py. The packed block layout is in
v1/core/kv_cache_utils.py (_get_packed_kv_cache_groups, _get_kv_cache_bytes_per_block). The cache has vLLM's
fp8_ds_mla format on a CPU, and by default on NVIDIA GPUs. tests/planner/test_vllm_groups.py compares groups,
blocks and tokens with these functions.
"""

from __future__ import annotations

from tonnage.planner.engines.grouping import Groups, LayerPages, bucket_pages, pack_buckets
from tonnage.planner.engines.version import Version
from tonnage.planner.engines.vllm.versions import rules
from tonnage.planner.errors import DeploymentError, UnsupportedArchitecture
from tonnage.planner.model.architecture import Architecture, CacheLayer

BLOCK = 256  # tokens per block of compressed entries; kernels have no other size (sparse_mla.py)
_WINDOW_BLOCK = 64  # tokens per block of a sliding-window cache (DeepseekV4SWACache)

# Tokens per block of a compressor's state (CompressorStateCache), by compress ratio.
_STATE_BLOCKS = {4: 4, 128: 8}
_ENTRY = 584  # bytes of an fp8_ds_mla entry: 448 fp8 values, 64 bf16 rotary values, 8 bytes of scales
_HEAD, _INDEX = 512, 128  # the only head size and indexer key size of vLLM's kernels for DeepSeek-V4
_ALIGNMENT = 576  # a page is rounded up to a multiple of these bytes

# Values of --kv-cache-dtype that vLLM maps to fp8_ds_mla for DeepSeek-V4. A 16-bit dtype stands for auto, which
# the planner has already resolved to the model's dtype.
_DTYPES = ("bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_ds_mla")


def compressed_groups(architecture: Architecture, version: Version, kv_dtype: str) -> Groups:
    """Return the KV cache groups of a model whose layers compress tokens (DeepSeek-V4).

    Raises:
        UnsupportedArchitecture: vLLM, or the requested version of it, cannot lay out the cache.
        DeploymentError: the cache format is not supported.
    """
    if not rules(version).compressed_cache:
        raise UnsupportedArchitecture(
            "the planner knows the cache of layers that compress tokens from vLLM 0.30 on, not that of "
            + ".".join(map(str, version)),
            field="compress_ratios",
            hint="--engine-version 0.32.0",
        )
    if kv_dtype not in _DTYPES:
        raise DeploymentError(
            f"vLLM keeps this model's cache in fp8 (fp8_ds_mla), not in {kv_dtype}",
            field="--kv-cache-dtype",
            hint="auto or fp8",
        )
    windows = {layer.layer: layer for layer in architecture.cache_layers if layer.kind == "sliding"}
    latents = {layer.layer: layer for layer in architecture.cache_layers if layer.kind == "mla"}
    if not any(layer.index_size for layer in latents.values()):
        raise UnsupportedArchitecture(
            "vLLM 0.32 needs a layer with an indexer (compress ratio 4) to lay out the KV cache: only the "
            "indexer's backend selects the layout that packs pages of different sizes",
            field="compress_ratios",
        )
    pages = [page for i, window in windows.items() for page in _layer(window, latents.get(i))]
    return pack_buckets(bucket_pages(pages))


def _layer(window: CacheLayer, latent: CacheLayer | None) -> list[LayerPages]:
    """Return the KV cache pages that one layer of DeepSeek-V4 registers, in vLLM's order.

    ``window`` is the layer's sliding-window cache, ``latent`` its compressed cache or None.
    """
    i, size = window.layer, window.head_size
    if size != _HEAD or (latent is not None and latent.index_size not in (0, _INDEX)):
        raise UnsupportedArchitecture(
            f"vLLM's kernels support only head size {_HEAD} and indexer key size {_INDEX}",
            field="head_dim" if size != _HEAD else "index_head_dim",
        )
    own = [
        LayerPages(
            i, "sliding", _WINDOW_BLOCK, _aligned(_WINDOW_BLOCK * _ENTRY), (1, size, "window"), window.window
        )
    ]
    if latent is None:
        return own
    ratio = latent.compression
    entries, span = BLOCK // ratio, _STATE_BLOCKS[ratio]
    # With ratio 4, neighbouring entries overlap, because each entry is computed from 8 tokens.
    overlap = 2 if ratio == 4 else 1
    first = []
    if latent.index_size:
        # The indexer's keys are fp8, with one fp32 scale per 128 elements.
        key = latent.index_size + 4 * (latent.index_size // 128)
        first = [
            LayerPages(i, "mla", BLOCK, _aligned(entries * key), (1, latent.index_size, "indexer")),
            _state(i, ratio, span, overlap, latent.index_size),
        ]
    own.append(LayerPages(i, "mla", BLOCK, _aligned(entries * _ENTRY), (1, size, "entries", ratio)))
    return [*first, *own, _state(i, ratio, span, overlap, size)]


def _state(layer: int, ratio: int, span: int, overlap: int, size: int) -> LayerPages:
    """Return the KV cache page of a compressor's state: fp32 keys and scores of uncompressed tokens.

    vLLM caches the state like a layer with a short sliding window.

    Args:
        layer: Index of the layer.
        ratio: Tokens per compressed entry.
        span: Tokens per block of the state.
        overlap: 2 if neighbouring entries overlap, else 1.
        size: Elements of a key.
    """
    page = _aligned(span * 2 * overlap * size * 4)
    return LayerPages(layer, "sliding", span, page, (1, size, "state"), overlap * ratio)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
