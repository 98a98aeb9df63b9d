"""The pool of KV cache blocks: its layout, and the blocks that a sequence of a given length takes from it."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from tonnage.planner.errors import DeploymentError, UnsupportedArchitecture
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.layout import KVGroup, KVLayout
from tonnage.planner.units import ceil_div


@dataclass(frozen=True, slots=True)
class Demand:
    """The most blocks that one sequence ever holds in one KV cache group.

    The number is ``fixed``, or else ceil(min(tokens, most) / block_size) + extra, where ``tokens`` is the
    sequence's length divided by ``shards``.

    Attributes:
        block_size: Tokens per block.
        most: Tokens that a sliding-window or chunked group keeps at once; None keeps all.
        extra: Additional blocks of each sequence, for example because a window begins inside a block.
        fixed: Blocks independent of the sequence's length, for recurrent states and an encoder's output; else
            None.
        shards: Number of ranks that divide a sequence's tokens (decode context parallel).
    """

    block_size: int
    most: int | None = None
    extra: int = 0
    fixed: int | None = None
    shards: int = 1

    def blocks(self, tokens: int) -> int:
        """Return the most KV cache blocks that a sequence of ``tokens`` tokens holds in this KV cache group."""
        if self.fixed is not None:
            return self.fixed
        if self.shards > 1:
            tokens = ceil_div(tokens, self.shards)
        return ceil_div(tokens if self.most is None else min(tokens, self.most), self.block_size) + self.extra


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """The layout of a KV cache pool, and the number of blocks of a sequence in each KV cache group.

    Attributes:
        layout: Groups, shapes and dtype of the cache.
        demands: Number of blocks that a sequence needs, for each of ``layout.groups``.
        notes: Notes for the plan.
        pages: For each group, the bytes of one block in each of its layers; empty if all layers have equal
            bytes.
        apart: Bytes of the pool outside its blocks, for recurrent states of all requests.
        running: Number of requests whose recurrent states fit into ``apart``; None is unlimited.
    """

    layout: KVLayout
    demands: tuple[Demand, ...]
    notes: tuple[str, ...] = ()
    pages: tuple[tuple[int, ...], ...] = ()
    apart: int = 0
    running: int | None = None

    def stage_bytes(self, layers: frozenset[int]) -> int:
        """Return the bytes of one KV cache block on a pipeline stage that holds only ``layers``.

        A block serves one KV cache group at a time, so its size is the maximum over the groups.
        """
        widest = 0
        for place, group in enumerate(self.layout.groups):
            sizes = self.pages[place] if self.pages else (self.layout.slot_bytes,) * len(group.layers)
            widest = max(
                widest, sum(size for layer, size in zip(group.layers, sizes, strict=True) if layer in layers)
            )
        return widest

    def sequence_blocks(self, tokens: int) -> int:
        """Return the most KV cache blocks that a sequence of ``tokens`` tokens holds in all groups together."""
        return sum(demand.blocks(tokens) for demand in self.demands)

    def longest(self, blocks: int, limit: int) -> int:
        """Return the most tokens, up to ``limit``, of a sequence that fits into ``blocks`` KV cache blocks."""
        return bisect_right(range(1, limit + 1), blocks, key=self.sequence_blocks)


@dataclass(frozen=True, slots=True)
class PoolCapacity:
    """The capacity of a pool of KV cache blocks.

    Attributes:
        num_blocks: Blocks of the pool.
        usable_blocks: Blocks that sequences can take.
        blocks_per_sequence: Blocks of a sequence of max_model_len tokens.
        tokens: Tokens that the pool holds, as the engine logs them.
        max_concurrency: Sequences of max_model_len tokens that the pool holds, as the engine logs them.
    """

    num_blocks: int
    usable_blocks: int
    blocks_per_sequence: int
    tokens: int
    max_concurrency: float


def token_pool(
    architecture: Architecture, size: int, dtype: str, dtype_bytes: int, block_size: int = 1
) -> PoolSpec:
    """Return the KV cache pool of an engine that sizes its cache in tokens, such as SGLang.

    A block is ``block_size`` token slots in every layer. ``size`` is the bytes of one token in all layers
    together. ``dtype_bytes`` is the bytes of one value of ``dtype``.
    """
    layers = tuple(layer.layer for layer in architecture.cache_layers if layer.shares is None)
    layout = KVLayout(
        groups=(KVGroup("full", layers),),
        block_size=block_size,
        layer_slots=1,
        kv_heads=architecture.kv_heads,
        head_size=architecture.head_size,
        dtype=dtype,
        dtype_bytes=dtype_bytes,
        page_bytes=size * block_size,
    )
    return PoolSpec(layout, (Demand(block_size),))


def heads_per_rank(heads: int, ranks: int) -> int:
    """Return the KV heads of one rank, at least one: with fewer heads than ranks, heads are replicated.

    Raises:
        DeploymentError: neither of the numbers of heads and ranks divides the other.
    """
    if heads >= ranks and heads % ranks:
        raise DeploymentError(
            f"{ranks} does not divide the model's {heads} KV heads",
            field="--tensor-parallel-size",
            hint=f"choose a divisor of {heads}",
        )
    if heads < ranks and ranks % heads:
        raise DeploymentError(
            f"{ranks} is neither a divisor nor a multiple of the model's {heads} KV heads",
            field="--tensor-parallel-size",
            hint=f"a divisor or multiple of {heads}",
        )
    return max(1, heads // ranks)


@dataclass(frozen=True, slots=True)
class ExpandedHeads:
    """The sizes of an MLA layer in elements: K and V of one head after expansion, and the latent."""

    key: int
    value: int
    latent: int


def expanded_heads(architecture: Architecture) -> ExpandedHeads:
    """Return the sizes of K and V per head after expanding MLA's latent, from shapes of kv_b_proj and o_proj.

    Raises:
        UnsupportedArchitecture: the model has no kv_b_proj.
    """
    shapes = {tensor.name.rpartition("self_attn.")[2]: tensor.shape for tensor in architecture.tensors}
    up, out, down = (shapes.get(f"{n}.weight") for n in ("kv_b_proj", "o_proj", "kv_a_proj_with_mqa"))
    if up is None or out is None or down is None:
        raise UnsupportedArchitecture(
            "the model has no kv_b_proj, without which MLA latents cannot be expanded to K and V",
            field="kv_lora_rank",
        )
    value = out[1] // architecture.heads
    nope = up[0] // architecture.heads - value
    rope = down[0] - up[1]
    return ExpandedHeads(nope + rope, value, up[1])
