"""What is reserved for the running requests: one `Reservation` a request, one slot of the arrays each."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tonnage.cache.admission.reservation import split_reservation
from tonnage.cache.admission.snapshot import (
    COLUMNS,
    HELD,
    OUTPUT,
    OUTPUT_LEFT,
    PRIVATE,
    PROMPT,
    PROMPT_LEFT,
    RESERVED,
    SEQUENCES,
    RunningSnapshot,
)
from tonnage.cache.admission.types import AdmissionRequest, Limits
from tonnage.cache.blocks.state import Core, Int32Array, Int64Array, columns
from tonnage.cache.compiled import compiled


@dataclass(slots=True, eq=False)
class Reservation:
    """The blocks reserved for one request, i.e. for its live sequences and for those still to be forked.

    ``blocks`` in all groups, ``windowed`` the part of it that is set aside whole (windows and states).
    """

    request: AdmissionRequest
    salt: bytes
    slot: int
    blocks: int
    windowed: int
    sequences: int  # live ones and forks to come


class Reservations:
    """The ledger: blocks reserved to all, the part of it that is set aside whole, sequences that count (live
    ones and forks to come).

    ``by_slot`` in order of admission: the entries of every array that admission reads.
    """

    def __init__(self, core: Core, limits: Limits) -> None:
        self.by_slot: dict[int, Reservation] = {}
        self.reserved = 0
        self.windowed = 0
        self.sequences = 0
        self.core, self.limits = core, limits
        self._rows, self._requests = columns(core.rows), columns(core.requests)
        self._pool = columns(core.pool)
        self._unused = list(range(limits.max_num_seqs - 1, -1, -1))

    def __getitem__(self, row: int) -> Reservation:
        """That of the request of a row in use."""
        return self.by_slot[int(self._rows.request[row])]

    def reserve(self, request: AdmissionRequest, salt: bytes) -> Reservation:
        """A slot and a reservation for an admitted request."""
        full, windowed = split_reservation(request, self.limits)
        slot, requests = self._unused.pop(), self._requests
        reservation = Reservation(request, salt, slot, full + windowed, windowed, request.n)
        self.by_slot[slot] = reservation
        self.reserved += full + windowed
        self.windowed += windowed
        self.sequences += request.n
        requests.reserved[slot], requests.prompt[slot] = full, request.prompt_tokens
        requests.live[slot], requests.forks_left[slot] = 1, request.n - 1
        return reservation

    def fork(self, reservation: Reservation) -> None:
        """One of its sequences to come has come."""
        self._requests.forks_left[reservation.slot] -= 1
        self._requests.live[reservation.slot] += 1

    def give_back(self, reservation: Reservation) -> None:
        """Some of its sequences have left (`steps.leave`): their part of the reservation is free at once."""
        requests, slot = self._requests, reservation.slot
        live, forks = int(requests.live[slot]), int(requests.forks_left[slot])
        full = windowed = sequences = 0
        if live == 0:  # nobody is left to fork from
            requests.prompt[slot] = requests.forks_left[slot] = 0
            del self.by_slot[slot]
            self._unused.append(slot)
        else:
            sequences = live + forks
            full, windowed = split_reservation(replace(reservation.request, n=sequences), self.limits)
        self.reserved += full + windowed - reservation.blocks
        self.windowed += windowed - reservation.windowed
        self.sequences += sequences - reservation.sequences
        reservation.blocks, reservation.windowed, reservation.sequences = full + windowed, windowed, sequences
        requests.reserved[slot] = full

    def order(self) -> Int32Array:
        """int32 [running]: the slot of each entry."""
        return np.fromiter(self.by_slot, dtype=np.int32, count=len(self.by_slot))

    def entries(self, rows: Int64Array) -> Int64Array:
        """int64 [rows]: the entry of each row's request."""
        place = np.zeros(self.limits.max_num_seqs, np.int64)
        place[self.order()] = np.arange(len(self.by_slot))
        entries: Int64Array = place[self._rows.request[rows]]
        return entries

    def requests(self) -> list[AdmissionRequest]:
        """By entry."""
        return [reservation.request for reservation in self.by_slot.values()]

    def of_tenant(self, tenant: str) -> int:
        """Blocks reserved to a tenant's requests."""
        return sum(each.blocks for each in self.by_slot.values() if each.request.tenant == tenant)

    @property
    def used(self) -> int:
        """Distinct blocks of full groups with a reference."""
        return int(self._pool.used_full[0])

    def snapshot(self) -> RunningSnapshot:
        """What every running request holds and may still ask for; copies."""
        order = self.order()
        out = np.zeros((len(order), COLUMNS), np.int32)
        _summarize(self.core, order, np.zeros(self.limits.max_num_seqs, np.int64), out)
        return RunningSnapshot(self.limits.usable_blocks, self.used, self.windowed, out)


@compiled
def _summarize(core: Core, order: Int32Array, place: Int64Array, out: Int32Array) -> None:
    """``out`` int32 [running, COLUMNS], zero before: `RunningSnapshot.rows`. ``place`` [slots]: scratch."""
    for entry in range(order.size):
        request = core.requests[order[entry]]
        place[order[entry]] = entry
        out[entry, HELD], out[entry, PRIVATE] = request.held, request.private
        out[entry, RESERVED], out[entry, PROMPT] = request.reserved, request.prompt
        out[entry, SEQUENCES] = request.live + request.forks_left
    for at in range(core.rows.size):
        row = core.rows[at]
        if row.request >= 0:
            entry = place[row.request]
            out[entry, PROMPT_LEFT] = max(out[entry, PROMPT_LEFT], out[entry, PROMPT] - row.computed)
            out[entry, OUTPUT] = max(out[entry, OUTPUT], row.length - out[entry, PROMPT])
            out[entry, OUTPUT_LEFT] = max(out[entry, OUTPUT_LEFT], row.limit - row.length)
