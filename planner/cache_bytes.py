"""What one sequence keeps while it generates, by arithmetic alone: no pages, no groups, no engine.

The lower bound of every engine's layout, and the figure of research papers: K and V of the tokens a layer can
still see, latents, compressed entries, indexer keys, encoder outputs, recurrent states.
"""

from __future__ import annotations

from math import prod

from tonnage.planner.architecture import Architecture, CacheLayer
from tonnage.planner.dtypes import ELEMENT_BYTES
from tonnage.planner.errors import DeploymentError
from tonnage.planner.parallel import heads_per_rank
from tonnage.planner.records import dataclass
from tonnage.planner.units import ceil_div

# Bits per element, and elements that share a further scale of so many bits (0: none).
# nvfp4: 16 values share an fp8 scale; int8: one fp32 scale per token and head (vLLM 0.32.0, config/cache.py
# int8_per_token_head), counted with a head of 128.
KV_BITS: dict[str, tuple[int, int, int]] = {
    "float32": (32, 0, 0),
    "float16": (16, 0, 0),
    "bfloat16": (16, 0, 0),
    "fp8": (8, 0, 0),
    "fp8_e4m3": (8, 0, 0),
    "fp8_e5m2": (8, 0, 0),
    "int8": (8, 128, 32),
    "nvfp4": (4, 16, 8),
}


@dataclass(frozen=True, slots=True)
class SequenceBytes:
    """``growing``: bytes of the cached tokens; ``fixed``: states and encoder outputs, whatever the length."""

    growing: int
    fixed: int

    @property
    def total(self) -> int:
        return self.growing + self.fixed


def element_bytes(elements: int, kv_dtype: str) -> int:
    """Bytes of so many cached elements, scales included."""
    if kv_dtype not in KV_BITS:
        raise DeploymentError(f"{kv_dtype!r} is not one of {', '.join(KV_BITS)}", field="--kv-cache-dtype")
    bits, shared, scale = KV_BITS[kv_dtype]
    return ceil_div(elements * bits, 8) + (ceil_div(elements, shared) * scale // 8 if shared else 0)


def entries(layer: CacheLayer, tokens: int) -> int:
    """Entries one layer keeps of a sequence of ``tokens`` tokens."""
    if layer.kind == "sliding" and layer.window is not None:
        return min(tokens, layer.window)
    if layer.kind == "chunked" and layer.window is not None:
        return min(tokens, layer.window)
    return tokens // layer.compression if layer.compression > 1 else tokens


def sequence_bytes(
    architecture: Architecture,
    tokens: int,
    kv_dtype: str,
    *,
    state_dtype: str = "bfloat16",
    source_tokens: int = 0,
    ranks: int = 1,
) -> SequenceBytes:
    """Bytes of one sequence on one of ``ranks`` tensor-parallel ranks.

    ``state_dtype``: of states whose model does not state its own. ``source_tokens``: length of the encoder's
    output where the model does not fix it.
    """
    growing = fixed = 0
    for layer in architecture.cache_layers:
        if layer.shares is not None:
            continue
        if layer.kind == "state":
            fixed += sum(
                _share(prod(s.shape), s.shard_dim, ranks) * ELEMENT_BYTES[s.dtype or state_dtype]
                for s in layer.states
            )
            continue
        elements = layer.elements_per_entry
        if layer.kind != "mla":
            elements = elements // layer.kv_heads * heads_per_rank(layer.kv_heads, ranks)
        if layer.kind == "cross":
            fixed += element_bytes(elements * (layer.source_tokens or source_tokens), kv_dtype)
            continue
        growing += element_bytes((elements + layer.index_size) * entries(layer, tokens), kv_dtype)
    return SequenceBytes(growing, fixed)


def _share(elements: int, shard_dim: int | None, ranks: int) -> int:
    return elements if shard_dim is None else ceil_div(elements, ranks)


def bytes_per_token(architecture: Architecture, kv_dtype: str) -> int:
    """Bytes one more token costs in the long run: layers that still grow (compressed ones by their share)."""
    span = 1 << 20  # beyond every window, and a multiple of every compression
    longer = sequence_bytes(architecture, 2 * span, kv_dtype).growing
    return (longer - sequence_bytes(architecture, span, kv_dtype).growing) // span


def max_sequences(
    architecture: Architecture, pool_bytes: int, tokens: int, kv_dtype: str, block_size: int = 1
) -> int:
    """Sequences of ``tokens`` tokens that a pool holds when paged growth (rounded up to blocks) and the fixed
    state of each sequence come out of the same bytes."""
    rounded = ceil_div(tokens, block_size) * block_size
    each = sequence_bytes(architecture, rounded, kv_dtype).total
    return pool_bytes // each if each else 0


def longest_sequence(
    architecture: Architecture, pool_bytes: int, sequences: int, kv_dtype: str, limit: int
) -> int:
    """The most tokens each of ``sequences`` sequences may have in a pool, at most ``limit``; 0 when their
    states alone do not fit."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if sequence_bytes(architecture, middle, kv_dtype).total * sequences <= pool_bytes:
            low = middle
        else:
            high = middle - 1
    return low
