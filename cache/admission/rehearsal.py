"""A rehearsal: a fast simulation of vLLM's scheduler that serves a load under a given admission rule.

A server cannot try two admission rules on the same requests. A rehearsal tries a rule on similar requests: each
of several clients sends requests of recently observed lengths, one after the other. Its clock advances by the
measured step costs. It returns the tokens per second, the seconds to the first token and the seconds between
tokens. It takes some milliseconds for a pool of 1,500 blocks and releases the interpreter's lock.

It keeps these rules of vLLM's scheduler (v1/core/sched/scheduler.py, 0.32):

- running sequences come first, in order of admission, under one token budget;
- if a block is missing, the last sequence is preempted and put first in the queue, and no request is admitted
  in that step;
- a request starts when its whole prompt fits;
- freed blocks are reused oldest first, and the last blocks of a sequence before its first. For a while, a
  preempted request therefore finds its first blocks in the prefix cache.

It leaves out prefixes that requests share, groups other than full attention, and priorities.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

import numpy as np

from tonnage.cache.admission.cost import StepCost
from tonnage.cache.admission.forecast import FloatArray
from tonnage.cache.admission.policy import Rule
from tonnage.cache.blocks.state import Int64Array
from tonnage.cache.compiled import compiled_apart

# A simulation stops after this many steps, so that its loop cannot hang; its throughput then counts as 0.
_MOST_STEPS = 1_000_000


@dataclass(frozen=True, slots=True)
class Load:
    """The requests that a rehearsal (a simulation of the scheduler) serves.

    Attributes:
        prompt: int64 [requests]: prompt tokens to compute.
        output: int64 [requests]: output tokens until the request ends.
        max_tokens: int64 [requests]: upper bound of output tokens that the request asks for.
        clients: Number of requests in the system at any time.
    """

    prompt: Int64Array
    output: Int64Array
    max_tokens: Int64Array
    clients: int


@dataclass(frozen=True, slots=True)
class Engine:
    """The limits of a simulated engine: blocks of its pool, and tokens and sequences of a step.

    With ``prefix_caching`` a preempted request finds its first blocks again, unless they have been reused.
    """

    blocks: int
    block_size: int
    max_num_batched_tokens: int
    max_num_seqs: int
    prefix_caching: bool = True


@dataclass(frozen=True, slots=True)
class Outcome:
    """The throughput and latency of a simulated load under one admission rule.

    Attributes:
        tokens_per_second: Output tokens per second.
        first_p50: Median seconds from a request's arrival to its first token.
        first_p99: P99 of the seconds from a request's arrival to its first token.
        between_p99: P99 of the seconds between two tokens of a request.
        recomputed: Share of the time spent on computing tokens a second time.
        preemptions: Number of preemptions.
    """

    tokens_per_second: float
    first_p50: float
    first_p99: float
    between_p99: float
    recomputed: float
    preemptions: int


def rehearse(load: Load, engine: Engine, cost: StepCost, rule: Rule) -> Outcome:
    """Simulate how vLLM's scheduler serves ``load`` under ``rule``; return throughput and latency.

    Args:
        load: The requests; each must fit the empty pool.
        engine: Limits of the pool and of a step.
        cost: Cost model that gives the seconds of a step.
        rule: The admission rule.
    """
    requests = len(load.output)
    first, between = np.full(requests, -1.0), np.empty(int(load.output.sum()))
    seconds, recomputed, preemptions, gaps = _serve(
        load.prompt, load.output, load.max_tokens, np.sort(load.output), load.clients,
        engine.blocks, engine.block_size, engine.max_num_batched_tokens, engine.max_num_seqs,
        np.array(astuple(cost)),
        2.0 if rule.share is None else rule.share, engine.prefix_caching, first, between,
    )  # fmt: skip
    # The times to first token leave out the first requests: they find an empty pool, unlike a busy server's.
    steady = first[min(load.clients, requests // 2) :]
    return Outcome(
        float(load.output.sum()) / seconds,
        float(np.quantile(steady, 0.5)),
        float(np.quantile(steady, 0.99)),
        float(np.quantile(between[:gaps], 0.99)) if gaps else 0.0,
        recomputed * cost.prefill / seconds,
        preemptions,
    )


@compiled_apart
def _left(lengths: Int64Array, share: float, done: int, most: int) -> int:
    """Return how many more tokens a sequence with ``done`` output tokens is forecast to produce.

    Of the sorted ``lengths`` longer than ``done``, the fraction ``share`` is longer than ``done`` plus the
    result. The result is at least 1 and at most ``most``.
    """
    longer = int(np.searchsorted(lengths, done, side="right"))
    count = lengths.size - longer
    if count == 0:
        return most
    at = min(longer + int((1.0 - share) * count), lengths.size - 1)
    return int(max(1, min(lengths[at] - done, most)))


@compiled_apart
def _peak(held: Int64Array, left: Int64Array, count: int, block_size: int) -> float:
    """Return the peak of KV blocks if sequence i has ``held[i]`` tokens and ends after ``left[i]`` more."""
    order = np.argsort(-left[:count])
    most = base = 0.0
    for place in range(count):
        at = order[place]
        base += held[at] / block_size + 0.5  # on average half of a sequence's last block is unused
        most = max(most, base + (place + 1) * left[at] / block_size)
    return most


@compiled_apart
def _reuse(freed: Int64Array, oldest: int, need: int) -> int:
    """Take ``need`` freed KV blocks for reuse, oldest first; return the index of the oldest nonzero count.

    ``freed`` has one count of freed blocks per request; ``oldest`` is the index of the first count to take
    from.
    """
    while need > 0:
        used = min(need, freed[oldest])
        freed[oldest] -= used
        need -= used
        if freed[oldest] == 0:
            oldest += 1
    return oldest


@compiled_apart
def _serve(
    prompt: Int64Array, output: Int64Array, max_tokens: Int64Array, lengths: Int64Array, clients: int,
    blocks: int, block_size: int, budget: int, seats: int, cost: FloatArray, share: float, caching: bool,
    first: FloatArray, between: FloatArray,
) -> tuple[float, float, int, int]:  # fmt: skip
    """Simulate vLLM's scheduler until all requests of a load end.

    The arguments ``prompt`` to ``share`` are the fields of a `Load`, an `Engine` (``budget`` tokens and
    ``seats`` sequences per step), a `StepCost` and a `Rule`. ``lengths`` are the sorted output lengths.
    ``first`` [requests] receives the seconds to the first token, ``between`` [tokens] the seconds between
    tokens.

    Returns:
        The simulated seconds, the number of tokens computed again, the number of preemptions, and the number of
            entries set in ``between``.
    """
    requests = output.size
    length = prompt.copy()  # tokens of each request so far, of which ``computed`` have K/V
    computed = np.zeros(requests, np.int64)
    held, chunk = np.zeros(requests, np.int64), np.zeros(requests, np.int64)
    arrived, last = np.zeros(requests), np.zeros(requests)
    running, active = np.empty(requests, np.int64), 0
    # Preempted requests return to the front of the queue, so the array needs space on both sides.
    queue, head, tail = np.empty(2 * requests + 1, np.int64), requests, requests
    # ``freed`` lists the freed blocks in order of reuse, as one count per request that held them. ``entry`` is
    # the index of each preempted request's count. A request's last blocks are reused first, so the blocks that
    # remain in its count are its first blocks.
    freed = np.empty(4 * requests + 4 * seats + 64, np.int64)
    entry = np.full(requests, -1, np.int64)
    freed[0], oldest, newest = blocks, 0, 1
    free = blocks
    left, size = np.empty(seats + 1, np.int64), np.empty(seats + 1, np.int64)
    now = again = 0.0
    sent = done = preemptions = gaps = 0
    asked, departed, departed_then = -block_size, 0, 0
    for step in range(_MOST_STEPS):
        if done == requests:
            break
        while sent < requests and sent - done < clients:
            arrived[sent] = now
            queue[tail] = sent
            tail += 1
            sent += 1
        room, preempted, place = budget, False, 0
        while place < active and room > 0:
            at = running[place]
            wanted = min(length[at] - computed[at], room)
            need = (computed[at] + wanted + block_size - 1) // block_size - held[at]
            while need > free and active > place:
                active -= 1
                victim = running[active]
                preempted = True
                preemptions += 1
                departed += 1
                free += held[victim]
                freed[newest], entry[victim] = held[victim], newest
                newest += 1
                again += computed[victim]
                computed[victim] = held[victim] = chunk[victim] = 0
                head -= 1
                queue[head] = victim
            if need > free or place >= active:
                break
            chunk[at] = wanted
            held[at] += need
            room -= wanted
            free -= need
            oldest = _reuse(freed, oldest, need)
            place += 1
        for rest in range(place, active):  # the token budget is used up, so these sequences skip the step
            chunk[running[rest]] = 0
        while not preempted and head < tail and room > 0 and active < seats:
            at = queue[head]
            hit = 0
            if caching and entry[at] >= oldest:
                hit = min(freed[entry[at]], (length[at] - 1) // block_size)
            if (length[at] + block_size - 1) // block_size > free:
                break
            if share <= 1.0 and active > 0:
                if step - asked < block_size and departed == departed_then:
                    break
                running[active] = at
                for other in range(active + 1):
                    sequence = running[other]
                    produced = length[sequence] - prompt[sequence]
                    left[other] = _left(lengths, share, produced, max_tokens[sequence] - produced)
                    size[other] = length[sequence]
                if _peak(size, left, active + 1, block_size) > blocks:
                    asked, departed_then = step, departed
                    break
            head += 1
            if hit:  # the first blocks of the preempted request are still cached
                freed[entry[at]] -= hit
                free -= hit
                again -= hit * block_size
            entry[at] = -1
            held[at], computed[at] = hit, hit * block_size
            chunk[at] = min(length[at] - computed[at], room)
            room -= chunk[at]
            need = (computed[at] + chunk[at] + block_size - 1) // block_size - hit
            held[at] += need
            free -= need
            oldest = _reuse(freed, oldest, need)
            running[active] = at
            active += 1
        tokens = sequences = context = 0
        for place in range(active):
            at = running[place]
            if chunk[at] > 0:
                tokens += chunk[at]
                sequences += 1
            context += computed[at] + chunk[at]
        now += cost[0] + cost[1] * (tokens - sequences) + cost[2] * sequences + cost[3] * context
        stay = 0
        for place in range(active):
            at = running[place]
            computed[at] += chunk[at]
            if chunk[at] > 0 and computed[at] == length[at]:
                length[at] += 1
                if length[at] == prompt[at] + 1:
                    first[at] = now - arrived[at]
                else:
                    between[gaps] = now - last[at]
                    gaps += 1
                last[at] = now
            if length[at] - prompt[at] >= output[at]:
                done += 1
                departed += 1
                free += held[at]
                freed[newest] = held[at]
                newest += 1
            else:
                running[stay] = at
                stay += 1
        active = stay
        # Make space in `freed` by dropping the counts whose blocks have been reused.
        if newest + 2 * seats > freed.size:
            freed[: newest - oldest] = freed[oldest:newest].copy()
            for at in range(requests):
                entry[at] = max(entry[at] - oldest, -1)
            newest -= oldest
            oldest = 0
    if done < requests:
        now = np.inf
    return now, again, preemptions, gaps


def compile_rehearsal() -> None:
    """Compile the simulation of vLLM's scheduler (some seconds), or read its machine code from disk."""
    one = np.full(4, 2, np.int64)
    for rule in (Rule(), Rule(0.5)):
        rehearse(Load(one, one, one, 2), Engine(8, 2, 4, 4), StepCost(1.0, 0.0, 0.0, 0.0), rule)
