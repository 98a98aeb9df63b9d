"""Capacity of a KV block pool: how many requests it holds at once, and lines of text that report it.

`requests.py` computes the blocks of one request.
"""

from __future__ import annotations

from dataclasses import dataclass

from tonnage.planner.errors import DeploymentError
from tonnage.planner.model.requests import RequestBlocks, RequestLaw
from tonnage.planner.units import gib


def at_most(held: float, limit: int | None) -> float:
    """Return how many sequences run at once: the smaller of `held` (KV pool) and `limit` (--max-num-seqs)."""
    return held if limit is None else min(held, limit)


def capacity_by_growth(usable: int, peak: int, each: int) -> int:
    """Return how many equally long requests a KV pool holds if they are admitted one by one until it is full.

    The last admitted request must find `peak` free blocks while every earlier one holds `each` blocks.

    Args:
        usable: number of usable blocks in the KV pool.
        peak: maximum number of blocks that the last admitted request holds.
        each: number of blocks that each earlier request holds when the last one holds `peak` blocks.
    """
    return 0 if peak > usable else 1 + (usable - peak) // each


def capacity_without_preemption(usable: int, blocks: RequestBlocks, together: int) -> int:
    """Return how many equal requests run at once without preemption, for any combination of their steps.

    In the worst case, `together` requests are in prefill and hold the blocks of that phase, and all others are
    at the decode step with the most blocks. If all these blocks fit, a decode step always finds a free block.

    Args:
        usable: number of usable blocks in the pool.
        blocks: blocks of one request in each phase.
        together: number of prompts that may be computed at the same time.
    """
    if blocks.arrival <= blocks.fullest:
        return usable // blocks.fullest
    prompts = min(together, usable // blocks.arrival)
    if prompts < together:
        return prompts
    return prompts + (usable - prompts * blocks.arrival) // blocks.fullest


@dataclass(frozen=True, slots=True)
class RequestCapacity:
    """The number of requests with the same prompt and output length that a KV pool holds at once.

    Attributes:
        bytes: KV cache bytes of one request at the decode step with the most blocks.
        at_once: requests that run without any preemption (`capacity_without_preemption`).
        bounds: `at_once` for the lower and the upper bound of the pool's size.
        at_last: requests that fit if they are admitted one after another and have all reached their last
            tokens.
        started: requests that fit when their prompts have just been processed; if more than `at_once`, some are
            preempted later.
        together: prompts that may be computed at the same time.
        limit: --max-num-seqs; `at_once`, `at_last` and `started` are not limited by it.
        share: text with the percentage of a trace's requests that need at most as many blocks as this request.
    """

    prompt_tokens: int
    output_tokens: int
    blocks: RequestBlocks
    bytes: int
    at_once: int
    bounds: tuple[int, int]
    at_last: int
    started: int
    together: int
    limit: int
    share: str = ""

    @property
    def running(self) -> int:
        """Return the number of requests that run at once without preemption, at most --max-num-seqs."""
        return min(self.at_once, self.limit)


@dataclass(frozen=True, slots=True)
class MixCapacity:
    """How many requests a KV pool holds at once on average, if their lengths are those of a trace.

    Attributes:
        name: name of the trace.
        requests: number of requests of the trace that were counted.
        longer: number of requests left out because they are longer than max_model_len.
        blocks: mean blocks per request at the decode step with the most blocks, weighted by each request's
            number of steps.
        at_once: mean number of requests that run at once.
        bounds: lower and upper bound of `at_once`.
    """

    name: str
    requests: int
    longer: int
    blocks: float
    at_once: int
    bounds: tuple[int, int]


def check_lengths(prompt: int, output: int, longest: int) -> None:
    """Raise DeploymentError for a request with an empty prompt or answer, or longer than max_model_len.

    Args:
        prompt: tokens of the prompt.
        output: tokens of the answer.
        longest: max_model_len.
    """
    asked = f"{prompt}+{output}"
    if prompt < 1 or output < 1:
        raise DeploymentError(f"{asked}: prompt and output need at least one token each", field="--request")
    if prompt + output > longest:
        raise DeploymentError(
            f"{asked} is {prompt + output:,} tokens, above max_model_len {longest:,}",
            field="--request", hint="raise --max-model-len if the model allows it",
        )  # fmt: skip


def hold(
    law: RequestLaw, prompt: int, output: int, usable: tuple[int, int, int], limit: int
) -> RequestCapacity:
    """Return how many requests of one prompt and output length a KV pool holds at once.

    Args:
        law: rule for the KV blocks of a request.
        prompt: tokens of the prompt.
        output: tokens of the answer.
        usable: (planned, lower bound, upper bound) of the pool's usable blocks.
        limit: --max-num-seqs.
    """
    blocks, together = law.blocks(prompt, output), law.together(prompt)
    planned, low, high = (capacity_without_preemption(count, blocks, together) for count in usable)
    return RequestCapacity(
        prompt, output, blocks, blocks.fullest * law.bytes_per_block, planned, (low, high),
        capacity_by_growth(usable[0], blocks.peak, blocks.last),
        capacity_by_growth(usable[0], blocks.arrival, blocks.started), together, limit,
    )  # fmt: skip


def law_lines(law: RequestLaw, usable: int, limit: int) -> list[str]:
    """Return lines of text about the KV cache memory that a request needs and about the reuse of prefixes.

    Args:
        law: rule for the blocks of a request.
        usable: number of usable blocks in the pool.
        limit: --max-num-seqs.
    """
    parts = []
    if law.fixed_blocks:
        parts.append(f"{law.fixed_blocks * law.bytes_per_block:,} bytes at any length")
    if law.token_bytes:
        parts.append(f"{law.token_bytes:,} bytes per token")
    parts += [f"{size:,} bytes per token up to {window:,}" for window, size in law.windows]
    sizes = sorted({group.block_size for group in law.groups if group.kind not in ("fixed",)})
    whole = f", in blocks of {' and '.join(f'{size:,}' for size in sizes)} tokens" if sizes else ""
    extra = "; one more state in each group where a block ends" if any(g.aligned for g in law.groups) else ""
    floor = law.floor_blocks
    lines = [
        f"A request takes {' + '.join(parts)}{whole}{extra}; at least {floor * law.bytes_per_block:,} bytes "
        f"({floor} block{'s' if floor > 1 else ''})"
    ]
    hits = "none" if law.hit_tokens is None else f"multiples of {law.hit_tokens:,} tokens"
    most = usable // floor
    few = f"; at most {most:,} requests of any length, --max-num-seqs {limit:,}" if most < limit else ""
    lines.append(f"Prefix hits: {hits}{few}")
    return lines


def capacity_line(request: RequestCapacity) -> str:
    """Return the line of text that says how many requests of one prompt and output length run at once."""
    blocks, (low, high) = request.blocks, request.bounds
    count, ends = f"{request.at_once:,} at once", ""
    if low < high:
        count, ends = f"about {count}", f", {low:,} to {high:,}"
    share = f", {request.share} need no more" if request.share else ""
    text = f"Requests of {request.prompt_tokens:,}+{request.output_tokens:,} tokens{share}: {count}{ends}"
    text += f" ({blocks.fullest:,} blocks each, {gib(request.bytes)}"
    if blocks.arrival > blocks.fullest:
        text += f"; {blocks.arrival:,} while its prompt is computed"
    text += ")"
    if request.at_last > request.at_once:
        text += f"; {request.at_last:,} at their last token ({blocks.last:,} blocks)"
    if request.at_once > request.limit:
        text += f"; --max-num-seqs lets {request.limit:,} run"
    return text


def mix_line(mix: MixCapacity, limit: int) -> str:
    """Return the line of text that says how many requests of a trace run at once.

    Args:
        mix: how many requests of the trace the KV pool holds.
        limit: --max-num-seqs.
    """
    low, high = mix.bounds
    ends = f", {low:,} to {high:,}" if low < high else ""
    left = f"; {mix.longer:,} are above max_model_len and left out" if mix.longer else ""
    return (
        f"Requests with the lengths of {mix.name} ({mix.requests:,}): about {mix.at_once:,} at once{ends} "
        f"({mix.blocks:,.2f} blocks each on average)"
        f"{f'; --max-num-seqs lets {limit:,} run' if mix.at_once > limit else ''}{left}"
    )
