"""What the running requests were promised: one family of sequences a request, one slot of the arrays each."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tonnage.cache.admission import AdmissionRequest, Limits, split_promise
from tonnage.cache.admission.snapshot import RunningSnapshot
from tonnage.cache.blocks import steps
from tonnage.cache.blocks.state import Int32Array, Int64Array, State
from tonnage.cache.blocks.tables import Family


class Promises:
    """The ledger: blocks promised to all, the part of it that sliding groups may take, sequences that count.

    ``families`` by slot, in order of admission: the entries of every array that admission reads.
    """

    def __init__(self, state: State, limits: Limits) -> None:
        self.families: dict[int, Family] = {}
        self.promised = 0
        self.reserved = 0
        self.sequences = 0
        self._state, self._limits = state, limits
        self._unused = list(range(limits.max_num_seqs - 1, -1, -1))

    def promise(self, request: AdmissionRequest, salt: bytes) -> Family:
        """A slot and a promise for an admitted request."""
        full, sliding = split_promise(request, self._limits)
        slot = self._unused.pop()
        family = Family(request, salt, slot, full + sliding, sliding, live=1, forks_left=request.n - 1)
        self.families[slot] = family
        self.promised += family.promise
        self.reserved += sliding
        self.sequences += request.n
        requests = self._state.requests
        requests.promised[slot], requests.prompt[slot] = full, request.prompt_tokens
        requests.live[slot], requests.forks_left[slot] = 1, request.n - 1
        return family

    def fork(self, family: Family) -> None:
        """One of its sequences to come has come."""
        family.forks_left -= 1
        family.live += 1
        requests = self._state.requests
        requests.live[family.slot], requests.forks_left[family.slot] = family.live, family.forks_left

    def give_back(self, family: Family) -> None:
        """One of its sequences has been freed: its part of the promise is free at once."""
        before, promise, sliding = family.sequences, family.promise, family.sliding
        requests, slot = self._state.requests, family.slot
        family.live -= 1
        if family.live == 0:  # nobody is left to fork from
            family.forks_left = family.promise = family.sliding = 0
            requests.prompt[slot] = 0
            del self.families[slot]
            self._unused.append(slot)
        else:
            full, family.sliding = split_promise(replace(family.request, n=family.sequences), self._limits)
            family.promise = full + family.sliding
        requests.promised[slot] = family.promise - family.sliding
        requests.forks_left[slot] = family.forks_left
        self.promised -= promise - family.promise
        self.reserved -= sliding - family.sliding
        self.sequences -= before - family.sequences

    def order(self) -> Int32Array:
        """int32 [running]: the slot of each entry."""
        return np.fromiter(self.families, dtype=np.int32, count=len(self.families))

    def entries(self, rows: Int64Array) -> Int64Array:
        """int64 [rows]: the entry of each row's request."""
        place = np.zeros(self._limits.max_num_seqs, np.int64)
        place[self.order()] = np.arange(len(self.families))
        return place[self._state.rows.request[rows]]

    def requests(self) -> list[AdmissionRequest]:
        """By entry."""
        return [family.request for family in self.families.values()]

    def of_tenant(self, tenant: str) -> int:
        """Blocks promised to a tenant's requests."""
        return sum(f.promise for f in self.families.values() if f.request.tenant == tenant)

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
            reserved=self.reserved,
            held=requests.held[order],
            private=requests.private[order],
            promised=requests.promised[order],
            prompt=requests.prompt[order],
            prompt_left=lengths[0],
            output=lengths[1],
            output_left=lengths[2],
            sequences=requests.live[order] + requests.forks_left[order],
        )
