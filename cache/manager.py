"""KVCacheManager: the blocks of every live sequence, from admission to free.

The order of calls, for one request::

    admit -> [extend -> (engine writes K/V) -> commit]* -> free
                    prefill chunks, then one token a step, each first given to append_tokens

`extend` makes room before a step, `commit` says after it what has been written. A step that computes
positions [computed, end) calls ``extend(id, end)`` first, performs the copies it returns in their order, and
only then writes. Engines read `tables` and `slots`; rows are updated in place, so a table is read after the
last `extend` of a step.

Every error is raised before anything changes. Not thread-safe: one scheduler owns it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tonnage.cache.admission import (
    AdmissionRequest,
    Admit,
    Decision,
    Limits,
    Never,
    Snapshot,
    Wait,
    ceil_div,
    decide,
    first_needed_block,
    promised_blocks,
)
from tonnage.cache.errors import (
    DoubleFree,
    InvalidRequest,
    InvariantViolation,
    OutOfOrder,
    PromiseExceeded,
    SequenceExists,
)
from tonnage.cache.invariants import check_invariants
from tonnage.cache.pool import NULL_BLOCK, BlockPool, Int32Array
from tonnage.cache.prefix import HashBlock, PrefixIndex, xxh3_block
from tonnage.cache.publish import publish
from tonnage.cache.tables import Family, Int64Array, SequenceTables, TokenIds, token_array
from tonnage.planner.layout import KVLayout


@dataclass(frozen=True, slots=True)
class Admitted:
    """Runs now. K/V of the first ``cached_tokens`` prompt positions is already in the row's blocks."""

    row: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy the whole block ``src`` to ``dst`` (all layer slots, K and V) before the step writes anything."""

    src: int
    dst: int


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Blocks by state: used + cached + free = usable, used <= promised <= usable. Counters since the start.

    ``query_tokens`` are the prompt tokens of admitted requests, ``hit_tokens`` those served from the cache,
    ``merged`` the duplicate blocks given back when a sequence had computed what another one had published.
    """

    num_blocks: int
    usable: int
    used: int
    cached: int
    free: int
    promised: int
    sequences: int
    evictions: int
    query_tokens: int
    hit_tokens: int
    merged: int


class KVCacheManager:
    """Blocks of all groups of ``layout`` from one pool of ``num_blocks`` (block 0 is the null block).

    ``max_num_batched_tokens`` is the most positions one sequence computes in a step; with sliding groups the
    promise depends on it. Raises CacheConfigError for limits that cannot work. ``hash_block`` is for tests.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        *,
        max_num_seqs: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        enable_prefix_caching: bool = True,
        hash_block: HashBlock = xxh3_block,
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.limits = Limits(layout, self.pool.usable, max_model_len, max_num_seqs, max_num_batched_tokens)
        self.rows = SequenceTables(self.limits)
        self.tables: tuple[Int32Array, ...] = self.rows.blocks
        self.block_size = layout.block_size
        self.windows = tuple(g.window if g.kind == "sliding" else None for g in layout.groups)
        # Without a full group nothing keeps the start of a chain alive: see tonnage.cache.prefix.
        self.prefix_caching = enable_prefix_caching and None in self.windows
        self.index = PrefixIndex(layout, self.pool, hash_block) if self.prefix_caching else None
        self._promised = 0
        self._running = 0
        self._query_tokens = 0
        self._hit_tokens = 0
        self._merged = 0

    # -- admission ---------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """What is promised now."""
        return Snapshot(self._promised, self._running)

    def decide(self, request: AdmissionRequest) -> Decision:
        """`admission.decide` against the current state; changes nothing."""
        return decide(request, self.snapshot(), self.limits)

    def admit(
        self, sequence_id: int, token_ids: TokenIds, max_tokens: int, *, n: int = 1, salt: str | bytes = ""
    ) -> Admitted | Wait | Never:
        """Decide, lock the prefix hit and register the sequence, or change nothing.

        At least the last prompt token is left to compute: its logits are needed. The n - 1 other sequences
        come by `fork` once the prompt is computed; their rows and blocks are promised here. Requests with
        different salts never share a block. Raises SequenceExists, InvalidRequest.
        """
        if sequence_id in self.rows.row_of:
            raise SequenceExists(f"sequence {sequence_id} is already live", field="sequence_id")
        tokens = token_array(token_ids)
        request = AdmissionRequest(len(tokens), max_tokens, n)
        decision = self.decide(request)
        if not isinstance(decision, Admit):
            return decision
        salt_bytes = salt.encode("utf-8", "surrogatepass") if isinstance(salt, str) else bytes(salt)
        rows = self.rows
        row = rows.open(sequence_id, Family(request, salt_bytes, decision.blocks, live=1, forks_left=n - 1))
        rows.tokens[row, : len(tokens)] = tokens
        rows.length[row] = len(tokens)
        rows.limit[row] = request.total_tokens
        self._promised += decision.blocks
        self._running += n
        cached = self._lock_prefix(row, tokens, salt_bytes)
        self._query_tokens += len(tokens)
        self._hit_tokens += cached
        return Admitted(row, cached)

    def _lock_prefix(self, row: int, tokens: Int32Array, salt: bytes) -> int:
        if self.index is None:
            return 0
        blocks = (len(tokens) - 1) // self.block_size
        found = self.index.match(tokens[: blocks * self.block_size].reshape(-1, self.block_size), salt)
        hit = self.index.usable(found)
        count = len(hit.nodes)
        if count == 0:
            return 0
        rows, cached = self.rows, count * self.block_size
        for group, ids in enumerate(self.index.lock(hit)):
            self.tables[group][row, :count] = ids
            rows.first[group, row] = first_needed_block(self.windows[group], cached, self.block_size)
        rows.computed[row] = rows.slots[row] = rows.room[row] = cached
        rows.published[row] = count
        rows.points[row] = hit.point
        return cached

    # -- the step ----------------------------------------------------------------------------------------

    def extend(self, sequence_id: int, num_tokens: int) -> tuple[BlockCopy, ...]:
        """Make positions [computed, num_tokens) writable; returns the copies to perform first.

        Sliding blocks that no query at a position >= computed can read are dropped before new ones are taken.
        Cannot fail inside the promise: ``num_tokens`` <= prompt + max_tokens and at most
        max_num_batched_tokens beyond what is committed. Outside it raises PromiseExceeded.
        """
        row = self.rows.row(sequence_id)
        self._check_promise(sequence_id, row, num_tokens)
        copies: list[BlockCopy] = []
        self._extend_row(row, num_tokens, copies)
        return tuple(copies)

    def extend_many(self, sequence_ids: Sequence[int], num_tokens: TokenIds) -> tuple[BlockCopy, ...]:
        """`extend` for a whole step: everything is checked first, then only sequences that cross a block
        border (or write into a shared block) cost more than their share of a few array operations."""
        tables = self.rows
        rows = tables.rows(sequence_ids)
        ends: Int64Array = np.asarray(num_tokens, dtype=np.int64)
        if ends.shape != rows.shape:
            raise InvalidRequest(f"{len(rows)} sequences, {ends.size} lengths", field="num_tokens")
        step = ends - tables.computed[rows]
        bad = (ends > tables.limit[rows]) | (step > self.limits.max_num_batched_tokens) | (ends < 0)
        if bad.any():
            at = int(bad.argmax())
            self._check_promise(sequence_ids[at], int(rows[at]), int(ends[at]))
        slow = (ends > tables.room[rows]) | tables.shared_tail[rows]
        # A sequence named twice ends at the larger length: maximum.at, not an assignment.
        np.maximum.at(tables.slots, rows, ends)
        if not slow.any():
            return ()
        copies: list[BlockCopy] = []
        for row, end in zip(rows[slow].tolist(), ends[slow].tolist(), strict=True):
            self._extend_row(row, end, copies)
        return tuple(copies)

    def append_tokens(self, sequence_id: int, token_ids: TokenIds) -> None:
        """Tokens the model produced. Raises PromiseExceeded beyond prompt + max_tokens."""
        row = self.rows.row(sequence_id)
        tokens = token_array(token_ids)
        start = int(self.rows.length[row])
        if start + len(tokens) > self.rows.limit[row]:
            raise self._too_long(sequence_id, row, start + len(tokens))
        self.rows.tokens[row, start : start + len(tokens)] = tokens
        self.rows.length[row] = start + len(tokens)

    def append_many(self, sequence_ids: Sequence[int], token_ids: TokenIds) -> None:
        """One token for each of the distinct sequences."""
        rows, tokens = self.rows.rows(sequence_ids), token_array(token_ids)
        if rows.shape != tokens.shape or len(set(sequence_ids)) != len(rows):
            raise InvalidRequest("one token for each of distinct sequences", field="token_ids")
        length = self.rows.length[rows]
        full = length >= self.rows.limit[rows]
        if full.any():
            at = int(full.argmax())
            raise self._too_long(sequence_ids[at], int(rows[at]), int(length[at]) + 1)
        self.rows.tokens[rows, length] = tokens
        self.rows.length[rows] = length + 1

    def commit(self, sequence_id: int, num_computed: int) -> None:
        """K/V of positions below ``num_computed`` are written: publish the blocks that are now full.

        A full block whose tokens another sequence has published meanwhile is replaced in the table by that one.
        Raises OutOfOrder when it goes back, passes what `extend` has made writable, or passes the tokens known.
        """
        row = self.rows.row(sequence_id)
        self._check_commit(sequence_id, row, num_computed)
        self.rows.computed[row] = num_computed
        if self.index is not None and num_computed // self.block_size > self.rows.published[row]:
            self._merged += publish(self.index, self.rows, row)

    def commit_many(self, sequence_ids: Sequence[int], num_computed: TokenIds) -> None:
        """`commit` for a whole step; everything is checked first."""
        tables = self.rows
        rows = tables.rows(sequence_ids)
        ends: Int64Array = np.asarray(num_computed, dtype=np.int64)
        if ends.shape != rows.shape or len(set(sequence_ids)) != len(rows):
            raise InvalidRequest("one length for each of distinct sequences", field="num_computed")
        bad = (ends < tables.computed[rows]) | (ends > tables.slots[rows]) | (ends > tables.length[rows])
        if bad.any():
            at = int(bad.argmax())
            self._check_commit(sequence_ids[at], int(rows[at]), int(ends[at]))
        tables.computed[rows] = ends
        if self.index is None:
            return
        for row in rows[ends // self.block_size > tables.published[rows]].tolist():
            self._merged += publish(self.index, self.rows, row)

    # -- fork and free -----------------------------------------------------------------------------------

    def fork(self, parent_id: int, child_id: int) -> int:
        """A second sequence from what the parent has computed; returns its row.

        All blocks with computed positions are shared. Call it between steps: parent and child must both
        `extend` before they write again, and the first to write into a shared partial block copies it.
        Raises SequenceFinished / UnknownSequence, SequenceExists, PromiseExceeded (no fork was promised: n of
        `admit`), OutOfOrder (the full prompt blocks, counted once for all n, are not computed yet).
        """
        tables = self.rows
        parent = tables.row(parent_id)
        if child_id in tables.row_of:
            raise SequenceExists(f"sequence {child_id} is already live", field="child_id")
        family = tables.family(parent)
        if family.forks_left == 0:
            raise PromiseExceeded(
                f"sequence {parent_id} has no fork left of n = {family.request.n}",
                field="n",
                hint="admit with n",
            )
        computed = int(tables.computed[parent])
        if computed < family.request.prompt_tokens // self.block_size * self.block_size:
            raise OutOfOrder(
                f"{computed} of {family.request.prompt_tokens} prompt tokens are computed",
                field="parent_id",
                hint="commit the whole prompt, then fork",
            )
        child = tables.open(child_id, family)
        family.forks_left -= 1
        family.live += 1
        held = ceil_div(computed, self.block_size)
        for table in self.tables:
            ids = table[parent, :held]
            table[child, :held] = ids
            self.pool.acquire(ids[ids != NULL_BLOCK])
        length = int(tables.length[parent])
        tables.tokens[child, :length] = tables.tokens[parent, :length]
        for values in (tables.length, tables.computed, tables.limit, tables.published):
            values[child] = values[parent]
        tables.first[:, child] = tables.first[:, parent]
        tables.room[child] = held * self.block_size
        tables.points[child] = tables.points[parent]
        # The parent's slots go back to what is computed: writing again takes an extend, which copies.
        tables.slots[child] = tables.slots[parent] = computed
        if computed % self.block_size:
            tables.shared_tail[child] = tables.shared_tail[parent] = True
        return child

    def free(self, sequence_id: int) -> None:
        """Give back the blocks, last block first, and at once the promise. Published blocks stay cached and
        reusable; the others are reused before any cached one. Raises DoubleFree, UnknownSequence."""
        tables = self.rows
        if tables.finished(sequence_id):
            raise DoubleFree(f"sequence {sequence_id} has already been freed", field="sequence_id")
        row = tables.row(sequence_id)
        held = tables.held_blocks(row)
        tail_first = np.stack([table[row, :held] for table in self.tables])[:, ::-1].T.ravel()
        self._release(tail_first[tail_first != NULL_BLOCK])
        family = tables.family(row)
        tables.close(sequence_id)
        before, promised = family.sequences, family.promise
        family.live -= 1
        if family.live == 0:  # nobody is left to fork from
            family.forks_left = family.promise = 0
        else:
            family.promise = promised_blocks(replace(family.request, n=family.sequences), self.limits)
        self._promised -= promised - family.promise
        self._running -= before - family.sequences

    # -- reading -----------------------------------------------------------------------------------------

    def row(self, sequence_id: int) -> int:
        """Row of the sequence in each of `tables`. Raises SequenceFinished, UnknownSequence."""
        return self.rows.row(sequence_id)

    def slots(self, sequence_id: int, group: int, start: int, stop: int) -> Int64Array:
        """block * block_size + offset of positions [start, stop), int64; positions whose block a sliding window
        has left are slots of the null block. Raises OutOfOrder beyond what `extend` has made."""
        row = self.rows.row(sequence_id)
        if not 0 <= start <= stop <= self.rows.slots[row]:
            raise OutOfOrder(
                f"positions {start} to {stop} of sequence {sequence_id}, slots below {self.rows.slots[row]}",
                field="stop",
                hint="extend first",
            )
        positions = np.arange(start, stop, dtype=np.int64)
        return self.slot_mapping(group, np.full(positions.shape, row), positions)

    def slot_mapping(self, group: int, rows: Int64Array, positions: Int64Array) -> Int64Array:
        """As `slots`, for a flat batch: one row and one position each, unchecked; int64."""
        shift, mask = self.block_size.bit_length() - 1, self.block_size - 1
        blocks = self.tables[group][rows, positions >> shift].astype(np.int64)
        slots: Int64Array = (blocks << shift) + (positions & mask)
        return slots

    def stats(self) -> CacheStats:
        """Counts, without walking anything."""
        pool = self.pool
        return CacheStats(
            num_blocks=pool.num_blocks,
            usable=pool.usable,
            used=pool.used,
            cached=pool.cached,
            free=pool.free,
            promised=self._promised,
            sequences=len(self.rows),
            evictions=self.index.evictions if self.index else 0,
            query_tokens=self._query_tokens,
            hit_tokens=self._hit_tokens,
            merged=self._merged,
        )

    def check_invariants(self) -> None:
        """Raises InvariantViolation with the name of the law that is broken. O(pool)."""
        check_invariants(self)

    # -- inside ------------------------------------------------------------------------------------------

    def _extend_row(self, row: int, end: int, copies: list[BlockCopy]) -> None:
        tables, block_size = self.rows, self.block_size
        computed = int(tables.computed[row])
        if end > tables.slots[row]:
            tables.slots[row] = end
        if tables.shared_tail[row] and end > computed:
            self._copy_shared_tail(row, computed, copies)
        have, need = int(tables.room[row]) // block_size, ceil_div(end, block_size)
        if need <= have:
            return
        for group, window in enumerate(self.windows):
            if window is not None:
                self._drop_dead_blocks(row, group, first_needed_block(window, computed, block_size))
        fresh = self._allocate((need - have) * len(self.tables)).reshape(len(self.tables), -1)
        for table, ids in zip(self.tables, fresh, strict=True):
            table[row, have:need] = ids
        tables.room[row] = need * block_size

    def _drop_dead_blocks(self, row: int, group: int, first: int) -> None:
        start = int(self.rows.first[group, row])
        if first <= start:
            return
        table = self.tables[group]
        dead = table[row, start:first].copy()
        table[row, start:first] = NULL_BLOCK
        self.rows.first[group, row] = first
        self._release(dead)

    def _copy_shared_tail(self, row: int, computed: int, copies: list[BlockCopy]) -> None:
        at = computed // self.block_size
        for table in self.tables:
            shared = int(table[row, at])
            if self.pool.references(shared) > 1:
                own = self._allocate(1)
                table[row, at] = own[0]
                self._release(np.array([shared], np.int32))
                copies.append(BlockCopy(shared, int(own[0])))
        self.rows.shared_tail[row] = False

    def _allocate(self, count: int) -> Int32Array:
        short = count - self.pool.free
        if short > 0:
            if self.index is None or short > self.pool.cached:
                raise InvariantViolation(
                    f"{count} blocks wanted, {self.pool.free} free and {self.pool.cached} cached",
                    field="promise",
                )
            self.index.evict(short)
        return self.pool.allocate(count)

    def _release(self, ids: Int32Array) -> None:
        keep = self.index.node_of[ids] != 0 if self.index is not None else np.zeros(ids.shape, np.bool_)
        self.pool.release(ids, keep)

    def _check_promise(self, sequence_id: int, row: int, num_tokens: int) -> None:
        if num_tokens < 0:
            raise InvalidRequest(f"{num_tokens} is negative", field="num_tokens")
        if num_tokens > self.rows.limit[row]:
            raise self._too_long(sequence_id, row, num_tokens)
        step = num_tokens - int(self.rows.computed[row])
        if step > self.limits.max_num_batched_tokens:
            raise PromiseExceeded(
                f"sequence {sequence_id} would compute {step} positions in a step, "
                f"max_num_batched_tokens is {self.limits.max_num_batched_tokens}",
                field="num_tokens",
                hint="commit what is computed, or take a smaller chunk",
            )

    def _too_long(self, sequence_id: int, row: int, tokens: int) -> PromiseExceeded:
        return PromiseExceeded(
            f"sequence {sequence_id} to {tokens} tokens, promised {self.rows.limit[row]} (prompt + max_tokens)",
            field="num_tokens",
            hint="admit it with a larger max_tokens",
        )

    def _check_commit(self, sequence_id: int, row: int, num_computed: int) -> None:
        tables = self.rows
        computed, slots, length = (int(v[row]) for v in (tables.computed, tables.slots, tables.length))
        if computed <= num_computed <= min(slots, length):
            return
        raise OutOfOrder(
            f"sequence {sequence_id} cannot be computed up to {num_computed}: it is computed up to {computed}, "
            f"has slots up to {slots} and knows {length} tokens",
            field="num_computed",
            hint="extend and append_tokens come before commit",
        )
