"""How many requests a plan's KV pool holds (`tonnage plan --request 2000+300`, `tonnage plan --trace FILE`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import ceil

from tonnage.planner.errors import DeploymentError
from tonnage.planner.model.capacity import MixCapacity, RequestCapacity, check_lengths
from tonnage.planner.model.requests import RequestBlocks
from tonnage.planner.planning.terms import request_terms
from tonnage.planner.plans import Plan
from tonnage.planner.units import parse_count

FLAG = "--request"
_SHARES = ((0.5, "half"), (0.9, "90 %"), (0.99, "99 %"), (1.0, "all"))


def parse_request(text: str) -> tuple[int, int]:
    """Parse a request length such as 2000+300 or 8k+1k; return (prompt tokens, output tokens), each at least 1.

    Raises:
        DeploymentError: the text has another form.
    """
    parts = text.split("+")
    if len(parts) != 2:
        raise DeploymentError(
            f"{text[:40]!r} is not PROMPT+OUTPUT", field=FLAG, hint="tokens of both, for example 2000+300"
        )
    prompt, output = (parse_count(part, FLAG) for part in parts)
    return prompt, output


def with_requests(
    plan: Plan, lengths: Iterable[tuple[int, int]], planned_for: Callable[[int], Plan] | None = None
) -> Plan:
    """Return the plan with the number of requests of each (prompt, output) length that its KV pool holds.

    For some models it is not known how many KV blocks a request takes. Each request is then assumed to take,
    from its start, the blocks of a sequence of prompt + output tokens. `planned_for(tokens)` returns the plan
    for sequences of that many tokens. Raises the errors that `Plan.hold` raises.
    """
    cache = plan.kv_cache
    if cache.law is not None or planned_for is None or not cache.layout.groups:
        return _with_capacities(plan, tuple(plan.hold(prompt, output) for prompt, output in lengths))
    found = []
    for prompt, output in lengths:
        check_lengths(prompt, output, plan.deployment.max_model_len or 0)
        found.append(_as_sequences(plan, planned_for(prompt + output), prompt, output))
    note = f"requests count as sequences of their whole length: {cache.no_law}"
    return _with_capacities(replace(plan, notes=(*plan.notes, note)), tuple(found))


def _as_sequences(plan: Plan, other: Plan, prompt: int, output: int) -> RequestCapacity:
    """Return how many requests the KV pool holds if each takes the blocks of one sequence of the plan `other`.

    Args:
        plan: the plan whose pool holds the requests.
        other: a plan for sequences of the requests' length.
        prompt: tokens of each prompt.
        output: tokens of each answer.
    """
    blocks = ceil(other.kv_cache.usable_blocks / other.kv_cache.max_concurrency)
    usable, low, high = plan.usable_bounds
    same = RequestBlocks(blocks, blocks, blocks, blocks, blocks)
    count, limit = usable // blocks, plan.deployment.max_num_seqs or 1
    return RequestCapacity(
        prompt, output, same, other.kv_cache.bytes_per_sequence, count, (low // blocks, high // blocks), count,
        count, 1, limit,
    )  # fmt: skip


def _with_capacities(plan: Plan, found: tuple[RequestCapacity, ...]) -> Plan:
    """Return the plan with the capacities `found`, their `--explain` terms, and a note on their KV blocks."""
    note = plan.kv_cache.law.note if plan.kv_cache.law else ""
    plan = replace(plan, requests=(*plan.requests, *found))
    if note and note not in plan.notes:
        plan = replace(plan, notes=(*plan.notes, note))
    return replace(plan, terms=(*plan.terms, *request_terms(plan, found)))


def with_trace(plan: Plan, name: str, lengths: Sequence[tuple[int, int]]) -> Plan:
    """Return the plan with the number of requests of a trace that its KV pool holds at once.

    Capacities are given for a request with the mean number of blocks (weighted by output tokens), and for the
    requests at four quantiles of the number of blocks (50, 90, 99 and 100 %). Raises the errors of `Plan.hold`
    if no request is within max_model_len, or if the number of blocks of a request is not known.
    """
    limit = plan.deployment.max_model_len or 0
    within = {pair: count for pair, count in Counter(lengths).items() if sum(pair) <= limit and min(pair) > 0}
    if plan.kv_cache.law is None or not within:
        # This call raises an error, because a request's blocks are not known or all requests are too long.
        plan.hold(*lengths[0])
    law, total = plan.kv_cache.law, sum(within.values())
    assert law is not None
    held = sorted((law.blocks(*pair).fullest, pair, count) for pair, count in within.items())
    steps = sum(pair[1] * count for _, pair, count in held)
    mean = sum(blocks * pair[1] * count for blocks, pair, count in held) / steps
    planned, low, high = (int(usable / mean) for usable in plan.usable_bounds)
    found = []
    for share, word in _SHARES:
        below = 0
        for _, pair, count in held:
            below += count
            if below >= share * total:
                found.append(replace(plan.hold(*pair), share=word))
                break
    mix = MixCapacity(name, total, len(lengths) - total, mean, planned, (low, high))
    return _with_capacities(replace(plan, mix=mix), tuple(found))
