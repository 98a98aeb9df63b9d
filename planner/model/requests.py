"""What one request takes of a pool: blocks of each group of layers, step by step, from its lengths alone.

A request is computed in steps: its prompt in chunks of at most ``step_tokens``, then a token a step; the last
token of its answer is never computed, so ``prompt + output - 1`` tokens are held. Before a step takes blocks,
each group gives back what it needs no more, judged by the tokens *processed*: with several steps in flight
those of the last ones are not yet.

Sources: vllm 0.32.0, v1/core/kv_cache_manager.py (allocate_slots), v1/core/single_type_kv_cache_manager.py
(the managers of full, sliding, chunked and Mamba layers), v1/core/sched/scheduler.py
(_mamba_block_aligned_split), v1/kv_cache_interface.py (is_mamba_prefill_checkpoint_valid);
tests/planner/test_vllm_requests.py holds it against these. Nothing is fitted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import lcm
from typing import Literal

from tonnage.planner.units import ceil_div

HeldKind = Literal["all", "window", "chunk", "state", "fixed"]


@dataclass(frozen=True, slots=True)
class GroupLaw:
    """What one group of layers holds of a request, in blocks of ``block_size`` tokens.

    ``all``: every token. ``window``: the last ``window`` - 1 tokens and those of the step. ``chunk``: from
    the last multiple of ``window`` on. ``state``: a running state, whatever the length; with ``aligned`` one
    in each block of tokens that a step ended in, given back once the next block is processed, and with
    ``checkpoint`` one more where the last chunk of a prompt passes a block border. ``fixed``: ``blocks`` of
    them, whatever the length. ``cap``: most blocks that the admission of a request asks for.
    """

    kind: HeldKind
    block_size: int
    window: int = 0
    blocks: int = 1
    cap: int | None = None
    aligned: bool = False
    checkpoint: bool = False

    def needed(self, slots: int) -> int:
        """Blocks of ``slots`` tokens before any is given back."""
        if self.kind == "fixed" or (self.kind == "state" and not self.aligned):
            return self.blocks
        return ceil_div(slots, self.block_size)

    def given_back(self, processed: int) -> int:
        """Leading blocks no longer needed once so many tokens are processed (get_num_skipped_tokens)."""
        if self.kind == "window":
            return max(0, processed - self.window + 1) // self.block_size
        if self.kind == "chunk":
            return processed // self.window * self.window // self.block_size
        if self.kind == "state" and self.aligned:
            return max(0, processed - 1) // self.block_size
        return 0


@dataclass(frozen=True, slots=True)
class Step:
    """Tokens ``start`` to ``end`` - 1 are computed; ``processed``: those whose step has ended. ``closes``: with
    the last token of the prompt."""

    start: int
    end: int
    processed: int
    closes: bool = False


@dataclass(frozen=True, slots=True)
class RequestBlocks:
    """Blocks of one request, over all groups.

    ``arrival``: the most until its prompt is processed, what its admission asks for among it; ``peak``: the
    most ever; ``started``: once its prompt is processed; ``fullest``: the most while it decodes after that;
    ``last``: at the last token it computes.
    """

    arrival: int
    peak: int
    started: int
    fullest: int
    last: int


@dataclass(frozen=True, slots=True)
class RequestLaw:
    """How blocks follow from lengths. ``bytes_per_block``: on one rank; ``in_flight``: steps whose tokens are
    not yet processed when the next but one is planned, that one included; ``hit_tokens``: prefixes are found in
    multiples of it (None: no prefix caching); ``source``: whose rules they are; ``reserves``: prompt and answer
    are set aside whole when the request is admitted."""

    groups: tuple[GroupLaw, ...]
    bytes_per_block: int
    step_tokens: int
    in_flight: int
    hit_tokens: int | None
    source: str
    reserves: bool = False
    note: str = ""  # where these are not quite the rules of the version planned

    @property
    def floor_blocks(self) -> int:
        """Blocks of the shortest request: a page is taken whole."""
        return sum(group.needed(1) for group in self.groups)

    @property
    def fixed_blocks(self) -> int:
        """Blocks whatever the length: running states, the cache of an encoder's output."""
        return sum(group.needed(1) for group in self.groups if group.kind in ("state", "fixed"))

    @property
    def bends(self) -> bool:
        """Whether bytes are more than so many a token: states, windows."""
        return any(group.kind in ("window", "chunk", "state") for group in self.groups)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token more in the groups that keep every token."""
        return sum(self.bytes_per_block // group.block_size for group in self.groups if group.kind == "all")

    @property
    def windows(self) -> tuple[tuple[int, int], ...]:
        """(window, bytes of one token more until then) of the groups that keep no more than a window."""
        found: dict[int, int] = {}
        for group in self.groups:
            if group.kind in ("window", "chunk"):
                found[group.window] = found.get(group.window, 0) + self.bytes_per_block // group.block_size
        return tuple(sorted(found.items()))

    def blocks(self, prompt: int, output: int) -> RequestBlocks:
        """Of a request that shares no prefix; ``output`` at least 1."""
        if self.reserves:
            whole = sum(self._asked(group, prompt + output) for group in self.groups)
            return RequestBlocks(whole, whole, whole, whole, whole)
        steps = list(self._prefill(prompt))
        held = [self._held(steps, place) for place in range(len(steps))]
        asked = sum(self._admitted(group, prompt) for group in self.groups)
        if output == 1:
            arrival = max(asked, *held)
            return RequestBlocks(arrival, arrival, held[-1], held[-1], held[-1])
        settled = min(self.in_flight, output - 1)  # decode steps until the prompt is processed
        history = self._history(steps, settled)
        early = [self._held(history, place) for place in range(len(steps), len(history))]
        started = early[-1]
        final = prompt + output - 2
        later = (self._decoding(at) for at in self._borders(prompt + settled, final))
        fullest = max(started, max(later, default=0))
        last = started if output - 1 == settled else self._decoding(final)
        arrival = max(asked, *held, *early)
        return RequestBlocks(arrival, max(arrival, fullest), started, fullest, last)

    def together(self, prompt: int) -> int:
        """Most prompts that may be computed and not yet processed at one time: those of the steps in flight,
        one of which may have begun in the step before."""
        return self.in_flight * (self.step_tokens // prompt) + 1

    def _prefill(self, prompt: int) -> Iterator[Step]:
        ends = [0]
        while ends[-1] < prompt:
            ends.append(self._chunk_end(ends[-1], prompt))
            yield self._step(ends, len(ends) - 1, prompt)

    def _step(self, ends: list[int], place: int, prompt: int) -> Step:
        end = ends[place]
        return Step(ends[place - 1], end, ends[max(0, place - self.in_flight)], end == prompt)

    def _chunk_end(self, start: int, prompt: int) -> int:
        """Where the chunk from ``start`` on ends: states are kept where a block ends."""
        end = min(prompt, start + self.step_tokens)
        size = self._state_block
        if not size:
            return end
        last = (prompt - 1) // size * size
        exported = end >= prompt and self._exports(start, end)
        if end < prompt:
            whole = end // size * size
            if whole > start or size <= self.step_tokens:
                end = whole
        stops = () if exported else (last, (start // size + 1) * size if start % size else 0)
        return min((stop for stop in stops if start < stop < end), default=end)

    @property
    def _state_block(self) -> int:
        """Tokens of a block of the states kept for prefix hits; 0 without."""
        return max((group.block_size for group in self.groups if group.aligned), default=0)

    def _exports(self, start: int, end: int) -> bool:
        """Whether the chunk that ends a prompt writes a state at the last border before its end."""
        size = self._state_block
        at = (end - 1) // size * size
        return (
            any(group.checkpoint for group in self.groups)
            and start % size == 0
            and ceil_div(end, size) - 2 > (start - 1) // size
            and start + size <= at < end
        )

    def _admitted(self, group: GroupLaw, prompt: int) -> int:
        """What admission asks for: the whole prompt."""
        if group.kind == "state" and group.aligned:
            return min(group.needed(prompt), 1 + int(group.checkpoint and self._exports(0, prompt)))
        return self._asked(group, prompt)

    @staticmethod
    def _asked(group: GroupLaw, tokens: int) -> int:
        """Blocks of so many tokens, no more than the group ever holds."""
        needed = group.needed(tokens)
        return needed if group.cap is None else min(needed, group.cap)

    def _history(self, steps: list[Step], decoded: int) -> list[Step]:
        """The steps of the prompt and of ``decoded`` tokens behind it."""
        prompt = steps[-1].end
        ends = [0, *(step.end for step in steps), *range(prompt + 1, prompt + decoded + 1)]
        behind = range(len(steps) + 1, len(ends))
        return [*steps, *(self._step(ends, place, prompt) for place in behind)]

    def _held(self, steps: list[Step], place: int) -> int:
        """Blocks held at step ``place``."""
        step = steps[place]
        return sum(
            self._states(group, steps, place)
            if group.aligned
            else group.needed(step.end) - group.given_back(step.processed)
            for group in self.groups
        )

    def _states(self, group: GroupLaw, steps: list[Step], place: int) -> int:
        """States kept: of the blocks that steps ended in, those not yet given back."""
        kept, low = set(), group.given_back(steps[place].processed)
        for step in (steps[at] for at in range(place, -1, -1)):
            block = ceil_div(step.end, group.block_size) - 1
            if block < low:
                break
            kept.add(block)
            if group.checkpoint and step.closes and self._exports(step.start, step.end):
                kept.add(block - 1)
        return sum(block >= low for block in kept)

    def _decoding(self, at: int) -> int:
        """Blocks held when token ``at`` is computed, its prompt processed."""
        processed = at - self.in_flight + 1
        return sum(group.needed(at + 1) - group.given_back(processed) for group in self.groups)

    def _borders(self, low: int, high: int) -> Iterator[int]:
        """Steps from ``low`` to ``high`` at which most may be held: those that take a block. What groups that
        give blocks back hold repeats itself with their block sizes, and the others grow: the last round is
        enough."""
        sizes = {group.block_size for group in self.groups if group.kind != "fixed"}
        window = max((group.window for group in self.groups), default=0)
        since = max(low, high - lcm(*sizes) - window - 2 * self.in_flight) if sizes else high
        if low <= high:
            yield from (low, high)
        for size in sizes:
            yield from range(ceil_div(since, size) * size, high + 1, size)
