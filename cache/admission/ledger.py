"""What is reserved for the running requests: one sequence group a request, one slot of the arrays each."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tonnage.cache.admission import AdmissionRequest, Limits, split_reservation
from tonnage.cache.admission.snapshot import RunningSnapshot
from tonnage.cache.blocks import steps
from tonnage.cache.blocks.state import Int32Array, Int64Array, State
from tonnage.cache.blocks.tables import SequenceGroup


class Reservations:
    """The ledger: blocks reserved to all, the part of it that sliding groups may take, sequences that count.

    ``sequence_groups`` by slot, in order of admission: the entries of every array that admission reads.
    """

    def __init__(self, state: State, limits: Limits) -> None:
        self.sequence_groups: dict[int, SequenceGroup] = {}
        self.reserved = 0
        self.windowed = 0
        self.sequences = 0
        self._state, self._limits = state, limits
        self._unused = list(range(limits.max_num_seqs - 1, -1, -1))

    def reservation(self, request: AdmissionRequest, salt: bytes) -> SequenceGroup:
        """A slot and a reservation for an admitted request."""
        full, sliding = split_reservation(request, self._limits)
        slot = self._unused.pop()
        sequence_group = SequenceGroup(
            request, salt, slot, full + sliding, sliding, live=1, forks_left=request.n - 1
        )
        self.sequence_groups[slot] = sequence_group
        self.reserved += sequence_group.reservation
        self.windowed += sliding
        self.sequences += request.n
        requests = self._state.requests
        requests.reserved[slot], requests.prompt[slot] = full, request.prompt_tokens
        requests.live[slot], requests.forks_left[slot] = 1, request.n - 1
        return sequence_group

    def fork(self, sequence_group: SequenceGroup) -> None:
        """One of its sequences to come has come."""
        sequence_group.forks_left -= 1
        sequence_group.live += 1
        requests = self._state.requests
        requests.live[sequence_group.slot], requests.forks_left[sequence_group.slot] = (
            sequence_group.live,
            sequence_group.forks_left,
        )

    def give_back(self, sequence_group: SequenceGroup) -> None:
        """One of its sequences has been freed: its part of the reservation is free at once."""
        before, reservation, sliding = (
            sequence_group.sequences,
            sequence_group.reservation,
            sequence_group.sliding,
        )
        requests, slot = self._state.requests, sequence_group.slot
        sequence_group.live -= 1
        if sequence_group.live == 0:  # nobody is left to fork from
            sequence_group.forks_left = sequence_group.reservation = sequence_group.sliding = 0
            requests.prompt[slot] = 0
            del self.sequence_groups[slot]
            self._unused.append(slot)
        else:
            full, sequence_group.sliding = split_reservation(
                replace(sequence_group.request, n=sequence_group.sequences), self._limits
            )
            sequence_group.reservation = full + sequence_group.sliding
        requests.reserved[slot] = sequence_group.reservation - sequence_group.sliding
        requests.forks_left[slot] = sequence_group.forks_left
        self.reserved -= reservation - sequence_group.reservation
        self.windowed -= sliding - sequence_group.sliding
        self.sequences -= before - sequence_group.sequences

    def order(self) -> Int32Array:
        """int32 [running]: the slot of each entry."""
        return np.fromiter(self.sequence_groups, dtype=np.int32, count=len(self.sequence_groups))

    def entries(self, rows: Int64Array) -> Int64Array:
        """int64 [rows]: the entry of each row's request."""
        place = np.zeros(self._limits.max_num_seqs, np.int64)
        place[self.order()] = np.arange(len(self.sequence_groups))
        return place[self._state.rows.request[rows]]

    def requests(self) -> list[AdmissionRequest]:
        """By entry."""
        return [sequence_group.request for sequence_group in self.sequence_groups.values()]

    def of_tenant(self, tenant: str) -> int:
        """Blocks reserved to a tenant's requests."""
        return sum(f.reservation for f in self.sequence_groups.values() if f.request.tenant == tenant)

    def snapshot(self, usable: int, used: int) -> RunningSnapshot:
        """Copies of what admission reads; ``used`` blocks of full groups have a reference."""
        order = self.order()
        place = np.zeros(self._limits.max_num_seqs, np.int32)
        place[order] = np.arange(len(order), dtype=np.int32)
        lengths = np.zeros((3, len(order)), np.int32)
        steps.summarize(self._state.core, place, lengths)
        requests = self._state.requests
        return RunningSnapshot(
            usable=usable,
            used=used,
            windowed=self.windowed,
            held=requests.held[order],
            private=requests.private[order],
            reserved=requests.reserved[order],
            prompt=requests.prompt[order],
            prompt_left=lengths[0],
            output=lengths[1],
            output_left=lengths[2],
            sequences=requests.live[order] + requests.forks_left[order],
        )
