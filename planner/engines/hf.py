"""This project's engine: which caches it stores, the geometry of its pool, blocks of a sequence.

Layers are grouped as in vLLM (:mod:`.grouping`), so that a plan for either engine counts alike.
"""

from __future__ import annotations

from tonnage.planner.architecture import Architecture, CacheLayer
from tonnage.planner.dtypes import HF_KV_DTYPE_BYTES, KV_SCALE_BYTES
from tonnage.planner.engines.grouping import LayerPages, group_pages
from tonnage.planner.engines.pool import Demand, PoolSpec
from tonnage.planner.errors import UnsupportedArchitecture
from tonnage.planner.layout import KVGroup, KVLayout
from tonnage.planner.records import replace


def build_pool(
    architecture: Architecture, dtype: str, block_size: int, max_num_batched_tokens: int
) -> PoolSpec:
    """Raises UnsupportedArchitecture for caches the engine does not store, and when layers differ in heads or
    head size."""
    layout = _layout(architecture, dtype, block_size)
    demands = []
    for group in layout.groups:
        if group.window is None:
            demands.append(Demand(block_size))
        else:
            # one more block because the window may begin inside one
            demands.append(Demand(block_size, most=group.window - 1 + max_num_batched_tokens, extra=1))
    return PoolSpec(layout, tuple(demands))


def _layout(architecture: Architecture, dtype: str, block_size: int) -> KVLayout:
    layers = architecture.cache_layers
    _only_attention(layers)
    page_bytes = None
    element, scale = HF_KV_DTYPE_BYTES[dtype], KV_SCALE_BYTES.get(dtype, 0)
    if any(layer.kind == "mla" for layer in layers):
        # transformers hands the attention function K and V of every head, made from the latent
        layers = tuple(
            replace(layer, kind="full", kv_heads=architecture.heads, head_size=architecture.head_size)
            for layer in layers
        )
        value = {layer.value_head_size for layer in layers}
        if len(value) != 1 or None in value:
            raise UnsupportedArchitecture("layers differ in it", field="v_head_dim")
        width = architecture.head_size + sum(v for v in value if v is not None)
        page_bytes = block_size * architecture.heads * (width * element + 2 * scale)
    shapes = {(_stored_heads(layer), layer.head_size) for layer in layers}
    if len(shapes) != 1:
        raise UnsupportedArchitecture(
            f"layers with different KV heads or head sizes {sorted(shapes)} are not planned yet",
            field="num_key_value_heads",
        )
    ((heads, head_size),) = shapes
    if scale and page_bytes is None:
        page_bytes = 2 * block_size * heads * (head_size * element + scale)
    groups = _groups(layers, block_size)
    return KVLayout(
        groups=groups,
        block_size=block_size,
        layer_slots=max(len(group.layers) for group in groups),
        kv_heads=heads,
        head_size=head_size,
        dtype=dtype,
        dtype_bytes=element,
        page_bytes=page_bytes,
    )


def _stored_heads(layer: CacheLayer) -> int:
    """KV heads of the pool: transformers repeats them first in some models."""
    return layer.kv_heads if layer.transformers_kv_heads is None else layer.transformers_kv_heads


def _only_attention(layers: tuple[CacheLayer, ...]) -> None:
    """The pool holds K and V of full and sliding layers (latents expanded); nothing else."""
    if not layers:
        raise UnsupportedArchitecture("an encoder generates nothing: there is no cache", field="architectures")
    for layer in layers:
        narrow = layer.kind != "mla" and layer.value_head_size not in (None, layer.head_size)
        if layer.kind not in ("full", "sliding", "mla") or layer.compression > 1 or narrow:
            what = "V narrower than K" if narrow else layer.kind
            raise UnsupportedArchitecture(
                f"layer {layer.layer} ({what}) has no place in the hf engine's pool", field="architectures",
                hint="plan it with --engine vllm",
            )  # fmt: skip


def _groups(layers: tuple[CacheLayer, ...], block_size: int) -> tuple[KVGroup, ...]:
    """Pages are of one size by now, so only kind and window part the layers."""
    pages = [LayerPages(layer.layer, layer.kind, block_size, 1, (), layer.window) for layer in layers]
    return tuple(
        KVGroup(group[0].kind, tuple(page.layer for page in group), group[0].window)
        for group in group_pages(pages)
    )
