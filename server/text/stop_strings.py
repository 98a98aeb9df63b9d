"""Stop strings: a filter that ends a text before its first stop string, in time linear in the text.

All stop strings of a request form one automaton (A. Aho, M. Corasick, "Efficient string matching", CACM 18(6),
1975). A character of the text costs a few dictionary lookups, whatever the number and length of the strings.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache

# Upper bound of the characters of all stop strings of a request. An automaton of this size takes 4 ms to build
# and 1 MiB. Clients use a few short strings; vLLM has no bound.
MAX_STOP_CHARACTERS = 4096


class StopAutomaton:
    """An automaton that finds the first stop string in a text that arrives in pieces.

    A state is the longest suffix of the text that is a prefix of a stop string; state 0 is the empty suffix.

    Attributes:
        depth: number of characters of each state's suffix.
        match: characters of the longest stop string with which each state's suffix ends, 0 for none.
    """

    __slots__ = ("_fail", "_next", "depth", "match")

    def __init__(self, stops: Sequence[str]) -> None:
        self._next: dict[tuple[int, str], int] = {}
        self.depth, self.match = [0], [0]
        children: list[list[tuple[str, int]]] = [[]]
        for stop in stops:
            state = 0
            for character in stop:
                following = self._next.get((state, character))
                if following is None:
                    following = self._next[state, character] = len(self.depth)
                    self.depth.append(self.depth[state] + 1)
                    self.match.append(0)
                    children.append([])
                    children[state].append((character, following))
                state = following
            self.match[state] = len(stop)
        self._fail = [0] * len(self.depth)
        waiting = deque(child for _, child in children[0])
        while waiting:  # breadth first, because a state's suffix link leads to a shorter suffix
            state = waiting.popleft()
            for character, child in children[state]:
                self._fail[child] = self.follow(self._fail[state], character)
                self.match[child] = self.match[child] or self.match[self._fail[child]]
                waiting.append(child)

    def follow(self, state: int, character: str) -> int:
        """Return the automaton's state after one more character of the text."""
        found = self._next.get((state, character))
        while found is None:
            if state == 0:
                return 0
            state = self._fail[state]
            found = self._next.get((state, character))
        return found


@lru_cache(8)
def automaton(stops: tuple[str, ...]) -> StopAutomaton:
    """Return the automaton of ``stops``, cached so that all sequences with the same stop strings share it."""
    return StopAutomaton(stops)


class StopStrings:
    """A filter that ends a text before its first stop string; the text arrives in pieces.

    Text that may be the beginning of a stop string is held back. The stop string that is complete first takes
    effect; if several are complete at the same character, the longest does. The result therefore does not
    depend on how the text is split into pieces.
    """

    __slots__ = ("_automaton", "_held", "_state", "matched", "stopped")

    def __init__(self, stop: Sequence[str]) -> None:
        self._automaton = automaton(tuple(stop)) if stop else None
        self._state, self._held = 0, ""
        self.stopped = False
        self.matched = ""  # the stop string that ended the text

    @property
    def active(self) -> bool:
        """Whether the request has any stop string."""
        return self._automaton is not None

    def push(self, piece: str) -> str:
        """Add the next piece of an answer's text, and return the text that may be sent to the client now.

        Sets ``stopped`` when a stop string is complete.
        """
        if self._automaton is None or self.stopped:
            return "" if self.stopped else piece
        text, state, follow = self._held + piece, self._state, self._automaton.follow
        for at, character in enumerate(piece, start=len(self._held) + 1):
            state = follow(state, character)
            if self._automaton.match[state]:
                self.stopped, self._held = True, ""
                begin = at - self._automaton.match[state]
                self.matched = text[begin:at]
                return text[:begin]
        self._state = state
        shown = len(text) - self._automaton.depth[state]
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """Return the text that was held back, once the answer has ended without a stop string."""
        held, self._held = self._held, ""
        return held
