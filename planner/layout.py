"""KVLayout: what one block of the KV pool holds and costs.

One physical pool: a block id may belong to any group. A block has ``layer_slots`` layer slots; the group
that owns it stores its i-th layer in slot i. All groups therefore have the same bytes per block, as in
vLLM's hybrid KV cache groups (vllm/v1/core/kv_cache_utils.py, 0.32.0); a group with fewer layers leaves
slots unused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GroupKind = Literal["full", "sliding"]


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share one block table per sequence.

    ``layers`` are model layer indices (slot = position); ``window`` counts the tokens a query sees,
    itself included (None for full attention).
    """

    kind: GroupKind
    layers: tuple[int, ...]
    window: int | None = None


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Geometry of the pool. Storage order: [block, layer slot, K or V, slot in block, KV head, head size]."""

    groups: tuple[KVGroup, ...]
    block_size: int
    layer_slots: int
    kv_heads: int
    head_size: int
    dtype: str
    dtype_bytes: int

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block, whatever group owns it (unused layer slots included)."""
        return self.layer_slots * 2 * self.block_size * self.kv_heads * self.head_size * self.dtype_bytes

    @property
    def bytes_per_token(self) -> int | None:
        """Bytes one more token costs in the long run; None for a hybrid, where it has no single meaning."""
        if len(self.groups) != 1:
            return None
        return len(self.groups[0].layers) * 2 * self.kv_heads * self.head_size * self.dtype_bytes
