"""KVLayout: what one block of the KV pool holds and costs.

One physical pool: a block id may belong to any group. A block has ``layer_slots`` layer slots; the group
that owns it stores its i-th layer in slot i. All groups therefore have the same bytes per block, as in
vLLM's hybrid KV cache groups (vllm/v1/core/kv_cache_utils.py, 0.32.0); a group with fewer layers leaves
slots unused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GroupKind = Literal["full", "sliding", "chunked", "mla", "state", "cross"]


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share one block table per sequence.

    ``layers`` are model layer indices (slot = position); ``window`` counts the tokens a query sees,
    itself included (None for full attention). ``block_size``: tokens one block of this group holds, None:
    the layout's (engines stretch it where layers of different bytes per token share a pool).
    """

    kind: GroupKind
    layers: tuple[int, ...]
    window: int | None = None
    block_size: int | None = None


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Geometry of the pool. Storage order: [block, layer slot, K or V, slot in block, KV head, head size].

    ``page_bytes``: bytes of one layer slot of a block where they are not K and V of ``kv_heads`` x
    ``head_size`` (MLA latents, states, padded pages); None: they are.
    """

    groups: tuple[KVGroup, ...]
    block_size: int
    layer_slots: int
    kv_heads: int
    head_size: int
    dtype: str
    dtype_bytes: int
    page_bytes: int | None = None

    @property
    def slot_bytes(self) -> int:
        """Bytes of one layer slot of a block."""
        if self.page_bytes is not None:
            return self.page_bytes
        return 2 * self.block_size * self.kv_heads * self.head_size * self.dtype_bytes

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block, whatever group owns it (unused layer slots included)."""
        return self.layer_slots * self.slot_bytes

    def token_bytes(self, group: KVGroup) -> int:
        """Bytes of one token in all layers of ``group``, padding included. Pages of several sizes (MLA latents
        beside the keys of an indexer) are one slot together, however many they are."""
        slots = min(len(group.layers), self.layer_slots)
        return slots * self.slot_bytes // (group.block_size or self.block_size)

    @property
    def slides(self) -> bool:
        """Sliding layers stop growing at their window: one more token then costs nothing."""
        return any(group.kind == "sliding" for group in self.groups)

    @property
    def bytes_per_token(self) -> int | None:
        """Bytes one more token costs in the long run; None for a hybrid, where it has no single meaning. An
        encoder keeps nothing: 0, and no group."""
        if not self.groups:
            return 0
        if len(self.groups) != 1 or self.groups[0].kind == "state":
            return None
        return self.token_bytes(self.groups[0])
