"""The waiting queue: its order, and which requests may pass its head.

**Order.** Requests are sorted by ``arrival + priority * ageing``, smallest first. A lower ``priority`` goes
first (as in vLLM), and one step of priority is worth ``ageing`` seconds of waiting. A request's sort key never
changes, so only requests that arrive within a bounded time after it can overtake it. No request starves, and
nothing is sorted again.

Where several API keys use the engine, each has a share of its sequences and blocks. Requests of keys that do
not exceed their share come first (`tonnage.cache.admission.shares`).

**Passing.** While the head waits for blocks, the next requests may start if they do not delay its forecast
start (`tonnage.cache.admission.passing`). The first forecast start of a head is remembered; after that step no
request overtakes it any more. A request that waits for its tenant's quota delays no other request.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from tonnage.cache.admission.types import AGEING_SECONDS, AdmissionRequest, Head, Wait, WaitReason
from tonnage.cache.errors import CacheConfigError, InvalidRequest, UnknownSequence

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request in the scheduler's waiting queue.

    Attributes:
        id: The caller's id, unique in the queue and ascending in order of arrival. Of two requests with equal
            arrival time and priority, the one with the lower id goes first.
        request: The request's lengths, tenant and priority, as admission needs them.
        arrival: Arrival time in seconds.
    """

    id: int
    request: AdmissionRequest
    arrival: float


class WaitingQueue:
    """The queue of requests that wait for admission.

    Args:
        ageing: Seconds of waiting that one step of priority is worth.
        lookahead: Number of requests behind the head of the queue that may try to pass it.

    Raises:
        CacheConfigError: A value is out of range.
    """

    def __init__(self, *, ageing: float = AGEING_SECONDS, lookahead: int = 8) -> None:
        if ageing <= 0:
            raise CacheConfigError(
                f"ageing is {ageing} s and must be above 0", field="ageing", hint="seconds, for example 10"
            )
        if lookahead < 0:
            raise CacheConfigError(
                f"lookahead is {lookahead} and must be at least 0",
                field="lookahead",
                hint="0 lets no request pass the queue's head",
            )
        self.ageing, self.lookahead = ageing, lookahead
        # (sort key, id) of each entry in order, from the place `_first` on. Places before it are free, so that
        # the head of a long queue is removed without moving the entries behind it.
        self._order: list[tuple[float, int]] = []
        self._first = 0
        self._entries: dict[int, Waiting] = {}

        # Number of queued requests of each tenant.
        self._tenants: Counter[str] = Counter()
        # Request id -> engine step at which the request was forecast to start when it first was the head.
        self._due: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._order) - self._first

    def __iter__(self) -> Iterator[Waiting]:
        """Iterate over the waiting requests in queue order; the queue must not change meanwhile."""
        return (self._entries[self._order[place][1]] for place in range(self._first, len(self._order)))

    def __contains__(self, id: int) -> bool:
        return id in self._entries

    @property
    def tokens(self) -> int:
        """Upper bound of the prompt and output tokens of all waiting requests together."""
        return sum(entry.request.total_tokens * entry.request.n for entry in self._entries.values())

    def push(self, entry: Waiting) -> None:
        """Insert a request into the queue; a preempted request keeps its arrival time and thus its place.

        Raises InvalidRequest if the id is in the queue.
        """
        if entry.id in self._entries:
            raise InvalidRequest(f"request {entry.id} is already queued", field="id")
        insort(self._order, self._key(entry), self._first)
        self._entries[entry.id] = entry
        self._tenants[entry.request.tenant] += 1

    def remove(self, id: int) -> Waiting:
        """Remove a request that was admitted, rejected or cancelled, and return its queue entry.

        Raises UnknownSequence if it is not queued.
        """
        entry = self._entries.pop(id, None)
        if entry is None:
            raise UnknownSequence(f"request {id} is not queued", field="id")
        self._due.pop(id, None)
        self._close(bisect_left(self._order, self._key(entry), self._first))
        tenant = entry.request.tenant
        self._tenants[tenant] -= 1
        if not self._tenants[tenant]:
            del self._tenants[tenant]
        return entry

    def _key(self, entry: Waiting) -> tuple[float, int]:
        return entry.arrival + entry.request.priority * self.ageing, entry.id

    def _close(self, place: int) -> None:
        """Remove the entry at index ``place`` of the sorted list, by moving the entries on its shorter side."""
        order, first = self._order, self._first
        if place - first > len(order) - place:
            del order[place]
            return
        order[first + 1 : place + 1] = order[first:place]
        self._first += 1
        if 2 * self._first > len(order):  # more than half of the list's places are free
            del order[: self._first]
            self._first = 0

    def take(
        self,
        ask: Callable[[Waiting, Head | None], Answer | Wait],
        start_of: Callable[[AdmissionRequest], Head],
        step: int,
        rank: Callable[[AdmissionRequest], Any] | None = None,
    ) -> tuple[Waiting, Answer] | None:
        """Remove and return the next request that can start or is rejected, or None if all must wait.

        Args:
            ask: Function that decides on an entry and admits it if possible; its second argument is the head
                that the entry would overtake.
            start_of: Function that forecasts the start of the first request (the head).
            step: Number of the current engine step.
            rank: Function that maps a request to its sort key among several tenants; the lowest key goes first.
                Requests with equal keys keep the queue's order, as do all requests if it is None.
        """
        head: Head | None = None
        asked = 0
        # Number of entries per tenant that wait for the tenant's quota. `lookahead` bounds it, as it bounds the
        # entries that are tried behind a waiting head.
        over: Counter[str] = Counter()
        entries: Iterable[Waiting] = self
        if rank is not None and len(self._tenants) > 1:
            entries = sorted(self, key=lambda entry: rank(entry.request))
        for entry in entries:
            if asked > self.lookahead:
                return None
            if over and over[entry.request.tenant] > self.lookahead:
                continue
            answer = ask(entry, head)
            if not isinstance(answer, Wait):
                self.remove(entry.id)
                return entry, answer
            if answer.reason is WaitReason.SEQUENCES:
                return None
            if answer.reason is WaitReason.TENANT_QUOTA:
                over[entry.request.tenant] += 1
                continue
            asked += 1
            if head is None:
                if self.lookahead == 0:
                    return None
                head = self._head(entry, start_of, step)
                if head is None:
                    return None
        return None

    def _head(self, entry: Waiting, start_of: Callable[[AdmissionRequest], Head], step: int) -> Head | None:
        head = start_of(entry.request)
        due = self._due.setdefault(entry.id, step + head.start)
        if step >= due:
            return None
        return head if step + head.start <= due else replace(head, start=due - step)
