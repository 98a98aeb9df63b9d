"""How many requests a pool holds at once, from what one takes (``requests``), and both in words."""

from __future__ import annotations

from dataclasses import dataclass

from tonnage.planner.errors import DeploymentError
from tonnage.planner.model.requests import RequestBlocks, RequestLaw
from tonnage.planner.units import gib


def at_most(held: float, limit: int | None) -> float:
    """Sequences that run of so many that a pool holds. ``limit``: --max-num-seqs."""
    return held if limit is None else min(held, limit)


def most_at_once(usable: int, peak: int, each: int) -> int:
    """Requests in ``usable`` blocks of which one holds ``peak`` and the others ``each``: one after the other is
    admitted and grows until there is no block for it."""
    return 0 if peak > usable else 1 + (usable - peak) // each


def never_preempted(usable: int, blocks: RequestBlocks, together: int) -> int:
    """Requests in ``usable`` blocks of which ``together`` hold what a prompt takes while it is computed, the
    others what the fullest step of a decode takes: a decode that wants a block then finds one, whichever steps
    all of them are at."""
    if blocks.arrival <= blocks.fullest:
        return usable // blocks.fullest
    prompts = min(together, usable // blocks.arrival)
    if prompts < together:
        return prompts
    return prompts + (usable - prompts * blocks.arrival) // blocks.fullest


@dataclass(frozen=True, slots=True)
class RequestCapacity:
    """How many requests of ``prompt_tokens`` + ``output_tokens`` a pool holds at once.

    ``at_once``: none preempted, whichever steps they are at (``never_preempted``); ``bounds``: the same at
    the ends of the pool's interval. ``at_last``: admitted one after the other and grown to their last tokens.
    ``started``: admitted and their prompts processed; more of them than ``at_once`` are preempted later.
    ``together``: prompts that may be computed at one time. ``limit``: --max-num-seqs, below which all of these
    count.
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
    share: str = ""  # of the requests of a trace that take no more

    @property
    def running(self) -> int:
        return min(self.at_once, self.limit)


@dataclass(frozen=True, slots=True)
class MixCapacity:
    """How many requests like those of a trace a pool holds at once on average: ``blocks`` each, at the fullest
    step of its decode, weighted by its steps (a long answer runs for longer). ``longer``: left out because they
    are above max_model_len."""

    name: str
    requests: int
    longer: int
    blocks: float
    at_once: int
    bounds: tuple[int, int]


def check_lengths(prompt: int, output: int, longest: int) -> None:
    """Raise DeploymentError for a request that there is not. ``longest``: max_model_len."""
    asked = f"{prompt}+{output}"
    if prompt < 1 or output < 1:
        raise DeploymentError(f"{asked}: both are at least one token", field="--request")
    if prompt + output > longest:
        raise DeploymentError(
            f"{asked} is {prompt + output:,} tokens, above max_model_len {longest:,}",
            field="--request", hint="a larger --max-model-len, if the model has it",
        )  # fmt: skip


def hold(
    law: RequestLaw, prompt: int, output: int, usable: tuple[int, int, int], limit: int
) -> RequestCapacity:
    """``usable``: blocks as planned, the fewest and the most there may be."""
    blocks, together = law.blocks(prompt, output), law.together(prompt)
    planned, low, high = (never_preempted(count, blocks, together) for count in usable)
    return RequestCapacity(
        prompt, output, blocks, blocks.fullest * law.bytes_per_block, planned, (low, high),
        most_at_once(usable[0], blocks.peak, blocks.last),
        most_at_once(usable[0], blocks.arrival, blocks.started), together, limit,
    )  # fmt: skip


def law_lines(law: RequestLaw, usable: int, limit: int) -> list[str]:
    """The law in words. ``usable`` blocks, ``limit`` sequences."""
    parts = []
    if law.fixed_blocks:
        parts.append(f"{law.fixed_blocks * law.bytes_per_block:,} bytes whatever its length")
    if law.token_bytes:
        parts.append(f"{law.token_bytes:,} bytes a token")
    parts += [f"{size:,} bytes a token up to {window:,}" for window, size in law.windows]
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
    blocks, (low, high) = request.blocks, request.bounds
    count, ends = f"{request.at_once:,} at once", ""
    if low < high:
        count, ends = f"about {count}", f", {low:,} to {high:,}"
    share = f", {request.share} take no more" if request.share else ""
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
    """``limit``: --max-num-seqs."""
    low, high = mix.bounds
    ends = f", {low:,} to {high:,}" if low < high else ""
    left = f"; {mix.longer:,} are above max_model_len and left out" if mix.longer else ""
    return (
        f"Requests like those of {mix.name} ({mix.requests:,}): about {mix.at_once:,} at once{ends} "
        f"({mix.blocks:,.2f} blocks each on average)"
        f"{f'; --max-num-seqs lets {limit:,} run' if mix.at_once > limit else ''}{left}"
    )
