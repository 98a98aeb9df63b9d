"""Admission over our block manager: it decides which requests start and how far running sequences may grow.

The decisions are in `tonnage.cache.admission.decide`; this module fills their `State` from the manager's
reservations and block tables. Admission learns only from calls of `Admission.ended` and of the observer
`Admission.auto`. The server, the replay of a trace and the tests make these calls, so they run the same code.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tonnage.cache.admission import decide as decisions
from tonnage.cache.admission.adapter import AdmissionAdapter
from tonnage.cache.admission.decide import State
from tonnage.cache.admission.forecast import LengthForecast
from tonnage.cache.admission.ledger import Reservations
from tonnage.cache.admission.outlook import Newcomer
from tonnage.cache.admission.passing import head_start
from tonnage.cache.admission.policy import Policy
from tonnage.cache.admission.reservation import refusal, reserved_blocks, split_reservation
from tonnage.cache.admission.safety import Leaving, last_owners
from tonnage.cache.admission.shares import Uses, add_use
from tonnage.cache.admission.snapshot import RunningSnapshot
from tonnage.cache.admission.types import AdmissionRequest, Admit, Decision, Head, Wait, WaitReason
from tonnage.cache.blocks.groups import FULL
from tonnage.cache.blocks.state import COPY_TAIL, Int64Array, columns
from tonnage.cache.prefix import hits
from tonnage.cache.sequences import steps


class Admission(AdmissionAdapter):
    """An admission policy applied to the running requests of a block manager.

    `ended` records output lengths. In admission mode ``auto``, the attribute ``auto`` records the cost of
    steps; in other modes it is None. Other methods do not change what admission has learned.

    Attributes:
        lookahead: Number of requests behind the first in the queue that may try to start before it.
        several_keys: Whether several API keys share the engine.
    """

    def __init__(self, policy: Policy, reservations: Reservations) -> None:
        super().__init__(policy, reservations.limits, LengthForecast())
        self.reservations, self.core = reservations, reservations.core
        self._rows = columns(self.core.rows)
        self._known: State | None = None
        self._full = np.flatnonzero(columns(self.core.groups).kind == FULL).tolist()
        self.lookahead, self.several_keys = policy.lookahead, self.shares.several

    # -- requests that start -------------------------------------------------------------------------------

    def decide_early(self, request: AdmissionRequest, head: Head | None = None) -> Decision | None:
        """Return the admission decision on ``request``, or None if it depends on the request's prefix hit.

        After None, the caller looks up the prefix cache and calls `decide`.

        Args:
            request: The request to decide on.
            head: Start forecast of the first waiting request, from `start_of`, if ``request`` would start
                before that request.
        """
        limits, held = self.limits, self.reservations
        never = refusal(request, limits, self.policy.tenant_blocks)
        if never is not None:
            return never
        blocks = reserved_blocks(request, limits)
        seats, kept = self._kept(request, blocks)
        short = held.sequences + request.n + seats - limits.max_num_seqs
        if short > 0:
            return Wait(WaitReason.SEQUENCES, 0, short)
        if self.policy.tenant_blocks is not None:
            short = held.of_tenant(request.tenant) + blocks - self.policy.tenant_blocks
            if short > 0:
                return Wait(WaitReason.TENANT_QUOTA, short)
        known = decisions.decide_by_sum(
            held.reserved, blocks + kept, not held.by_slot, self.rules, head=head is not None
        )
        if known is None:
            return None
        return Wait(WaitReason.BLOCKS, known) if known > 0 else Admit(blocks)

    def decide(self, request: AdmissionRequest, row: int, hit: int, head: Head | None = None) -> Decision:
        """Return whether ``request`` may start now, given its prefix hit.

        Args:
            request: The request to decide on.
            row: Row of the block tables in which `hits.find_hit` has recorded the cached blocks of the prompt.
            hit: Number of cached blocks in the row. A cached block that no running request references uses
                capacity like a new block.
            head: Start forecast of the first waiting request, if ``request`` would start before it.
        """
        limits, groups = self.limits, len(self._full)
        lost = np.zeros(limits.max_num_seqs, np.int32)
        used, cached = hits.count_hit(self.core, row, hit, lost)
        full, windowed = split_reservation(request, limits)
        prompt = request.prompt_tokens
        left = prompt - (used + cached) // groups * limits.layout.block_size
        new = Newcomer(
            entry=(used + cached, cached, full, prompt, left, 0, request.max_tokens, request.n),
            cached=cached, windowed=windowed, reserved=full + windowed, lost=lost[self.reservations.order()],
            produced=request.produced, tenant=request.tenant, kept=self._kept(request, full + windowed)[1],
        )  # fmt: skip
        short = decisions.decide(self._state(), new, self.rules, head)
        return Wait(WaitReason.BLOCKS, short) if short > 0 else Admit(full + windowed)

    def ranking(self) -> Callable[[AdmissionRequest], tuple[int, float]]:
        """Return a function that maps a waiting request to its sort key; the lowest sort key starts first.

        The order divides the engine fairly among several API keys (`shares.Shares.rank`).
        """
        uses = self._uses()
        return lambda request: self.shares.rank(uses, request, reserved_blocks(request, self.limits))

    def _uses(self) -> Uses:
        """Return, by API key, the sequences and blocks of the key's running requests and the key's weight."""
        found: Uses = {}
        for each in self.reservations.by_slot.values():
            add_use(found, each.request, each.sequences, each.blocks)
        return found

    def _kept(self, request: AdmissionRequest, blocks: int) -> tuple[int, int]:
        """Return how many sequences and KV blocks must stay free for other API keys when ``request`` starts."""
        return self.shares.kept(self._uses(), request, blocks) if self.several_keys else (0, 0)

    def _state(self, most: int = 1) -> State:
        """Return the `State` of the running requests, with array space for ``most`` further requests.

        The method returns the same object until a request starts or ends, or a step changes its blocks.
        """
        held = self.reservations
        snapshot = held.snapshot()
        if self._known is None or self._known.snapshot is not snapshot:
            produced = snapshot.output + held.produced[held.order()]
            tenants = [each.request.tenant for each in held.by_slot.values()] if held.named else None
            rows = decisions.empty_rows(snapshot, most)
            self._known = State(snapshot, rows, held.reserved, produced, tenants)
        return self._known

    def start_of(self, request: AdmissionRequest) -> Head:
        """Forecast when ``request``, the first in the queue, has the KV blocks that it waits for."""
        entry = (0, 0, 0, request.prompt_tokens, request.prompt_tokens, 0, request.max_tokens, request.n)
        new = Newcomer(entry, 0, 0, 0, produced=request.produced, tenant=request.tenant)
        return head_start(request, self.rules.outlook(self._state(), new), self.limits, self.rules.margin)

    # -- sequences that grow -------------------------------------------------------------------------------

    def grant(self, batch: Int64Array, ends: Int64Array) -> Int64Array:
        """Return the length in tokens to which each sequence of ``batch`` may be extended, int64 [rows].

        A length is at most the requested length in ``ends``. Blocks are granted in the order of ``batch``. In
        guaranteed mode every request can still finish after all grants (`safety.grant`). The other modes grant
        blocks as long as some are free.
        """
        held, rows, groups = self.reservations, self._rows, len(self._full)
        if held.reserved <= self.limits.usable_blocks:
            return ends  # All reservations fit together, so no sequence can block another.
        wanted = np.zeros(len(batch), np.int64)
        steps.wanted_blocks(self.core, batch, ends, wanted)
        if not wanted.any():
            return ends
        granted = decisions.grant(held.snapshot(), held.entries(batch), wanted, self.rules, self.leaving)
        # The safety invariant is broken. No sequence may grow, and the scheduler raises an error.
        if granted is None:
            granted = np.zeros_like(wanted)
        short = granted < wanted
        if not short.any():
            return ends
        reach = rows.room[batch] + granted // groups * self.limits.layout.block_size
        # A sequence that shares its last block needs a copy of that block before it writes. It therefore gets
        # either all its blocks or no token.
        reach[rows.shared_tail[batch] & COPY_TAIL != 0] = 0
        return np.where(short, np.clip(reach, rows.computed[batch], ends), ends)

    def leaving(self) -> Leaving:
        """Return an order in which the running requests can finish, and how many blocks each then frees.

        The counts are exact: the method reads all block tables, and counts a block that several requests share
        for the request that ends last.
        """
        rows = np.flatnonzero(self._rows.request >= 0)
        held = self._rows.room[rows] // self.limits.layout.block_size
        tables = [
            self.core.tables[group, row, :count]
            for group in self._full
            for row, count in zip(rows, held, strict=True)
        ]
        owners = np.tile(np.repeat(self.reservations.entries(rows), held), len(self._full))
        blocks = np.concatenate([np.zeros(0, np.int32), *tables])
        return last_owners(self.reservations.snapshot(), blocks, owners, self.core.refs.size)

    def victim(self, snapshot: RunningSnapshot) -> int:
        """Return the index in ``snapshot`` of the request to preempt when no sequence can continue.

        It is the request with the fewest tokens to recompute; of several, the one admitted last. Guaranteed
        mode never preempts.
        """
        computed = snapshot.prompt - snapshot.prompt_left + snapshot.output
        return len(computed) - 1 - int(np.argmin(computed[::-1]))
