"""Number of KV blocks that a request holds at each step, computed from its prompt and output lengths.

A request is computed in steps: first its prompt in chunks of at most `step_tokens`, then one token per step.
The last output token is never fed back into the model, so `prompt + output - 1` tokens are stored. Before a
step allocates blocks, each group of layers frees the blocks that it no longer needs. Only *processed* tokens
count for freeing. With several steps in flight (asynchronous scheduling), the tokens of the latest steps are
not processed yet.

Sources: vllm 0.32.0, v1/core/kv_cache_manager.py (allocate_slots), v1/core/single_type_kv_cache_manager.py
(managers of full, sliding, chunked and Mamba layers), v1/core/sched/scheduler.py (_mamba_block_aligned_split),
v1/kv_cache_interface.py (is_mamba_prefill_checkpoint_valid). tests/planner/test_vllm_requests.py compares this
module with vLLM's classes. No constant is fitted.
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
    """The rule for the KV blocks that a request holds in one group of layers.

    `kind` determines for which tokens the request holds blocks:

    - `all`: every token.
    - `window`: the last `window` - 1 tokens and the tokens of the current step.
    - `chunk`: the tokens from the last multiple of `window` on.
    - `state`: one running state for any length.
    - `fixed`: `blocks` blocks for any length.

    Attributes:
        block_size: tokens per block.
        cap: maximum number of blocks that must be free to admit a request; None for no maximum.
        aligned: for `state`: whether a state is kept for each block in which a step ended (for prefix reuse).
            It is freed once the next block is processed.
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
        """Return how many KV blocks a request with `slots` tokens needs in this group if no block is freed."""
        if self.kind == "fixed" or (self.kind == "state" and not self.aligned):
            return self.blocks
        return ceil_div(slots, self.block_size)

    def freed(self, processed: int) -> int:
        """Return how many of a request's first blocks can be freed once `processed` tokens are processed.

        vLLM computes the same in get_num_skipped_tokens.
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
        processed: number of tokens whose steps have finished when this step is scheduled.
        closes: whether the step computes the last token of the prompt.
    """

    start: int
    end: int
    processed: int
    closes: bool = False


@dataclass(frozen=True, slots=True)
class RequestBlocks:
    """Numbers of KV blocks that one request holds in its phases, summed over all groups of layers.

    Attributes:
        arrival: maximum number of blocks held until the prompt is processed, or the number of free blocks that
            admission requires if that is larger.
        peak: maximum number of blocks over the whole request.
        started: blocks held when the prompt has just been processed.
        fullest: maximum number of blocks during decode, after the prompt has been processed.
        last: blocks held when the last output token is computed.
    """

    arrival: int
    peak: int
    started: int
    fullest: int
    last: int


@dataclass(frozen=True, slots=True)
class RequestLaw:
    """The rules that give the number of KV blocks of a request from its prompt and output lengths.

    Attributes:
        groups: one rule per group of layers.
        bytes_per_block: bytes of a block on one rank.
        step_tokens: maximum number of tokens in a step.
        in_flight: maximum number of steps that are scheduled but not yet processed, including the one being
            scheduled.
        hit_tokens: granularity of prefix reuse: the length of a prefix hit is a multiple of this number of
            tokens; None without prefix caching.
        source: the engine, with version, from which the rules were taken.
        reserves: whether admission reserves all blocks for prompt and output.
        note: how these rules differ from those of the engine version in the plan; empty if they do not differ.
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
        """Return the KV blocks of the shortest request: one token takes a block in each layer group."""
        return sum(group.needed(1) for group in self.groups)

    @property
    def fixed_blocks(self) -> int:
        """Return how many KV blocks each request holds independently of its length.

        These blocks hold recurrent states and the output of an encoder.
        """
        return sum(group.needed(1) for group in self.groups if group.kind in ("state", "fixed"))

    @property
    def is_linear(self) -> bool:
        """Return whether a request's KV cache memory is linear in its tokens.

        Sliding windows, chunked attention and recurrent states make it non-linear.
        """
        return not any(group.kind in ("window", "chunk", "state") for group in self.groups)

    @property
    def token_bytes(self) -> int:
        """Return the KV cache bytes per token, summed over the groups of layers that keep all tokens."""
        return sum(self.bytes_per_block // group.block_size for group in self.groups if group.kind == "all")

    @property
    def windows(self) -> tuple[tuple[int, int], ...]:
        """Return (window in tokens, KV bytes per token) of each group with sliding or chunked attention."""
        found: dict[int, int] = {}
        for group in self.groups:
            if group.kind in ("window", "chunk"):
                found[group.window] = found.get(group.window, 0) + self.bytes_per_block // group.block_size
        return tuple(sorted(found.items()))

    def read_bytes(self, context: int) -> int:
        """Return the KV cache bytes that a decode step reads for a request with `context` tokens."""
        windows = sum(size * min(window, context) for window, size in self.windows)
        return self.fixed_blocks * self.bytes_per_block + self.token_bytes * context + windows

    def blocks(self, prompt: int, output: int) -> RequestBlocks:
        """Return the numbers of KV blocks that a request holds if it reuses no cached prefix.

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
        # number of decode steps that are scheduled before the prompt counts as processed
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
        """Return the maximum number of prompts of `prompt` tokens that are in prefill at the same time.

        Each of the steps in flight processes ``step_tokens // prompt`` whole prompts. One more prompt may have
        begun in the step before the earliest step in flight.
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
        """Return the end of the prompt chunk that begins at token `start`.

        If recurrent states are kept for prefix reuse, chunks end at the tokens where a state is kept.
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
        """Return whether the prompt's last chunk also stores the recurrent state at its last block boundary."""
        size = self._state_block
        at = (end - 1) // size * size
        return (
            any(group.checkpoint for group in self.groups)
            and start % size == 0
            and ceil_div(end, size) - 2 > (start - 1) // size
            and start + size <= at < end
        )

    def _admitted(self, group: GroupLaw, prompt: int) -> int:
        """Return how many blocks of one group of layers must be free to admit a prompt."""
        if group.kind == "state" and group.aligned:
            return min(group.needed(prompt), 1 + int(group.checkpoint and self._exports(0, prompt)))
        return self._asked(group, prompt)

    @staticmethod
    def _asked(group: GroupLaw, tokens: int) -> int:
        """Return how many KV blocks `tokens` tokens need in a layer group, limited by the group's `cap`."""
        needed = group.needed(tokens)
        return needed if group.cap is None else min(needed, group.cap)

    def _history(self, steps: list[RequestStep], decoded: int) -> list[RequestStep]:
        """Return a request's steps: its prompt's `steps`, then `decoded` decode steps of one token each."""
        prompt = steps[-1].end
        ends = [0, *(step.end for step in steps), *range(prompt + 1, prompt + decoded + 1)]
        behind = range(len(steps) + 1, len(ends))
        return [*steps, *(self._step(ends, place, prompt) for place in behind)]

    def _held(self, steps: list[RequestStep], place: int) -> int:
        """Return the number of KV blocks that a request holds at the step with index `place`."""
        step = steps[place]
        return sum(
            self._states(group, steps, place)
            if group.aligned
            else group.needed(step.end) - group.freed(step.processed)
            for group in self.groups
        )

    def _states(self, group: GroupLaw, steps: list[RequestStep], place: int) -> int:
        """Return how many recurrent states a layer group holds for a request at the step with index `place`."""
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
        """Return the number of KV blocks that a request holds when its token `at` is computed during decode."""
        processed = at - self.in_flight + 1
        return sum(group.needed(at + 1) - group.freed(processed) for group in self.groups)

    def _steps_taking_blocks(self, low: int, high: int) -> Iterator[int]:
        """Yield the decode tokens, from `low` to `high`, at which a request may hold the most blocks.

        A maximum can only occur at a token that takes a new block. In groups that free blocks, the number of
        held blocks is periodic in the block size; in other groups it only grows. It is therefore enough to
        yield `low`, `high`, and the tokens of the last period that take a new block.
        """
        sizes = {group.block_size for group in self.groups if group.kind != "fixed"}
        window = max((group.window for group in self.groups), default=0)
        since = max(low, high - lcm(*sizes) - window - 2 * self.in_flight) if sizes else high
        if low <= high:
            yield from (low, high)
        for size in sizes:
            yield from range(ceil_div(since, size) * size, high + 1, size)
