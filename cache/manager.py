"""KVCacheManager: the blocks of every live sequence, from admission to free.

The order of calls, for one request::

    admit -> [extend -> (engine writes K/V) -> commit]* -> free
                    prefill chunks, then one token a step, each first given to append

`extend` makes room before a step, `commit` says after it what has been written. A step that computes
positions [computed, end) calls ``extend(ids, ends)`` first, performs the copies it returns in their order,
and only then writes. Engines read `tables` and `slots`; rows are updated in place, so a table is read after the
`extend` of a step.

Every error is raised before anything changes. Not thread-safe: one scheduler owns it.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import numpy as np

from tonnage.cache import admission, errors
from tonnage.cache.admission.controller import Admission
from tonnage.cache.admission.ledger import Reservations
from tonnage.cache.admission.snapshot import RunningSnapshot
from tonnage.cache.blocks.groups import can_cache_states, num_full, num_states, paged, state_every
from tonnage.cache.blocks.pool import BlockPool, check_num_blocks
from tonnage.cache.blocks.state import Int32Array, Int64Array, columns, new_core
from tonnage.cache.eviction.choice import Eviction
from tonnage.cache.laws import sampled as laws
from tonnage.cache.laws.invariants import check_invariants
from tonnage.cache.prefix.cache import PrefixCache
from tonnage.cache.prefix.events import Subscriber
from tonnage.cache.prefix.hashing import HashBlock, seed_of
from tonnage.cache.results import Admitted, BlockCopy, CacheStats
from tonnage.cache.sequences import steps
from tonnage.cache.sequences.refusals import refused
from tonnage.cache.sequences.tables import Sequences, TokenIds, end_array, token_array, tokens_by_row
from tonnage.planner.model.layout import KVLayout

__all__ = ["Admitted", "BlockCopy", "CacheStats", "KVCacheManager"]

_NO_ENDS, _NO_TOKENS = np.zeros(0, np.int64), np.zeros(0, np.int32)


class KVCacheManager:
    """Blocks of all groups of ``layout`` from one pool of ``num_blocks`` (block 0 is the null block).

    ``max_num_batched_tokens`` is the most positions one sequence computes in a step; with sliding groups the
    reservation depends on it. ``eviction`` "lru" switches learning off (`tonnage.cache.eviction.choice`).
    ``prefix_cache_retention_interval`` (vLLM's name): tokens from one recurrent state kept to the next, beside
    those where prompts end and part; 0: no others, None: each at the end of a step and of a block.
    ``hash_seed`` keys the hashes: random, so that nobody can prepare collisions, unless a replay is to repeat.
    ``policy`` None: ``no_evict``. ``kv_events`` lets `subscribe`. ``hash_block`` is for tests: a hash function
    of their own, slow. Raises CacheConfigError for limits that cannot work.
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
        policy: admission.Policy | None = None,
        eviction: Eviction = "adaptive",
        prefix_cache_retention_interval: int | None = 0,
        hash_seed: int | None = None,
        kv_events: bool = False,
        hash_block: HashBlock | None = None,
    ) -> None:
        check_num_blocks(num_blocks)
        # With prefixes, recurrent states too: `tonnage.cache.groups.states`.
        self.cached_states = aligned = enable_prefix_caching and can_cache_states(layout)
        self.limits = admission.Limits(
            layout, num_blocks - 1, max_model_len, max_num_seqs, max_num_batched_tokens, aligned
        )
        self.block_size = layout.block_size
        every = state_every(prefix_cache_retention_interval, self.block_size)
        # Without a full group nothing keeps the start of a chain alive: see tonnage.cache.prefix.index.
        caching = enable_prefix_caching and num_full(layout) > 0 and (num_states(layout) == 0 or aligned)
        key = secrets.randbits(64) if hash_seed is None else hash_seed
        self.core = new_core(  # all that compiled code knows
            layout,
            num_blocks,
            rows=max_num_seqs,
            max_model_len=max_model_len,
            max_step=max_num_batched_tokens,
            caching=caching,
            seed=seed_of(b"", key),
            logged=kv_events,
            learning=eviction != "lru",
            aligned=aligned,
            state_every=every,
        )
        self.rows, self.requests = columns(self.core.rows), columns(self.core.requests)
        self.counts, self.model = columns(self.core.pool), columns(self.core.model)
        self.pool = BlockPool(self.core)
        self.prefix = PrefixCache(self.core, key, hash_block)
        groups = len(paged(layout))  # [rows, max_blocks] by paged group:
        self.tables: tuple[Int32Array, ...] = tuple(self.core.tables[:groups])
        self.sequences = Sequences(max_num_seqs)
        # At most two a row and group: a shared state of its own, and from there to its next block.
        self._copies = np.zeros((2, 2 * max_num_seqs * len(layout.groups)), np.int32)
        self.reservations = Reservations(self.core, self.limits)
        no_evict = admission.Policy(admission.AdmissionMode.NO_EVICT)
        self.admission = Admission(policy or no_evict, self.reservations)
        self._violations = 0

    # -- admission ---------------------------------------------------------------------------------------

    def running(self) -> RunningSnapshot:
        """What every running request holds and may still ask for; copies, in order of admission."""
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
        head: admission.Head | None = None,
    ) -> Admitted | admission.Wait | admission.Never:
        """Decide, lock the prefix hit and register the sequence, or change nothing.

        At least the last prompt token is left to compute: its logits are needed. The n - 1 other sequences
        come by `fork` once the prompt is computed; their rows and blocks are reserved here. Requests with
        different salts never share a block, those of `allow_prefix` aside. ``produced``: how many of the tokens
        are its own output, after a preemption. ``head``: the request it would pass, from `start_of`. Raises
        SequenceExists, InvalidRequest.
        """
        if sequence_id in self.sequences.row_of:
            raise errors.SequenceExists(f"sequence {sequence_id} is already live", field="sequence_id")
        row = self.sequences.next_row
        # Straight into the row that it would get: an unused row is no state.
        tokens = token_array(token_ids, out=self.core.tokens[row] if row >= 0 else None)
        request = admission.AdmissionRequest(len(tokens), max_tokens, n, tenant, produced=produced)
        decision = self.admission.decide_early(request, head)
        if decision is not None and not isinstance(decision, admission.Admit):
            return decision
        salt_bytes = salt.encode("utf-8", "surrogatepass") if isinstance(salt, str) else bytes(salt)
        hit = self.prefix.find(row, tokens, salt_bytes)
        decision = decision or self.admission.decide(request, row, hit, head)
        if not isinstance(decision, admission.Admit):
            self.prefix.drop(row, hit)
            return decision
        self.sequences.open(sequence_id)
        self.rows.limit[row] = request.total_tokens
        self.rows.request[row] = self.reservations.reserve(request, salt_bytes).slot
        return self.prefix.take(row, hit)

    def start_of(self, request: admission.AdmissionRequest) -> admission.Head:
        """When a waiting request begins if all ends as forecast: what `admit` wants as ``head``."""
        return self.admission.start_of(request)

    def grant(self, sequence_ids: Sequence[int], num_tokens: TokenIds) -> Int64Array:
        """How far each sequence may be extended in this step, int64; changes nothing.

        ``num_tokens``: how far each would go, in order of preference. A prefill chunk may be cut; a sequence
        that gets no more than it has computed stalls: it is left out of the step and asked for again in the
        next. In guaranteed mode, whoever asks for all running sequences is never refused all of them; in the
        others `Admission.victim` says whom to preempt then.
        """
        batch = self.sequences.rows(sequence_ids)
        return self.admission.grant(batch, end_array(batch, num_tokens, "num_tokens"))

    def entries(self, sequence_ids: Sequence[int]) -> Int64Array:
        """Index of each sequence's request in the arrays of `running`; int64."""
        return self.reservations.entries(self.sequences.rows(sequence_ids))

    # -- the step ----------------------------------------------------------------------------------------

    def extend(self, sequence_ids: Sequence[int], num_tokens: TokenIds) -> tuple[BlockCopy, ...]:
        """Make positions [computed, num_tokens) of each sequence writable; returns the copies to perform first.

        Sliding blocks that no query at a position >= computed can read are dropped before new ones are taken.
        Only sequences that cross a block border (or write into a shared block) cost more than a comparison.
        Raises ReservationExceeded beyond prompt + max_tokens or max_num_batched_tokens beyond what is
        committed, NoFreeBlocks when the pool has too few (which a scheduler that follows admission never sees).
        """
        return self._step(steps.EXTEND, sequence_ids, num_tokens)

    def append(self, sequence_ids: Sequence[int], token_ids: TokenIds) -> None:
        """A token that the model produced for each of the distinct sequences; as an array [sequences, count],
        so many for each. Raises ReservationExceeded beyond prompt + max_tokens."""
        self._step(steps.APPEND, sequence_ids, token_ids)

    def commit(self, sequence_ids: Sequence[int], num_computed: TokenIds) -> None:
        """K/V of positions below ``num_computed`` are written: publish the blocks that are now full.

        A full block whose tokens another sequence has published meanwhile is replaced in the table by that one.
        Raises OutOfOrder when it goes back, passes what `extend` has made writable, or passes the tokens
        known.
        """
        self._step(steps.COMMIT, sequence_ids, num_computed)

    def decode(self, sequence_ids: Sequence[int], token_ids: TokenIds) -> tuple[BlockCopy, ...]:
        """A decode step in one call: what is known is computed, each sequence gets a token and its slot.

        The same as `commit` to all known tokens, `append` and `extend` to one more, all or
        nothing; raises as they do.
        """
        return self._step(steps.DECODE, sequence_ids, token_ids)

    def _step(self, what: int, sequence_ids: Sequence[int], values: TokenIds) -> tuple[BlockCopy, ...]:
        batch, ends, tokens = self.sequences.rows(sequence_ids), _NO_ENDS, _NO_TOKENS
        if what & steps.APPEND:
            tokens = tokens_by_row(batch, values)
        else:
            ends = end_array(batch, values, "num_computed" if what == steps.COMMIT else "num_tokens")
        if what & steps.COMMIT:
            self.prefix.hash_with_own(batch)
        code, at = steps.step(self.core, what, batch, ends, tokens, self._copies)
        self.prefix.tell()
        if code != steps.OK:
            count = len(tokens) // len(batch)
            new = tokens[at * count : at * count + count]
            raise refused(self.core, code, sequence_ids[at], int(batch[at]), ends[at:], new)
        if at == 0 or not what & steps.EXTEND:
            return ()
        return tuple(BlockCopy(src, dst) for src, dst in self._copies[:, :at].T.tolist())

    # -- fork and free -----------------------------------------------------------------------------------

    def fork(self, parent_id: int, child_id: int) -> int:
        """A second sequence from what the parent has computed; returns its row.

        All blocks with computed positions are shared. Call it between steps: parent and child must both
        `extend` before they write again, and the first to write into a shared partial block copies it.
        Raises SequenceFinished / UnknownSequence, SequenceExists, ReservationExceeded (no fork was reserved: n
        of `admit`), OutOfOrder (the full prompt blocks, counted once for all n, are not computed yet).
        """
        parent = self.sequences.row(parent_id)
        if child_id in self.sequences.row_of:
            raise errors.SequenceExists(f"sequence {child_id} is already live", field="child_id")
        reservation = self.reservations[parent]
        request, computed = reservation.request, int(self.rows.computed[parent])
        if self.requests.forks_left[reservation.slot] == 0:
            raise errors.ReservationExceeded(
                f"sequence {parent_id} has no fork left of n = {request.n}",
                field="n",
                hint="admit with n",
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
        """Give back the blocks of distinct sequences, last block first, and at once their reservations.

        Published blocks stay cached and reusable; the others are reused before any cached one. Raises
        DoubleFree, UnknownSequence.
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
        steps.leave(self.core, batch)
        for sequence_id in sequence_ids:
            self.sequences.close(sequence_id)
        for reservation in reservations:
            self.reservations.give_back(reservation)

    # -- reading -----------------------------------------------------------------------------------------

    @property
    def states(self) -> tuple[Int32Array, ...]:
        """By state group, int32 [rows]: the block with each row's state, which its step reads and overwrites
        once the copies of `extend` are done; the null block where nothing is yet."""
        groups = self.core.tables[len(self.tables) :]
        if not self.cached_states:
            return tuple(groups[:, :, 0])
        rows, last = np.arange(len(self.rows.room)), np.maximum(self.rows.room // self.block_size - 1, 0)
        return tuple(table[rows, last] for table in groups)

    def row(self, sequence_id: int) -> int:
        """Row of the sequence in each of `tables`. Raises SequenceFinished, UnknownSequence."""
        return self.sequences.row(sequence_id)

    def slots(self, sequence_id: int, group: int, start: int, stop: int) -> Int64Array:
        """block * block_size + offset of positions [start, stop), int64; positions whose block a sliding window
        has left are slots of the null block. Raises OutOfOrder beyond what `extend` has made."""
        row = self.sequences.row(sequence_id)
        if not 0 <= start <= stop <= self.rows.slots[row]:
            raise errors.OutOfOrder(
                f"positions {start} to {stop} of sequence {sequence_id}, slots below {self.rows.slots[row]}",
                field="stop",
                hint="extend first",
            )
        positions = np.arange(start, stop, dtype=np.int64)
        return self.slot_mapping(group, np.full(positions.shape, row), positions)

    def slot_mapping(self, group: int, rows: Int64Array, positions: Int64Array) -> Int64Array:
        """As `slots`, for a flat batch: one row and one position each, unchecked; int64."""
        at, offsets = np.divmod(positions, self.block_size)
        slots: Int64Array = self.tables[group][rows, at].astype(np.int64) * self.block_size + offsets
        return slots

    def stats(self) -> CacheStats:
        """Counts, without walking anything."""
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
            violations=self._violations,
        )

    def check_invariants(self) -> None:
        """Raises InvariantViolation with the name of the law that is broken and what is wrong. O(pool), slow:
        for tests. See `sample_invariants`."""
        check_invariants(self)

    def sample_invariants(self) -> str | None:
        """Name of the first broken law, None when all hold; counted in `stats`, raises nothing.

        Compiled, milliseconds for a large pool: what a server calls now and then between steps.
        """
        law = laws.first_broken(self.core)
        self._violations += law is not None
        return law

    # -- the prefix cache --------------------------------------------------------------------------------

    def allow_prefix(self, token_ids: TokenIds) -> None:
        """Let every salt share the whole blocks of this prefix (a system prompt that is no secret).

        Holds for requests admitted from now on; the longest allowed prefix that a prompt starts with counts.
        Raises InvalidRequest when it is shorter than a block.
        """
        self.prefix.allow(token_array(token_ids))

    def subscribe(self, subscriber: Subscriber) -> None:
        """Call ``subscriber`` with the KV events of every call that has any. Raises CacheConfigError unless the
        manager was made with ``kv_events``."""
        self.prefix.subscribe(subscriber)

    def reset_prefix_cache(self) -> None:
        """Forget everything cached, e.g. after the weights have changed. Raises CacheBusy while a sequence
        lives: its blocks are in the index."""
        if len(self.sequences):
            raise errors.CacheBusy(
                f"{len(self.sequences)} sequences are live",
                field="sequences",
                hint="finish or abort them first",
            )
        self.prefix.forget()
