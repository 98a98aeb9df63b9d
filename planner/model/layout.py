"""KVLayout: the contents and the bytes of one block of the KV pool.

There is one physical pool, and a block id may belong to any group of layers. A block has `layer_slots` layer
slots; the group that owns the block stores its i-th layer in slot i. All groups therefore have the same bytes
per block, and a group with fewer layers leaves slots unused. vLLM's hybrid KV cache groups work the same way
(vllm/v1/core/kv_cache_utils.py, 0.32.0).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GroupKind = Literal["full", "sliding", "chunked", "mla", "state", "cross"]


@dataclass(frozen=True, slots=True)
class KVGroup:
    """A group of layers that share one block table per sequence.

    Attributes:
        layers: indices of the layers in the model; the position in the tuple is the layer slot.
        window: number of tokens that a query attends to, including its own; None for full attention.
        block_size: tokens per block of this group; None for the layout's block size. A group has larger blocks
            if its layers need fewer bytes per token than other layers of the same pool.
    """

    kind: GroupKind
    layers: tuple[int, ...]
    window: int | None = None
    block_size: int | None = None


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Geometry of the KV block pool [block, layer slot, K or V, token in block, KV head, head size].

    Attributes:
        page_bytes: bytes of one layer slot, if it holds something other than K and V of kv_heads x head_size
            (MLA latents, states, padded pages); else None.
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
        """Return the bytes of one layer slot: the part of a KV block that stores one layer."""
        if self.page_bytes is not None:
            return self.page_bytes
        return 2 * self.block_size * self.kv_heads * self.head_size * self.dtype_bytes

    @property
    def bytes_per_block(self) -> int:
        """Return the bytes of one KV block, which are the same for every group of layers.

        In a group with fewer layers than slots, the unused layer slots of a block count too.
        """
        return self.layer_slots * self.slot_bytes

    def token_bytes(self, group: KVGroup) -> int:
        """Return the KV cache bytes of one token in all layers of a group, padding included.

        If a layer has pages of several sizes (MLA latents and indexer keys), they count as one slot together.
        """
        slots = min(len(group.layers), self.layer_slots)
        return slots * self.slot_bytes // (group.block_size or self.block_size)

    @property
    def slides(self) -> bool:
        """Return whether any layer group has a sliding window; its cache stops growing at the window size."""
        return any(group.kind == "sliding" for group in self.groups)

    @property
    def bytes_per_token(self) -> int | None:
        """Return the KV cache bytes per additional token of a sequence.

        Returns None for a hybrid model, where the number depends on the length, and 0 for an encoder, which has
        no cache.
        """
        if not self.groups:
            return 0
        if len(self.groups) != 1 or self.groups[0].kind == "state":
            return None
        return self.token_bytes(self.groups[0])
