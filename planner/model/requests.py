"""Blocks that one request needs, per group of layers and step, computed from its lengths alone.

A request is computed in steps: first its prompt in chunks of at most `step_tokens`, then one token per step.
The last token of the answer is never computed, so that `prompt + output - 1` tokens are stored. Before a step
takes blocks, each group frees the blocks that it no longer needs. Only *processed* tokens count for that, and
with several steps in flight the tokens of the latest steps are not processed yet.

Sources: vllm 0.32.0, v1/core/kv_cache_manager.py (allocate_slots), v1/core/single_type_kv_cache_manager.py
(managers of full, sliding, chunked and Mamba layers), v1/core/sched/scheduler.py (_mamba_block_aligned_split),
v1/kv_cache_interface.py (is_mamba_prefill_checkpoint_valid). tests/planner/test_vllm_requests.py compares this
module with them. No constant is fitted.
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
    """The rule by which one group of layers holds KV blocks of a request.

    `kind` says which tokens' blocks are held:

    - `all`: every token.
    - `window`: the last `window` - 1 tokens and the tokens of the current step.
    - `chunk`: the tokens from the last multiple of `window` on.
    - `state`: one running state for any length.
    - `fixed`: `blocks` blocks for any length.

    Attributes:
        block_size: tokens per block.
        cap: upper bound of the blocks that must be free to admit a request, or None.
        aligned: for `state`: whether each block in which a step ended has a state, freed once the next block is
            processed.
        checkpoint: for `state`: whether one more state is kept if the last chunk of a prompt crosses the end of
            a block.
    """

    kind: HeldKind
    block_size: int
    window: int = 0
    blocks: int = 1
    cap: int | None = None
    aligned: bool = False
    checkpoint: bool = False

    def needed(self, slots: int) -> int:
        """Return the KV blocks that `slots` tokens need before any block is freed."""
        if self.kind == "fixed" or (self.kind == "state" and not self.aligned):
            return self.blocks
        return ceil_div(slots, self.block_size)

    def freed(self, processed: int) -> int:
        """Return the leading blocks that can be freed once `processed` tokens are processed.

        vLLM computes them in get_num_skipped_tokens.
        """
        if self.kind == "window":
            return max(0, processed - self.window + 1) // self.block_size
        if self.kind == "chunk":
            return processed // self.window * self.window // self.block_size
        if self.kind == "state" and self.aligned:
            return max(0, processed - 1) // self.block_size
        return 0


@dataclass(frozen=True, slots=True)
class RequestStep:
    """One step of a request, which computes the tokens from `start` to `end` - 1.

    Attributes:
        processed: number of tokens whose steps have ended when this step is scheduled.
        closes: whether the step computes the last token of the prompt.
    """

    start: int
    end: int
    processed: int
    closes: bool = False


@dataclass(frozen=True, slots=True)
class RequestBlocks:
    """Numbers of KV blocks of one request, summed over all groups of layers.

    Attributes:
        arrival: maximum until the prompt is processed, including the free blocks that admission requires.
        peak: maximum over the whole request.
        started: blocks once the prompt is processed.
        fullest: maximum during the decode that follows.
        last: blocks at the last token that is computed.
    """

    arrival: int
    peak: int
    started: int
    fullest: int
    last: int


@dataclass(frozen=True, slots=True)
class RequestLaw:
    """The rules that give the KV blocks of a request from its lengths.

    Attributes:
        groups: one rule per group of layers.
        bytes_per_block: bytes of a block on one rank.
        step_tokens: maximum number of tokens in a step.
        in_flight: maximum number of unprocessed steps while a step is scheduled, including that step.
        hit_tokens: prefixes are reused in multiples of this number of tokens; None without prefix caching.
        source: the engine and version that the rules are from.
        reserves: whether the blocks of prompt and answer are reserved at admission.
        note: how these rules differ from the rules of the planned version, or empty.
    """

    groups: tuple[GroupLaw, ...]
    bytes_per_block: int
    step_tokens: int
    in_flight: int
    hit_tokens: int | None
    source: str
    reserves: bool = False
    note: str = ""

    @property
    def floor_blocks(self) -> int:
        """Return the blocks of the shortest request; even one token needs a whole block in each group."""
        return sum(group.needed(1) for group in self.groups)

    @property
    def fixed_blocks(self) -> int:
        """Return the blocks of a request that do not depend on its length.

        They hold running states and an encoder's output.
        """
        return sum(group.needed(1) for group in self.groups if group.kind in ("state", "fixed"))

    @property
    def is_linear(self) -> bool:
        """Return whether memory is linear in tokens; windows, chunks and states make it non-linear."""
        return not any(group.kind in ("window", "chunk", "state") for group in self.groups)

    @property
    def token_bytes(self) -> int:
        """Return the bytes that one more token needs in the groups that keep every token."""
        return sum(self.bytes_per_block // group.block_size for group in self.groups if group.kind == "all")

    @property
    def windows(self) -> tuple[tuple[int, int], ...]:
        """Return (window, bytes per token below the window) for groups that keep only a window of tokens."""
        found: dict[int, int] = {}
        for group in self.groups:
            if group.kind in ("window", "chunk"):
                found[group.window] = found.get(group.window, 0) + self.bytes_per_block // group.block_size
        return tuple(sorted(found.items()))

    def read_bytes(self, context: int) -> int:
        """Return the KV cache bytes that a step reads for a request with `context` tokens."""
        windows = sum(size * min(window, context) for window, size in self.windows)
        return self.fixed_blocks * self.bytes_per_block + self.token_bytes * context + windows

    def blocks(self, prompt: int, output: int) -> RequestBlocks:
        """Return the KV blocks of a request that shares no prefix.

        Args:
            prompt: tokens of the prompt.
            output: tokens of the answer, at least 1.
        """
        if self.reserves:
            whole = sum(self._asked(group, prompt + output) for group in self.groups)
            return RequestBlocks(whole, whole, whole, whole, whole)
        steps = list(self._prefill(prompt))
        held = [self._held(steps, place) for place in range(len(steps))]
        asked = sum(self._admitted(group, prompt) for group in self.groups)
        if output == 1:
            arrival = max(asked, *held)
            return RequestBlocks(arrival, arrival, held[-1], held[-1], held[-1])
        # This many decode steps are scheduled before the prompt counts as processed.
        settled = min(self.in_flight, output - 1)
        history = self._history(steps, settled)
        early = [self._held(history, place) for place in range(len(steps), len(history))]
        started = early[-1]
        final = prompt + output - 2
        later = (self._held_while_decoding(at) for at in self._steps_taking_blocks(prompt + settled, final))
        fullest = max(started, max(later, default=0))
        last = started if output - 1 == settled else self._held_while_decoding(final)
        arrival = max(asked, *held, *early)
        return RequestBlocks(arrival, max(arrival, fullest), started, fullest, last)

    def together(self, prompt: int) -> int:
        """Return how many prompts may be in computation or still unprocessed at the same time.

        These are the prompts of the steps in flight, one of which may have begun in the preceding step.
        """
        return self.in_flight * (self.step_tokens // prompt) + 1

    def _prefill(self, prompt: int) -> Iterator[RequestStep]:
        ends = [0]
        while ends[-1] < prompt:
            ends.append(self._chunk_end(ends[-1], prompt))
            yield self._step(ends, len(ends) - 1, prompt)

    def _step(self, ends: list[int], place: int, prompt: int) -> RequestStep:
        end = ends[place]
        return RequestStep(ends[place - 1], end, ends[max(0, place - self.in_flight)], end == prompt)

    def _chunk_end(self, start: int, prompt: int) -> int:
        """Return the end of the prompt chunk that begins at `start`.

        Chunks end where a recurrent state is kept.
        """
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
        """Return the tokens per block of the recurrent states kept for prefix reuse, or 0 without any."""
        return max((group.block_size for group in self.groups if group.aligned), default=0)

    def _exports(self, start: int, end: int) -> bool:
        """Return whether the prompt's last chunk stores a recurrent state at the last block border in it."""
        size = self._state_block
        at = (end - 1) // size * size
        return (
            any(group.checkpoint for group in self.groups)
            and start % size == 0
            and ceil_div(end, size) - 2 > (start - 1) // size
            and start + size <= at < end
        )

    def _admitted(self, group: GroupLaw, prompt: int) -> int:
        """Return the blocks of one group that must be free to admit a prompt."""
        if group.kind == "state" and group.aligned:
            return min(group.needed(prompt), 1 + int(group.checkpoint and self._exports(0, prompt)))
        return self._asked(group, prompt)

    @staticmethod
    def _asked(group: GroupLaw, tokens: int) -> int:
        """Return the KV blocks that `tokens` tokens need in a group, at most the group's maximum."""
        needed = group.needed(tokens)
        return needed if group.cap is None else min(needed, group.cap)

    def _history(self, steps: list[RequestStep], decoded: int) -> list[RequestStep]:
        """Return the prompt's `steps`, followed by `decoded` decode steps of one token each."""
        prompt = steps[-1].end
        ends = [0, *(step.end for step in steps), *range(prompt + 1, prompt + decoded + 1)]
        behind = range(len(steps) + 1, len(ends))
        return [*steps, *(self._step(ends, place, prompt) for place in behind)]

    def _held(self, steps: list[RequestStep], place: int) -> int:
        """Return the KV blocks that a request holds at the step with index `place`."""
        step = steps[place]
        return sum(
            self._states(group, steps, place)
            if group.aligned
            else group.needed(step.end) - group.freed(step.processed)
            for group in self.groups
        )

    def _states(self, group: GroupLaw, steps: list[RequestStep], place: int) -> int:
        """Return how many recurrent states a group holds for a request at one step."""
        kept, low = set(), group.freed(steps[place].processed)
        for step in (steps[at] for at in range(place, -1, -1)):
            block = ceil_div(step.end, group.block_size) - 1
            if block < low:
                break
            kept.add(block)
            if group.checkpoint and step.closes and self._exports(step.start, step.end):
                kept.add(block - 1)
        return sum(block >= low for block in kept)

    def _held_while_decoding(self, at: int) -> int:
        """Return the blocks that a request holds when token `at` is computed after its prompt was processed."""
        processed = at - self.in_flight + 1
        return sum(group.needed(at + 1) - group.freed(processed) for group in self.groups)

    def _steps_taking_blocks(self, low: int, high: int) -> Iterator[int]:
        """Yield the steps from `low` to `high` that take a block, because only these can hold a maximum.

        In groups that free blocks, the number of blocks is periodic in the block size. In other groups it only
        grows. The last period is therefore enough.
        """
        sizes = {group.block_size for group in self.groups if group.kind != "fixed"}
        window = max((group.window for group in self.groups), default=0)
        since = max(low, high - lcm(*sizes) - window - 2 * self.in_flight) if sizes else high
        if low <= high:
            yield from (low, high)
        for size in sizes:
            yield from range(ceil_div(since, size) * size, high + 1, size)
