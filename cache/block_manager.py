"""The block manager that an engine calls: it holds the blocks of every live sequence, from admission to free.

The order of calls for one request::

    admit -> [extend -> (engine writes K/V) -> commit]* -> free
             prefill chunks, then one output token per step, after `append` has added it

`extend` allocates blocks before a step, `commit` reports after the step which positions have been written. A
step that computes positions [computed, end) first calls ``extend(ids, ends)``, then performs the returned block
copies in order, and only then writes K/V. Engines read `tables` and `slots`. Table rows are updated in place,
so a step must read the tables after it has called `extend`.

Every error is raised before anything changes. The manager is not thread-safe; one scheduler owns it.

`BlockManager` is the mechanism alone. `tonnage.cache.manager` adds the optional features to it: the admission
modes, learned eviction, KV events and the checks of the invariants.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from tonnage.cache import errors
from tonnage.cache.admission.control import AdmissionControl
from tonnage.cache.admission.ledger import Reservations
from tonnage.cache.admission.snapshot import RunningSnapshot
from tonnage.cache.admission.types import AdmissionRequest, Admit, Head, Limits, Never, Wait
from tonnage.cache.blocks.groups import (
    can_cache_states,
    num_full,
    num_states,
    paged,
    state_every,
    windows_only,
)
from tonnage.cache.blocks.pool import BlockPool, check_num_blocks
from tonnage.cache.blocks.state import Int32Array, Int64Array, columns, new_core
from tonnage.cache.prefix.cache import HashRows, PrefixCache
from tonnage.cache.prefix.hashing import seed_of
from tonnage.cache.results import Admitted, BlockCopy, CacheStats
from tonnage.cache.sequences import steps
from tonnage.cache.sequences.refusals import refused
from tonnage.cache.sequences.tables import Sequences, TokenIds, end_array, token_array, tokens_by_row
from tonnage.planner.model.layout import KVLayout

_NO_ENDS, _NO_TOKENS = np.zeros(0, np.int64), np.zeros(0, np.int32)


class BlockManager:
    """A manager of the KV cache blocks of all KV cache groups of a model, in one block pool.

    Args:
        layout: KV cache groups and block size.
        num_blocks: Blocks of the pool, with the null block (block 0).
        max_num_seqs: Upper bound of live sequences.
        max_model_len: Upper bound of prompt + max_tokens, in tokens.
        max_num_batched_tokens: Upper bound of positions that one sequence computes in a step. With sliding
            windows, the number of blocks reserved for a request depends on it.
        enable_prefix_caching: Whether full blocks are kept for later requests with the same prefix.
        admission: Function that creates the admission control from the manager's reservations.
        prefix_cache_retention_interval: Tokens between two kept recurrent states (vLLM's name). States where
            prompts end and diverge are always kept. 0: only these; None: at every block end at which a step
            ends.
        hash_seed: Key of the block hashes. None: a random key, so that a client cannot prepare hash collisions.
            A replay sets a fixed key.
        keyed_hash: Function that returns a hash function for a key. It is used for layouts whose groups all
            have sliding windows, where XXH64 is not safe (`tonnage.cache.prefix.index`). None: the prefix cache
            is off for such a layout.
        logged: Whether nodes that enter or leave the prefix index are recorded (`Core.stored`, `Core.removed`).
            ``on_step`` must then read and reset the records.
        learning: Whether the arrays of learned eviction are allocated.

    Attributes:
        on_step: Function that is called after every step of `extend`, `append`, `commit` and `decode`.
        leave: Compiled function that releases the rows of ended sequences (`steps.leave`).

    Raises:
        CacheConfigError: A limit or the number of blocks is invalid, or the groups cannot share one pool.
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
        admission: Callable[[Reservations], AdmissionControl],
        prefix_cache_retention_interval: int | None = 0,
        hash_seed: int | None = None,
        keyed_hash: Callable[[int], HashRows] | None = None,
        logged: bool = False,
        learning: bool = False,
    ) -> None:
        check_num_blocks(num_blocks)
        # With prefix caching, recurrent states are cached too: see `tonnage.cache.groups.states`.
        self.cached_states = aligned = enable_prefix_caching and can_cache_states(layout)
        limits = Limits(layout, num_blocks - 1, max_model_len, max_num_seqs, max_num_batched_tokens, aligned)
        key = secrets.randbits(64) if hash_seed is None else hash_seed
        hash_rows = keyed_hash(key) if keyed_hash is not None and windows_only(layout) else None
        # tonnage.cache.prefix.index explains which layouts can have a prefix cache.
        reusable = hash_rows is not None or (num_full(layout) > 0 and (num_states(layout) == 0 or aligned))
        caching = enable_prefix_caching and reusable
        self.limits = replace(limits, prefix_caching=caching)
        self.block_size = layout.block_size
        every = state_every(prefix_cache_retention_interval, self.block_size)
        self.core = new_core(  # all arrays that compiled code reads and changes
            layout,
            num_blocks,
            rows=max_num_seqs,
            max_model_len=max_model_len,
            max_step=max_num_batched_tokens,
            caching=caching,
            seed=seed_of(b"", key),
            # KV events and learned eviction need each block's parent. Both are off if every group has a sliding
            # window, because blocks in the prefix index then have no parents.
            logged=logged and not windows_only(layout),
            learning=learning and not windows_only(layout),
            aligned=aligned,
            state_every=every,
        )
        self.rows, self.requests = columns(self.core.rows), columns(self.core.requests)
        self.counts = columns(self.core.pool)
        self.pool = BlockPool(self.core)
        self.prefix = PrefixCache(self.core, key, hash_rows)
        groups = len(paged(layout))  # one table [rows, max_blocks] for each paged group
        self.tables: tuple[Int32Array, ...] = tuple(self.core.tables[:groups])
        self.sequences = Sequences(max_num_seqs)
        # A row needs at most two block copies per group: its own copy of a shared state, and a copy of the
        # state to its next block.
        self._copies = np.zeros((2, 2 * max_num_seqs * len(layout.groups)), np.int32)
        self.reservations = Reservations(self.core, self.limits)
        self.admission = admission(self.reservations)
        self.on_step: Callable[[], None] | None = None
        self.leave = steps.leave

    # -- admission -----------------------------------------------------------------------------------------

    def running(self) -> RunningSnapshot:
        """Return how many KV blocks each running request holds and may still need, in order of admission."""
        return self.reservations.snapshot()

    def admit(
        self,
        sequence_id: int,
        token_ids: TokenIds,
        max_tokens: int,
        *,
        n: int = 1,
        salt: str | bytes = "",
        tenant: str = "",
        produced: int = 0,
        weight: float = 1.0,
        head: Head | None = None,
        request: AdmissionRequest | None = None,
    ) -> Admitted | Wait | Never:
        """Decide whether a request may start; if so, take its cached prefix blocks and register its sequence.

        A request that is not admitted changes nothing. At least the last prompt token is left to compute,
        because its logits are needed. The n - 1 other sequences are created by `fork` once the prompt is
        computed; their rows and blocks are reserved here. Requests with different salts never share a block,
        except the prefixes of `allow_prefix`.

        Args:
            sequence_id: Id of the new sequence.
            token_ids: The prompt.
            max_tokens: Upper bound of output tokens per sequence.
            n: Number of sequences from this prompt.
            salt: Cache salt; requests share cached blocks only with requests of the same salt.
            tenant: Name of the tenant, for its quota.
            produced: Number of trailing prompt tokens that are the request's own output, after a preemption.
            weight: Weight of the tenant's API key, its share of the engine relative to other keys.
            head: Forecast (`AdmissionControl.start_of`) of the first waiting request, if this request would be
                admitted before it.
            request: The lengths, tenant and weight as one object, for a caller that tries the same request
                several times. None: it is made from the other arguments.

        Returns:
            Admitted with the row and the cached tokens, Wait with the missing blocks or sequences, or Never if
            the request cannot fit even alone.

        Raises:
            SequenceExists: The id is live.
            InvalidRequest: A token id or a count is invalid.
        """
        if sequence_id in self.sequences.row_of:
            raise errors.SequenceExists(f"sequence {sequence_id} is already live", field="sequence_id")
        row = self.sequences.next_row
        # The tokens are written directly to the row that the sequence would get, since an unused row holds no
        # state.
        tokens = token_array(token_ids, out=self.core.tokens[row] if row >= 0 else None)
        if request is None:
            request = AdmissionRequest(len(tokens), max_tokens, n, tenant, produced=produced, weight=weight)
        decision = self.admission.decide_early(request, head)
        if decision is not None and not isinstance(decision, Admit):
            return decision
        salt_bytes = _salt_bytes(salt)
        hit = self.prefix.find(row, tokens, salt_bytes)
        decision = decision or self.admission.decide(request, row, hit, head)
        if not isinstance(decision, Admit):
            self.prefix.drop(row, hit)
            return decision
        self.sequences.open(sequence_id)
        self.rows.limit[row] = request.total_tokens
        self.rows.request[row] = self.reservations.reserve(request, salt_bytes).slot
        return self.prefix.take(row, hit)

    def cached_tokens(self, token_ids: TokenIds, salt: str | bytes = "") -> int:
        """Return how many leading tokens of a prompt are cached; 0 if ``max_num_seqs`` sequences are live."""
        row = self.sequences.next_row
        if row < 0:
            return 0
        tokens = token_array(token_ids, out=self.core.tokens[row])
        hit = self.prefix.find(row, tokens, _salt_bytes(salt))
        self.prefix.drop(row, hit)
        return hit * self.block_size

    def grant(self, sequence_ids: Sequence[int], num_tokens: TokenIds) -> Int64Array:
        """Return the length in tokens to which each sequence may be extended in this step; change nothing.

        A prefill chunk may be cut. A sequence that is granted no more than it has computed stalls: it skips
        this step, and the scheduler requests its tokens again in the next. In guaranteed mode at least one
        sequence is granted its tokens if all running sequences are in the call. In other modes
        `AdmissionControl.victim` names the request to preempt.

        Args:
            sequence_ids: Sequences in order of preference.
            num_tokens: Requested length of each sequence in tokens, [sequences].

        Returns:
            int64 [sequences]: granted length of each sequence in tokens.
        """
        batch = self.sequences.rows(sequence_ids)
        return self.admission.grant(batch, end_array(batch, num_tokens, "num_tokens"))

    def entries(self, sequence_ids: Sequence[int]) -> Int64Array:
        """Return the index of each sequence's request in the arrays of `running`, int64 [sequences]."""
        return self.reservations.entries(self.sequences.rows(sequence_ids))

    # -- the step ------------------------------------------------------------------------------------------

    def extend(self, sequence_ids: Sequence[int], num_tokens: TokenIds) -> tuple[BlockCopy, ...]:
        """Allocate KV blocks for positions [computed, num_tokens) of sequences; return the needed block copies.

        The engine must perform the copies, in order, before it writes K/V. Blocks of sliding windows that no
        query at a position >= computed can read are released before new blocks are taken. A sequence costs more
        than a comparison only if it crosses a block boundary or writes into a shared block.

        Raises:
            ReservationExceeded: A sequence exceeds prompt + max_tokens, or max_num_batched_tokens beyond its
                committed tokens.
            NoFreeBlocks: The pool has too few blocks, which cannot happen to a scheduler that follows
                admission.
        """
        return self._step(steps.EXTEND, sequence_ids, num_tokens)

    def append(self, sequence_ids: Sequence[int], token_ids: TokenIds) -> None:
        """Append a produced token to each sequence; ``sequence_ids`` must be distinct.

        An array [sequences, count] appends ``count`` tokens to each sequence. Raises ReservationExceeded beyond
        prompt + max_tokens.
        """
        self._step(steps.APPEND, sequence_ids, token_ids)

    def commit(self, sequence_ids: Sequence[int], num_computed: TokenIds) -> None:
        """Record that K/V below position ``num_computed`` is written, and publish full blocks for prefix hits.

        If another sequence has already published a block with the same tokens, that block replaces the
        duplicate in the table.

        Raises:
            OutOfOrder: ``num_computed`` is below the computed positions, beyond the positions that `extend` has
                made writable, or beyond the known tokens.
        """
        self._step(steps.COMMIT, sequence_ids, num_computed)

    def decode(self, sequence_ids: Sequence[int], token_ids: TokenIds) -> tuple[BlockCopy, ...]:
        """Commit the known tokens, append one token to each sequence and allocate its slot, in one call.

        It equals `commit` to all known tokens, `append` and `extend` to one more token. If it raises an
        error of these three methods, nothing has changed.
        """
        return self._step(steps.DECODE, sequence_ids, token_ids)

    def _step(self, what: int, sequence_ids: Sequence[int], values: TokenIds) -> tuple[BlockCopy, ...]:
        batch, ends, tokens = self.sequences.rows(sequence_ids), _NO_ENDS, _NO_TOKENS
        if what & steps.APPEND:
            tokens = tokens_by_row(batch, values)
        else:
            ends = end_array(batch, values, "num_computed" if what == steps.COMMIT else "num_tokens")
        if what & steps.COMMIT:
            self.prefix.hash(batch)
        code, at = steps.step(self.core, what, batch, ends, tokens, self._copies)
        if self.on_step is not None:
            self.on_step()
        if code != steps.OK:
            count = len(tokens) // len(batch)
            new = tokens[at * count : at * count + count]
            raise refused(self.core, code, sequence_ids[at], int(batch[at]), ends[at:], new)
        if at == 0 or not what & steps.EXTEND:
            return ()
        return tuple(BlockCopy(src, dst) for src, dst in self._copies[:, :at].T.tolist())

    # -- fork and free -------------------------------------------------------------------------------------

    def fork(self, parent_id: int, child_id: int) -> int:
        """Create a second sequence that shares all computed positions of its parent, and return its row.

        All blocks with computed positions are shared. Call it between steps. Parent and child must both
        `extend` before they write again. The first of them to write into a shared partial block copies it.

        Raises:
            SequenceFinished: The parent has been freed.
            UnknownSequence: The parent is not live.
            SequenceExists: The child's id is live.
            ReservationExceeded: No fork is left of the n that `admit` reserved.
            OutOfOrder: The full blocks of the prompt, which are reserved once for all n, are not computed yet.
        """
        parent = self.sequences.row(parent_id)
        if child_id in self.sequences.row_of:
            raise errors.SequenceExists(f"sequence {child_id} is already live", field="child_id")
        reservation = self.reservations[parent]
        request, computed = reservation.request, int(self.rows.computed[parent])
        if self.requests.forks_left[reservation.slot] == 0:
            raise errors.ReservationExceeded(
                f"sequence {parent_id} has no fork left: it was admitted with n = {request.n}",
                field="n",
                hint="admit the request with a larger n",
            )
        if computed < request.prompt_tokens // self.block_size * self.block_size:
            raise errors.OutOfOrder(
                f"{computed} of {request.prompt_tokens} prompt tokens are computed",
                field="parent_id",
                hint="commit the whole prompt, then fork",
            )
        child = self.sequences.open(child_id)
        self.reservations.fork(reservation)
        steps.share(self.core, parent, child)
        self.prefix.salts.share(child)
        return child

    def free(self, sequence_ids: Sequence[int]) -> None:
        """Release the blocks of distinct sequences, last block first, and their reservations.

        Published blocks stay cached and can be hit; unpublished blocks are reused before any cached block.
        Raises DoubleFree and UnknownSequence.
        """
        try:
            batch = self.sequences.rows(sequence_ids)
        except errors.SequenceFinished as error:
            raise errors.DoubleFree(str(error), field="sequence_ids") from None
        rows = batch.tolist()
        if len(set(rows)) < len(rows):
            raise errors.DoubleFree(f"a sequence is named twice in {list(sequence_ids)}", field="sequence_ids")
        reservations = dict.fromkeys(map(self.reservations.__getitem__, rows))
        for row in rows:
            self.prefix.salts.leave(row)
        self.leave(self.core, batch)
        for sequence_id in sequence_ids:
            self.sequences.close(sequence_id)
        for reservation in reservations:
            self.reservations.give_back(reservation)

    # -- reading -------------------------------------------------------------------------------------------

    @property
    def states(self) -> tuple[Int32Array, ...]:
        """Block ids of the rows' recurrent states: one int32 array [rows] for each state group.

        A step reads and overwrites the state's block after it has performed the copies of `extend`. The null
        block stands for a row without a state.
        """
        groups = self.core.tables[len(self.tables) :]
        if not self.cached_states:
            return tuple(groups[:, :, 0])
        rows, last = np.arange(len(self.rows.room)), np.maximum(self.rows.room // self.block_size - 1, 0)
        return tuple(table[rows, last] for table in groups)

    def row(self, sequence_id: int) -> int:
        """Return the row of a sequence in the block tables. Raises SequenceFinished or UnknownSequence."""
        return self.sequences.row(sequence_id)

    def slots(self, sequence_id: int, group: int, start: int, stop: int) -> Int64Array:
        """Return the K/V storage slots (block * block_size + offset) of positions [start, stop), int64.

        Positions whose block a sliding window has released map to slots of the null block. Raises OutOfOrder
        beyond what `extend` has made writable.
        """
        row = self.sequences.row(sequence_id)
        if not 0 <= start <= stop <= self.rows.slots[row]:
            raise errors.OutOfOrder(
                f"positions {start} to {stop} of sequence {sequence_id} exceed its "
                f"{self.rows.slots[row]} slots",
                field="stop",
                hint="call extend first",
            )
        positions = np.arange(start, stop, dtype=np.int64)
        return self.slot_mapping(group, np.full(positions.shape, row), positions)

    def slot_mapping(self, group: int, rows: Int64Array, positions: Int64Array) -> Int64Array:
        """Return the K/V storage slot of each token of a flattened batch, int64 [tokens]; check no arguments.

        ``rows`` and ``positions``, int64 [tokens], have the table row and the position of each token.
        """
        at, offsets = np.divmod(positions, self.block_size)
        slots: Int64Array = self.tables[group][rows, at].astype(np.int64) * self.block_size + offsets
        return slots

    def stats(self) -> CacheStats:
        """Return the pool's numbers of used, cached and free KV blocks, and counters since the start; O(1)."""
        pool, counts = self.pool, self.counts
        return CacheStats(
            num_blocks=pool.num_blocks,
            usable=pool.usable,
            used=pool.used,
            cached=pool.cached,
            free=pool.free,
            reserved=self.reservations.reserved,
            sequences=len(self.sequences),
            evictions=int(counts.evicted.sum()),
            evictions_by_cause=tuple(counts.evicted[0].tolist()),
            query_tokens=self.prefix.query_tokens,
            hit_tokens=self.prefix.hit_tokens,
            shared_hit_tokens=self.prefix.shared_hit_tokens,
            merged=int(counts.merged[0]),
        )

    # -- the prefix cache ----------------------------------------------------------------------------------

    def allow_prefix(self, token_ids: TokenIds) -> None:
        """Let requests of every cache salt share the full blocks of a prefix, such as a public system prompt.

        The permission holds for requests admitted from now on. If a prompt starts with several allowed
        prefixes, the longest counts. Raises InvalidRequest if the prefix is shorter than a block.
        """
        self.prefix.allow(token_array(token_ids))

    def reset_prefix_cache(self) -> None:
        """Evict all blocks of the prefix cache, for example after the model's weights have changed.

        Raises CacheBusy while a sequence is live.
        """
        if len(self.sequences):
            raise errors.CacheBusy(
                f"the prefix cache cannot be reset while {len(self.sequences)} sequences are live",
                field="sequences",
                hint="finish or abort them first",
            )
        self.prefix.forget()


def _salt_bytes(salt: str | bytes) -> bytes:
    return salt.encode("utf-8", "surrogatepass") if isinstance(salt, str) else bytes(salt)
