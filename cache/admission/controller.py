"""Admission: who may start and who may grow, from what is reserved, the policy and the lengths it has learned.

The one object that a block manager asks. It changes nothing but its histogram of output lengths
(`Admission.ended`), so the server, the replay of a trace and a test run the same code.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tonnage.cache.admission.forecast import LengthForecast
from tonnage.cache.admission.ledger import Reservations
from tonnage.cache.admission.passing import Head, head_start
from tonnage.cache.admission.policy import AdmissionMode, Policy, blocks_short, blocks_taken
from tonnage.cache.admission.reservation import refusal, reserved_blocks, split_reservation
from tonnage.cache.admission.safety import IntArray, Leaving, grant, is_safe, last_owners
from tonnage.cache.admission.snapshot import RunningSnapshot
from tonnage.cache.admission.types import AdmissionRequest, Admit, Decision, Wait, WaitReason
from tonnage.cache.blocks.groups import FULL
from tonnage.cache.blocks.state import COPY_TAIL, Int64Array, columns
from tonnage.cache.prefix import hits
from tonnage.cache.sequences import steps


class Admission:
    """``policy`` over the requests of ``reservations``. ``ended`` teaches it; everything else only reads."""

    def __init__(self, policy: Policy, reservations: Reservations) -> None:
        self.policy, self.reservations = policy, reservations
        self.limits, self.core = reservations.limits, reservations.core
        self.forecast = LengthForecast(policy.quantile, policy.cautious)
        self._margin = policy.margin(self.limits)
        self._rows = columns(self.core.rows)
        self._full = np.flatnonzero(columns(self.core.groups).kind == FULL).tolist()
        # A window stops growing: without a full group all that is reserved is the peak.
        self._by_sum = policy.mode is AdmissionMode.NO_EVICT or not self._full

    # -- who may start -----------------------------------------------------------------------------------

    def decide_early(self, request: AdmissionRequest, head: Head | None = None) -> Decision | None:
        """The answer, where it is the same whatever the prefix cache has; None: `decide`.

        ``head``: the request it would pass, from `start_of`.
        """
        limits, held = self.limits, self.reservations
        never = refusal(request, limits, self.policy.tenant_blocks)
        if never is not None:
            return never
        short = held.sequences + request.n - limits.max_num_seqs
        if short > 0:
            return Wait(WaitReason.SEQUENCES, 0, short)
        blocks = reserved_blocks(request, limits)
        if self.policy.tenant_blocks is not None:
            short = held.of_tenant(request.tenant) + blocks - self.policy.tenant_blocks
            if short > 0:
                return Wait(WaitReason.TENANT_QUOTA, short)
        short = held.reserved + blocks + self._margin - limits.usable_blocks
        # Alone it fits, as it is not refused; where all reservations fit together no schedule can go wrong.
        if not held.by_slot or (short <= 0 and head is None):
            return Admit(blocks)
        if self._by_sum or (head is not None and not self.policy.forecasts):
            return Wait(WaitReason.BLOCKS, max(1, short))
        return None

    def decide(self, request: AdmissionRequest, row: int, hit: int, head: Head | None = None) -> Decision:
        """Whether ``request`` may start now, with the ``hit`` blocks that `hits.find_hit` has left in ``row``.

        Blocks of the hit that nobody references cost capacity as an allocation does.
        """
        limits, groups = self.limits, len(self._full)
        lost = np.zeros(limits.max_num_seqs, np.int32)
        used, cached = hits.count_hit(self.core, row, hit, lost)
        full, windowed = split_reservation(request, limits)
        prompt = request.prompt_tokens
        left = prompt - (used + cached) // groups * limits.layout.block_size
        entry = (used + cached, cached, full, prompt, left, 0, request.max_tokens, request.n)
        order = self.reservations.order()
        state = self.reservations.snapshot().with_one(cached, windowed, lost[order], entry)
        output_left = self._forecast(state.output, state.output_left, [*self.reservations.requests(), request])
        if int(state.prompt_left.sum()) <= limits.max_num_batched_tokens:
            output_left[-1] -= 1  # its whole prompt in one step: that step gives the first token too
        short = blocks_short(state, output_left, limits, self.policy, head)
        if short:
            return Wait(WaitReason.BLOCKS, short)
        return Admit(full + windowed)

    def start_of(self, request: AdmissionRequest) -> Head:
        """When ``request``, first in the queue and without room, begins if all goes as forecast."""
        snapshot, requests = self.reservations.snapshot(), [*self.reservations.requests(), request]
        most = np.append(snapshot.output_left, request.max_tokens)
        left = self._forecast(np.append(snapshot.output, 0), most, requests)
        return head_start(request, int(left[-1]), snapshot, left[:-1], self.limits, self._margin)

    def committed(self) -> int:
        """Usable blocks that count as taken for a new request, with the margin that it must leave."""
        held = self.reservations
        if not held.by_slot:
            return 0
        taken = held.reserved
        if not self._by_sum:
            snapshot = held.snapshot()
            left = self._forecast(snapshot.output, snapshot.output_left, held.requests())
            taken = min(taken, max(blocks_taken(snapshot, left, self.limits, self.policy)))
        return min(self.limits.usable_blocks, taken + self._margin)

    def ended(self, output_tokens: int, tenant: str = "") -> None:
        """A sequence has ended by itself (not cancelled) after ``output_tokens`` tokens."""
        self.forecast.ended(output_tokens, tenant)

    def _forecast(
        self, output: IntArray, output_left: IntArray, requests: Sequence[AdmissionRequest]
    ) -> Int64Array:
        """int64 [requests]: tokens still to come of each, of at most ``output_left``."""
        if self.policy.quantile == 1 or not self.policy.forecasts:
            return output_left.astype(np.int64)
        produced = output + np.array([request.produced for request in requests], dtype=np.int64)
        return self.forecast.left(produced, output_left, [request.tenant for request in requests])

    # -- who may grow ------------------------------------------------------------------------------------

    def grant(self, batch: Int64Array, ends: Int64Array) -> Int64Array:
        """How far each row of ``batch`` may be extended now, up to ``ends``; int64. The first are served first.

        In guaranteed mode the state stays safe (`safety.grant`); the others grant while blocks are there.
        """
        held, rows, groups = self.reservations, self._rows, len(self._full)
        if held.reserved <= self.limits.usable_blocks:
            return ends  # all that was ever reserved fits at once: nobody can be in another's way
        wanted = np.zeros(len(batch), np.int64)
        steps.wanted_blocks(self.core, batch, ends, wanted)
        if not wanted.any():
            return ends
        if self.policy.mode is AdmissionMode.GUARANTEED:
            snapshot, entries = held.snapshot(), held.entries(batch)
            granted = grant(snapshot, entries, wanted, multiple=groups)
            if (granted < wanted).any() and not is_safe(
                snapshot
            ):  # the bound on shared blocks does not suffice
                granted = grant(snapshot, entries, wanted, multiple=groups, leaving=self.leaving())
        else:
            available = self.limits.usable_blocks - held.windowed - held.used
            granted = np.clip(available - (np.cumsum(wanted) - wanted), 0, wanted)
        short = granted < wanted
        if not short.any():
            return ends
        reach = rows.room[batch] + granted // groups * self.limits.layout.block_size
        # The block to copy comes first: without all it wants, a sequence with a shared tail writes nothing.
        reach[rows.shared_tail[batch] & COPY_TAIL != 0] = 0
        return np.where(short, np.clip(reach, rows.computed[batch], ends), ends)

    def leaving(self) -> Leaving:
        """In which order the running requests can finish, and what each gives back; walks all tables."""
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
        """Entry of the running request to preempt when nobody can go on: the one with the fewest tokens to
        compute again, of equals the youngest. In guaranteed mode nobody ever has to be."""
        computed = snapshot.prompt - snapshot.prompt_left + snapshot.output
        return len(computed) - 1 - int(np.argmin(computed[::-1]))
