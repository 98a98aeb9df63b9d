"""Matchers, which track how far a sequence's output is in its grammar, and the time limit for token masks."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from tonnage.planner.engines.runtime.grammars import GRAMMARS_BYTES
from tonnage.server.engines.grammars import library, memory
from tonnage.server.engines.process_memory import anonymous_bytes

if TYPE_CHECKING:
    import llguidance  # this package is optional (extra "grammar")

    from tonnage.server.engines.grammars.structural_tags import TagMatcher

# Upper bound in seconds of processor time for all masks of a step, computed one after another. Other streams
# then wait for less than a second, including the slowest single mask (0.1 to 0.2 s) and the step itself. 64
# ordinary masks take 0.02 s. Processor time is measured, because other processes on the machine must not make a
# grammar exceed the budget.
STEP_SECONDS = 0.25

OVER_BUDGET = (
    f"the grammar is too slow: the masks of this step took more than {STEP_SECONDS:g} s of processor time; "
    "request fewer answers at once, or use a simpler grammar"
)

# Upper bound in bytes of the memory of all grammars in the cache or in use. The plan reserves this memory.
HELD_BYTES = GRAMMARS_BYTES

OVER_MEMORY = f"the grammar needs more memory than is left of the {HELD_BYTES >> 20} MiB for grammars"

_BUILDING = threading.Event()  # set while a grammar compiles: memory growth is then not attributed to a mask


class CompiledGrammar:
    """A compiled grammar, from which a matcher is created for each output sequence.

    ``held`` is its memory in bytes: the memory that compiling it took in the trial process, plus the growth of
    this process while its masks were computed.
    """

    def __init__(self, tokenizer: llguidance.LLTokenizer, source: str, vocab_size: int, held: int = 0) -> None:
        self.held = held
        _BUILDING.set()
        try:
            self._build(tokenizer, source, vocab_size)
        finally:
            _BUILDING.clear()

    def _build(self, tokenizer: llguidance.LLTokenizer, source: str, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.ends = tokenizer.eos_tokens
        self.matcher = library.matcher_of(tokenizer, source)
        began = time.thread_time()
        self.first = self.matcher.compute_bitmask()
        self.seconds = time.thread_time() - began
        library.check(self.matcher)
        memory.count(self)

    def begin(self, ends: tuple[int, ...]) -> GrammarMatcher:
        """Return a matcher for one output sequence; one of the tokens ``ends`` may end its complete text."""
        return GrammarMatcher(self, ends)


class GrammarMatcher:
    """The progress of one output sequence in its grammar, which determines the permitted next tokens.

    When the text is complete, one of the tokens ``ends`` may follow. Without ``ends`` the sequence ends as soon
    as the text is complete. ``seconds`` is the processor time of computing the last mask and of accepting the
    token before it.
    """

    def __init__(self, compiled: CompiledGrammar, ends: tuple[int, ...]) -> None:
        self.compiled = compiled
        self._matcher = compiled.matcher.deep_copy()
        self._vocab_size, self._own_ends, self._ends = compiled.vocab_size, compiled.ends, ends
        self._bits: bytes | None = compiled.first
        self.seconds = compiled.seconds
        self._spent = 0.0  # processor time for accepting the previous token, in seconds

    @property
    def due(self) -> bool:
        """Whether the mask of permitted next tokens is still to be computed."""
        return self._bits is None

    def fill(self) -> None:
        """Compute the mask of the tokens that the grammar permits next.

        Raises:
            GrammarError: the mask exceeds llguidance's limits.
        """
        before, began = anonymous_bytes(), time.thread_time()
        bits = self._matcher.compute_bitmask()
        self.seconds = time.thread_time() - began + self._spent
        if not _BUILDING.is_set():
            self.compiled.held += max(0, anonymous_bytes() - before)
        self._check()
        self._bits = bits

    def _check(self) -> None:
        """Raise GrammarError if llguidance's matcher is in an error state."""
        if self._matcher.is_error():
            said = library.first_line(self._matcher.get_error())
            raise library.GrammarError(f"the grammar is too complex at this point of the answer: {said}")

    def mask(self, logits: torch.Tensor) -> None:
        """Set the logits of tokens that the grammar does not permit next to -inf, in place.

        ``logits`` is [vocabulary].
        """
        allowed = torch.from_numpy(self._allowed())
        logits.masked_fill_(~allowed.to(logits.device), float("-inf"))

    def row(self) -> npt.NDArray[np.int32]:
        """Return the token mask as int32 words [vocabulary / 32], one bit per token, lowest bit first.

        A bit of 1 means that the grammar permits the token next.
        """
        packed = np.packbits(self._allowed(), bitorder="little")
        return np.pad(packed, (0, -len(packed) % 4)).view(np.int32)

    def _allowed(self) -> npt.NDArray[np.bool_]:
        """Return for each token whether the grammar permits it next, [vocabulary].

        llguidance permits its own EOS token when the text is complete. The result permits the tokens ``ends``
        instead.
        """
        if self._bits is None:
            self.fill()
        assert self._bits is not None
        unpacked = np.unpackbits(np.frombuffer(self._bits, np.uint8), bitorder="little")
        allowed = unpacked[: self._vocab_size].astype(np.bool_)
        complete = bool(unpacked[self._own_ends[0]])
        for own in self._own_ends:
            allowed[own : own + 1] = False
        if complete:
            allowed[list(self._ends)] = True
        return allowed

    def accept(self, token: int) -> bool:
        """Advance by one output token; return whether the text is complete and no token may follow.

        Raises:
            GrammarError: the grammar does not permit the token, or it exceeds llguidance's limits.
        """
        if token in self._ends:
            return True
        self._bits = None
        began = time.thread_time()
        taken = self._matcher.consume_token(token)
        self._spent = time.thread_time() - began
        if not taken:
            self._check()
            raise library.GrammarError(f"token {token} does not match the grammar", field="grammar")
        return not self._ends and self._matcher.is_accepting()


def fill(drawing: Sequence[tuple[str, GrammarMatcher | TagMatcher]]) -> dict[int, str]:
    """Compute the token masks that a step still needs, within its time budget of `STEP_SECONDS`.

    Tenants share the budget: the next mask computed is the cheapest one of the tenant that has used the least
    time in this step. Once the budget is used up, no further mask is computed.

    Args:
        drawing: (tenant, matcher) of each sequence that draws a token.

    Returns:
        Error messages by index in ``drawing``, for the sequences that have to end.
    """
    errors: dict[int, str] = {}
    taken = dict.fromkeys((tenant for tenant, _ in drawing), 0.0)
    queues: dict[str, list[tuple[float, int]]] = {tenant: [] for tenant in taken}
    for at, (tenant, matcher) in enumerate(drawing):
        if matcher.due:
            heapq.heappush(queues[tenant], (matcher.seconds, at))
    turns = [(0.0, tenant) for tenant, queue in queues.items() if queue]
    while turns:
        _, tenant = heapq.heappop(turns)
        _, at = heapq.heappop(queues[tenant])
        matcher = drawing[at][1]
        if sum(taken.values()) > STEP_SECONDS:
            errors[at] = OVER_BUDGET
        else:
            try:
                matcher.fill()
            except Exception as error:  # also catch xgrammar's errors, because no request may end the engine
                errors[at] = library.first_line(str(error))
            taken[tenant] += matcher.seconds
        if queues[tenant]:
            heapq.heappush(turns, (taken[tenant], tenant))
    if memory.held_bytes() > HELD_BYTES:
        largest = max((matcher.compiled for _, matcher in drawing), key=lambda compiled: compiled.held)
        errors |= {at: OVER_MEMORY for at, (_, matcher) in enumerate(drawing) if matcher.compiled is largest}
    return errors
