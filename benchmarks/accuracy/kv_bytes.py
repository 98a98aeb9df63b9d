"""Cache bytes of one sequence, from a plan of vLLM and from the layers that plans are made from.

kv_oracle.py is compared with both, here and in tests/planner/test_kv_oracle.py.
"""

from __future__ import annotations

from math import prod

from tonnage.planner.model.architecture import Architecture, CacheLayer
from tonnage.planner.plans import Plan

# Model types whose blocks hold something other than K, V and latents of tokens: pages of compressed tokens, or
# expanded latents. Their plans are compared with vLLM's own functions (section vllm_blocks,
# tests/planner/test_vllm_groups.py).
OWN_LAYOUT = ("deepseek_v4", "deepseek_ref", "minicpm3")


def by_plan(plan: Plan, tokens: int) -> int:
    """Return the bytes that grow with the sequence, from the groups and the block of the plan.

    Blocks count as if they were cut to the token. States and encoder outputs, which are padded to pages, are
    left out.
    """
    layout = plan.kv_cache.layout
    total = 0
    for group in layout.groups:
        if group.kind in ("state", "cross"):
            continue
        kept = tokens if group.window is None else min(tokens, group.window)
        slots = min(len(group.layers), layout.layer_slots)  # pages of several sizes are one slot together
        total += kept * slots * layout.slot_bytes // (group.block_size or layout.block_size)
    return total


def by_layers(architecture: Architecture, tokens: int, *, source_tokens: int = 0) -> tuple[int, int]:
    """Return (bytes that grow, fixed bytes) of a 16-bit cache, layer by layer.

    ``source_tokens`` is the length of the encoder's output where the model does not fix it.
    """
    growing = fixed = 0
    for layer in architecture.cache_layers:
        if layer.shares is not None:
            continue
        if layer.kind == "state":
            fixed += sum(prod(s.shape) * (4 if s.dtype == "float32" else 2) for s in layer.states)
        elif layer.kind == "cross":
            fixed += 2 * layer.elements_per_entry * (layer.source_tokens or source_tokens)
        else:
            growing += 2 * (layer.elements_per_entry + layer.index_size) * _entries(layer, tokens)
    return growing, fixed


def _entries(layer: CacheLayer, tokens: int) -> int:
    if layer.window is not None:
        return min(tokens, layer.window)
    return tokens // layer.compression
