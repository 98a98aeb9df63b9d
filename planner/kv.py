"""KV cache: groups of layers, blocks per sequence, what a pool of so many bytes holds.

The rules are vLLM 0.32.0's (vllm/v1/core/kv_cache_utils.py and kv_cache_interface.py), so that a plan for
either engine counts alike; tests/planner/test_kv_vllm.py holds them against vLLM's own functions.
"""

from __future__ import annotations

from tonnage.planner.architecture import Architecture, CacheLayer
from tonnage.planner.dtypes import HF_KV_DTYPE_BYTES, KV_DTYPE_BYTES, KV_SCALE_BYTES
from tonnage.planner.errors import UnsupportedArchitecture
from tonnage.planner.layout import KVGroup, KVLayout
from tonnage.planner.plan import EngineName
from tonnage.planner.records import dataclass, replace
from tonnage.planner.units import ceil_div

# vLLM: one kind may have up to 1.5 times the layers of another before the larger one is split into
# groups of the smaller one's size (_get_kv_cache_groups_uniform_page_size).
_PADDING_LIMIT = 1.5


def kv_heads_stored(layer: CacheLayer, engine: EngineName) -> int:
    """KV heads the engine stores: transformers repeats them first in some models."""
    if engine == "hf" and layer.transformers_kv_heads is not None:
        return layer.transformers_kv_heads
    return layer.kv_heads


def build_layout(architecture: Architecture, engine: EngineName, dtype: str, block_size: int) -> KVLayout:
    """Geometry of the pool. Raises UnsupportedArchitecture when layers differ in heads or head size."""
    layers = architecture.cache_layers
    page_bytes = None
    element = (HF_KV_DTYPE_BYTES if engine == "hf" else KV_DTYPE_BYTES)[dtype]
    scale = KV_SCALE_BYTES.get(dtype, 0)
    if engine == "hf":
        _only_attention(layers)
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
    shapes = {(kv_heads_stored(layer, engine), layer.head_size) for layer in layers}
    if len(shapes) != 1:
        raise UnsupportedArchitecture(
            f"layers with different KV heads or head sizes {sorted(shapes)} are not planned yet",
            field="num_key_value_heads",
        )
    ((heads, head_size),) = shapes
    if scale and page_bytes is None:
        page_bytes = 2 * block_size * heads * (head_size * element + scale)
    groups = group_layers(layers)
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


def _only_attention(layers: tuple[CacheLayer, ...]) -> None:
    """The hf engine's pool holds K and V of full and sliding layers (latents expanded); nothing else."""
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


def group_layers(layers: tuple[CacheLayer, ...]) -> tuple[KVGroup, ...]:
    """Split layers into groups of (nearly) equal size, each of one kind and window.

    One kind: one group. Otherwise the group size is the smallest kind's layer count, or the largest's when
    that is less than 1.5 times as many; layer i of a kind goes to group i mod (number of its groups).
    Kinds come in the order of their first layer.
    """
    kinds: dict[tuple[str, int | None], list[int]] = {}
    for layer in layers:
        kinds.setdefault((layer.kind, layer.window), []).append(layer.layer)
    counts = [len(indices) for indices in kinds.values()]
    size = max(counts) if max(counts) < min(counts) * _PADDING_LIMIT else min(counts)
    groups = []
    for (kind, window), indices in kinds.items():
        number = ceil_div(len(indices), size)
        for i in range(number):
            groups.append(
                KVGroup("sliding" if kind == "sliding" else "full", tuple(indices[i::number]), window)
            )
    return tuple(groups)


def group_blocks(group: KVGroup, tokens: int, block_size: int, in_flight: int) -> int:
    """Most blocks one sequence of ``tokens`` tokens ever holds in this group.

    A sliding group keeps the last window - 1 tokens and the ``in_flight`` tokens scheduled but not
    settled, plus one block because the window may begin inside a block (SlidingWindowSpec).
    """
    if group.window is None:
        return ceil_div(tokens, block_size)
    return ceil_div(min(group.window - 1 + in_flight, tokens), block_size) + 1


def sequence_blocks(layout: KVLayout, tokens: int, in_flight: int) -> int:
    """Most blocks one sequence of ``tokens`` tokens ever holds, over all groups."""
    return sum(group_blocks(group, tokens, layout.block_size, in_flight) for group in layout.groups)


def largest_fitting(layout: KVLayout, blocks: int, limit: int, in_flight: int) -> int:
    """Longest sequence, at most ``limit`` tokens, whose blocks fit into ``blocks``; 0 when none does."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if sequence_blocks(layout, middle, in_flight) <= blocks:
            low = middle
        else:
            high = middle - 1
    return low


def in_flight_tokens(engine: EngineName, device: str, max_num_batched_tokens: int) -> int:
    """Tokens scheduled but not settled: one step, or two where vLLM schedules asynchronously
    (VllmConfig.max_in_flight_tokens 0.32.0: on by default on GPUs, off on a CPU)."""
    return max_num_batched_tokens * (2 if engine == "vllm" and device != "cpu" else 1)


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a pool holds. ``tokens`` and ``max_concurrency`` for sequences of max_model_len tokens."""

    num_blocks: int
    usable_blocks: int
    blocks_per_sequence: int
    tokens: int
    max_concurrency: float


def capacity(
    layout: KVLayout, num_blocks: int, max_model_len: int, engine: EngineName, in_flight: int
) -> Capacity:
    """vLLM's start-up line: tokens = int(concurrency x max_model_len), concurrency = blocks / blocks of one
    sequence. vLLM counts the null block (block 0) among them; for the hf engine only usable blocks count."""
    per_sequence = sequence_blocks(layout, max_model_len, in_flight)
    usable = max(0, num_blocks - 1)
    counted = num_blocks if engine == "vllm" else usable
    concurrency = counted / per_sequence
    # exact for one group: int() of a float product may fall one short
    tokens = counted * max_model_len // per_sequence if engine == "hf" else int(concurrency * max_model_len)
    return Capacity(num_blocks, usable, per_sequence, tokens, concurrency)
