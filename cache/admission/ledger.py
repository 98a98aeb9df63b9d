"""The ledger of reserved KV blocks: one `Reservation` per running request, indexed into arrays of counts."""

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
    """The KV blocks reserved for one request: for its live sequences and for forks that are still to come.

    Attributes:
        request: The admitted request.
        salt: Cache salt; requests share cached blocks only with requests of the same salt.
        slot: Index of the request in the manager's arrays of requests.
        blocks: Reserved blocks in all groups.
        windowed: Part of ``blocks`` for sliding windows and recurrent states, which is subtracted from the pool
            in full at admission.
        sequences: Live sequences plus forks to come.
    """

    request: AdmissionRequest
    salt: bytes
    slot: int
    blocks: int
    windowed: int
    sequences: int


class Reservations:
    """The KV blocks reserved for each running request, with totals.

    Attributes:
        by_slot: Reservations by array index of the request, in order of admission. Every array that admission
            reads has this order.
        reserved: Reserved blocks of all requests.
        windowed: Part of ``reserved`` for sliding windows and recurrent states.
        sequences: Live sequences plus forks to come.
        produced: int64 [slots]: output tokens of each request before its last preemption.
        named: Number of running requests whose tenant has a name.
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
        self.produced = np.zeros(limits.max_num_seqs, np.int64)
        self.named = 0
        # Result of `order`, kept until a request starts or ends.
        self._order: Int32Array | None = None
        # The result of `snapshot`, with the number of the step after which it was made. None after a fork or a
        # request's start or end; a later step makes the result invalid.
        self._snapshot: tuple[int, RunningSnapshot] | None = None

    def __getitem__(self, row: int) -> Reservation:
        """Return the reservation of the request that owns the sequence in ``row`` of the block tables."""
        return self.by_slot[int(self._rows.request[row])]

    def reserve(self, request: AdmissionRequest, salt: bytes) -> Reservation:
        """Reserve the most KV blocks that an admitted request can need, and give the request an array index."""
        full, windowed = split_reservation(request, self.limits)
        slot, requests = self._unused.pop(), self._requests
        reservation = Reservation(request, salt, slot, full + windowed, windowed, request.n)
        self.by_slot[slot] = reservation
        self.reserved += full + windowed
        self.windowed += windowed
        self.sequences += request.n
        requests.reserved[slot], requests.prompt[slot] = full, request.prompt_tokens
        requests.live[slot], requests.forks_left[slot] = 1, request.n - 1
        self.produced[slot] = request.produced
        self.named += bool(request.tenant)
        self._order = self._snapshot = None
        return reservation

    def fork(self, reservation: Reservation) -> None:
        """Count in the reservation one more live sequence of its request, created by a fork."""
        self._snapshot = None
        self._requests.forks_left[reservation.slot] -= 1
        self._requests.live[reservation.slot] += 1

    def give_back(self, reservation: Reservation) -> None:
        """Shrink a request's reservation after some of its sequences have ended and released blocks."""
        self._snapshot = None
        requests, slot = self._requests, reservation.slot
        live, forks = int(requests.live[slot]), int(requests.forks_left[slot])
        full = windowed = sequences = 0
        if live == 0:  # without a live sequence no fork is possible any more
            requests.prompt[slot] = requests.forks_left[slot] = 0
            del self.by_slot[slot]
            self.named -= bool(reservation.request.tenant)
            self._order = None
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
        """Return the array index (slot) of each running request in order of admission, int32 [running]."""
        if self._order is None:
            self._order = np.fromiter(self.by_slot, dtype=np.int32, count=len(self.by_slot))
        return self._order

    def entries(self, rows: Int64Array) -> Int64Array:
        """Return, for each row of the block tables, the snapshot index of its request, int64 [rows]."""
        place = np.zeros(self.limits.max_num_seqs, np.int64)
        place[self.order()] = np.arange(len(self.by_slot))
        entries: Int64Array = place[self._rows.request[rows]]
        return entries

    def of_tenant(self, tenant: str) -> int:
        """Return the number of KV blocks reserved for a tenant's running requests."""
        return sum(each.blocks for each in self.by_slot.values() if each.request.tenant == tenant)

    def snapshot(self) -> RunningSnapshot:
        """Return how many KV blocks each running request holds and may still need.

        The method returns the same object until a request starts or ends, or a step or fork changes its blocks.
        """
        calls = int(self._pool.calls[0])
        if self._snapshot is None or self._snapshot[0] != calls:
            out = np.zeros((len(self.by_slot), COLUMNS), np.int32)
            _summarize(self.core, self.order(), np.zeros(self.limits.max_num_seqs, np.int64), out)
            used = int(self._pool.used_full[0])
            self._snapshot = calls, RunningSnapshot(self.limits.usable_blocks, used, self.windowed, out)
        return self._snapshot[1]


@compiled
def _summarize(core: Core, order: Int32Array, place: Int64Array, out: Int32Array) -> None:
    """Write block and token counts of each running request into ``out``, int32 [running, COLUMNS] of zeros.

    ``order`` holds the array index of each running request. ``place`` [slots] is a scratch array.
    """
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
