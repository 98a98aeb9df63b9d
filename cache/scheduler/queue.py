"""The waiting queue: who is asked next, and who may pass.

**Order.** ``arrival + priority * ageing``, smallest first: a lower ``priority`` goes first (as in vLLM), and
one step of priority is worth ``ageing`` seconds of waiting. The key never changes, so an entry is overtaken
only by what arrives within a bounded time after it: nobody starves, and nothing is sorted again.

**Passing.** While the head waits for room, the next ones are asked too, and start only if the head's own start
is not delayed (`tonnage.cache.admission.passing`). The first start forecast for a head
is remembered: once it is past due nobody passes any more. A request that waits for its tenant's quota holds up
nobody.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

from tonnage.cache.admission import AdmissionRequest, Head, Wait, WaitReason
from tonnage.cache.admission.types import AGEING_SECONDS
from tonnage.cache.errors import CacheConfigError, InvalidRequest, UnknownSequence

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Waiting:
    """One entry. ``id`` is the caller's, unique among those that wait, and rises with the arrivals: of two that
    arrived at the same time the lower one goes first; ``arrival`` in seconds."""

    id: int
    request: AdmissionRequest
    arrival: float


class WaitingQueue:
    """``ageing``: seconds of waiting that one step of priority is worth. ``lookahead``: how many entries behind
    a waiting head are asked. Raises CacheConfigError for values that cannot work."""

    def __init__(self, *, ageing: float = AGEING_SECONDS, lookahead: int = 8) -> None:
        if ageing <= 0:
            raise CacheConfigError(f"{ageing} is not positive", field="ageing", hint="seconds, for example 10")
        if lookahead < 0:
            raise CacheConfigError(f"{lookahead} is negative", field="lookahead", hint="0: nobody passes")
        self.ageing, self.lookahead = ageing, lookahead
        self._order: list[tuple[float, int]] = []  # key, id
        self._entries: dict[int, Waiting] = {}
        self._keys: dict[int, tuple[float, int]] = {}
        self._due: dict[int, int] = {}  # id of a former or present head -> step it was to start at

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Waiting]:
        """In order; the queue must not change meanwhile."""
        return (self._entries[id] for _, id in self._order)

    def __contains__(self, id: int) -> bool:
        return id in self._entries

    @property
    def tokens(self) -> int:
        """Prompt and output tokens that those who wait may need."""
        return sum(entry.request.total_tokens * entry.request.n for entry in self._entries.values())

    def push(self, entry: Waiting) -> None:
        """Raises InvalidRequest when the id already waits. A preempted request comes back with its first
        arrival, hence before all that arrived after it."""
        if entry.id in self._entries:
            raise InvalidRequest(f"request {entry.id} already waits", field="id")
        key = (entry.arrival + entry.request.priority * self.ageing, entry.id)
        insort(self._order, key)
        self._entries[entry.id], self._keys[entry.id] = entry, key

    def remove(self, id: int) -> Waiting:
        """Take an entry out (admitted, refused or cancelled). Raises UnknownSequence when it does not wait."""
        key = self._keys.pop(id, None)
        if key is None:
            raise UnknownSequence(f"request {id} does not wait", field="id")
        self._due.pop(id, None)
        del self._order[bisect_left(self._order, key)]
        return self._entries.pop(id)

    def take(
        self,
        ask: Callable[[Waiting, Head | None], Answer | Wait],
        start_of: Callable[[Waiting], Head],
        step: int,
    ) -> tuple[Waiting, Answer] | None:
        """The next entry that need not wait, taken out of the queue, with its answer; None: all wait.

        ``ask`` decides (and admits) one entry, behind ``Head`` where it would pass one; ``start_of`` forecasts
        a head's start; ``step`` counts engine steps.
        """
        head: Head | None = None
        asked = 0
        over: Counter[str] = Counter()  # by tenant: entries over its quota, bounded as those behind a head are
        for entry in self:
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

    def _head(self, entry: Waiting, start_of: Callable[[Waiting], Head], step: int) -> Head | None:
        head = start_of(entry)
        due = self._due.setdefault(entry.id, step + head.start)
        if step >= due:
            return None
        return head if step + head.start <= due else replace(head, start=due - step)
