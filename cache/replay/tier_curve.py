"""The hit rate of a prefix cache of every size, in one pass over a trace.

The stack distance of a chunk is the number of other chunks used since its last use; an LRU cache hits the chunk
if the cache's size in chunks is larger (Mattson et al., IBM Systems Journal 1970). A request's chunks are used
together, the first one last, so a chunk's last use is never before that of the chunks behind it. The chunks of
a prompt that a cache of any size hits are therefore a prefix of the prompt. Long traces are sampled by chunk,
and distances are scaled up (SHARDS, Waldspurger et al., FAST 2015).

The optimum of a size is the hit rate of a cache that knows the future. Such a cache evicts, or never stores,
the chunk whose next use is the furthest (Belady, IBM Systems Journal 1966). The chunks of a prompt are used in
turn, so the next use of a chunk is never later than that of the chunks behind it. The hits of such a cache are
therefore prefixes of the prompts, too.

A size counts the GPU's pool and the tiers together as one cache. A tier that stores every chunk also holds the
chunks of the pool. If the tier is larger than the pool, the size is therefore the tier's size.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from dataclasses import dataclass, replace

import numpy as np

from tonnage.cache.blocks.state import Int64Array
from tonnage.cache.compiled import compiled, inlined
from tonnage.cache.replay.tiers import chunk_keys, chunk_tokens_of
from tonnage.cache.replay.trace import Trace

_MOST = 4_000_000  # upper bound of the chunk uses in one pass; longer traces are sampled
_MOST_OPTIMUM = 400_000  # upper bound of the chunk uses in a pass of `optimum`, which is not compiled
_HASH = 0x9E3779B97F4A7C15  # Knuth's multiplicative hash by the golden ratio, 64 bits
_PLOTTED = 200  # number of cache sizes in a plot
KNEE = 0.95  # the knee is the smallest cache with this share of the highest hit rate


@dataclass(frozen=True, slots=True)
class SizeCurve:
    """The hit rate of a prefix cache by its size, as points to plot.

    Attributes:
        points: (cache size in bytes, share of prompt tokens hit), ascending.
        knee_bytes: Size in bytes beyond which the hit rate grows little; 0 without hits.
    """

    points: tuple[tuple[int, float], ...]
    knee_bytes: int


@dataclass(frozen=True, slots=True)
class TierCurve:
    """The hit rate of an LRU prefix cache by its size, for one trace.

    Attributes:
        chunk_tokens: Tokens of a chunk.
        prompt_tokens: Tokens of all prompts.
        distances: Stack distance of every use of a chunk except its first use, in chunks, ascending.
        rate: Share of the chunks that were sampled.
    """

    chunk_tokens: int
    prompt_tokens: int
    distances: tuple[int, ...]
    rate: float

    def hit_rate(self, chunks: int) -> float:
        """Return the share of prompt tokens that a cache of ``chunks`` chunks hits."""
        hits = bisect_right(self.distances, int(chunks * self.rate) - 1)
        return hits / self.rate * self.chunk_tokens / self.prompt_tokens

    @property
    def highest(self) -> float:
        """Share of prompt tokens that an unlimited cache hits: the upper bound for every size and policy."""
        return len(self.distances) / self.rate * self.chunk_tokens / self.prompt_tokens

    def knee(self, share: float = KNEE) -> int:
        """Return the size in chunks of the smallest cache with ``share`` of the highest hit rate.

        Returns 0 if no cache would have a hit.
        """
        if not self.distances:
            return 0
        place = min(len(self.distances) - 1, int(share * len(self.distances)))
        return int((self.distances[place] + 1) / self.rate)

    def plot(self, chunk_bytes: int) -> SizeCurve:
        """Return hit rates at cache sizes from one chunk to the smallest cache with all hits, and the knee."""
        last = self.knee(1.0) or 1
        steps = {int(last ** (place / _PLOTTED)) for place in range(_PLOTTED + 1)} | {self.knee() or 1, last}
        points = tuple((chunks * chunk_bytes, self.hit_rate(chunks)) for chunks in sorted(steps))
        return SizeCurve(points, self.knee() * chunk_bytes)

    def points(self, chunk_bytes: int, most: int = 24) -> list[tuple[int, float]]:
        """Return (bytes, hit rate) at up to ``most`` cache sizes, which double from 1 GiB on.

        No size follows the first at which the cache hits as much as an unlimited cache.
        """
        last = self.knee(1.0) * chunk_bytes
        size, found = 1 << 30, list[tuple[int, float]]()
        while len(found) < most:
            found.append((size, self.hit_rate(size // chunk_bytes)))
            if size >= last:
                break
            size *= 2
        return found


@dataclass(frozen=True, slots=True)
class ChunkUses:
    """Each use of a prompt chunk in a trace, in order, as if the requests ran one after the other.

    Attributes:
        chunk_tokens: Tokens of a chunk.
        prompt_tokens: Tokens of all prompts.
        keys: int64 [uses]: index of the chunk in each use, from 0 on.
        ends: int64 [requests]: number of uses up to the end of each request.
        distinct: Number of chunks.
        rate: Share of the chunks that were sampled.
    """

    chunk_tokens: int
    prompt_tokens: int
    keys: Int64Array
    ends: Int64Array
    distinct: int
    rate: float = 1.0

    def sampled(self, rate: float) -> ChunkUses:
        """Return the uses of a sample of the chunks: a share of ``rate``, chosen by hash."""
        if rate >= 1:
            return self
        chosen = self.keys.astype(np.uint64) * np.uint64(_HASH) < np.uint64(rate * (1 << 64))
        ends = np.concatenate([[0], np.cumsum(chosen)])[self.ends]
        return replace(self, keys=self.keys[chosen], ends=ends, rate=rate)


def chunk_uses(trace: Trace) -> ChunkUses:
    """Return each use of a prompt chunk by the requests of a trace with hash ids, in order."""
    size, known = chunk_tokens_of(trace), dict[tuple[int, int], int]()
    prompts = [chunk_keys(request, known) for request in trace.requests]
    ends = np.cumsum([len(prompt) for prompt in prompts], dtype=np.int64)
    keys = np.fromiter((key for prompt in prompts for key in prompt), np.int64, int(ends[-1]))
    tokens = sum(request.prompt_tokens for request in trace.requests)
    return ChunkUses(size, tokens, keys, ends, len(known))


def tier_curve(uses: ChunkUses, rate: float | None = None) -> TierCurve:
    """Return the LRU hit rates of all prefix cache sizes for a trace, in one pass.

    Args:
        uses: The chunk uses of the trace.
        rate: Share of the chunks to sample; None: a share that keeps the pass short.
    """
    uses = uses.sampled(_MOST / max(1, uses.keys.size) if rate is None else rate)
    last, tree = np.zeros(uses.distinct, np.int64), np.zeros(uses.keys.size + 1, np.int64)
    found = np.zeros(uses.keys.size, np.int64)
    found = np.sort(found[: _distances(uses.keys, uses.ends, last, tree, found)])
    return TierCurve(uses.chunk_tokens, uses.prompt_tokens, tuple(found.tolist()), uses.rate)


def optimum(uses: ChunkUses, chunks: int, rate: float | None = None) -> float:
    """Return the share of prompt tokens that a cache of ``chunks`` chunks hits if it knows the future.

    Args:
        uses: The chunk uses of a trace.
        chunks: Size of the cache.
        rate: Share of the chunks to sample; None: a share that keeps the pass short.
    """
    uses = uses.sampled(_MOST_OPTIMUM / max(1, uses.keys.size) if rate is None else rate)
    keys, size = uses.keys.tolist(), int(chunks * uses.rate)
    never = len(keys)
    after, last = [never] * never, dict[int, int]()
    for at in range(never - 1, -1, -1):
        after[at] = last.get(keys[at], never)
        last[keys[at]] = at
    held, heap, hits = dict[int, int](), list[tuple[int, int]](), 0
    for at, key in enumerate(keys):
        hits += held.pop(key, None) is not None
        if after[at] == never:
            continue
        held[key] = after[at]
        heapq.heappush(heap, (-after[at], key))
        while len(held) > size:
            furthest, victim = heapq.heappop(heap)
            if held.get(victim) == -furthest:
                del held[victim]
    return hits / uses.rate * uses.chunk_tokens / uses.prompt_tokens


@compiled
def _distances(
    keys: Int64Array, ends: Int64Array, last: Int64Array, tree: Int64Array, found: Int64Array
) -> int:
    """Write the stack distance of every chunk use except first uses to ``found``, and return their number.

    Args:
        keys: Chunk of each use.
        ends: Number of uses up to the end of each request.
        last: Zeros [chunks]: 1 + place of each chunk's last use.
        tree: Zeros [uses + 1]: a Fenwick tree of the places that are last uses.
        found: [uses]: the distances.
    """
    count, now, live, start = 0, 0, 0, 0
    for end in ends:
        for at in range(start, end):
            used = last[keys[at]]
            if used:
                found[count] = live - _sum(tree, used)
                count += 1
        for at in range(end - 1, start - 1, -1):
            used = last[keys[at]]
            if used:
                _add(tree, used, -1)
                live -= 1
            now += 1
            last[keys[at]] = now
            _add(tree, now, 1)
            live += 1
        start = end
    return count


@inlined
def _add(tree: Int64Array, place: int, value: int) -> None:
    """Add ``value`` at index ``place`` of a Fenwick tree."""
    while place < tree.size:
        tree[place] += value
        place += place & -place


@inlined
def _sum(tree: Int64Array, place: int) -> int:
    """Return the sum of the values at indices 1 to ``place`` of a Fenwick tree."""
    total = 0
    while place:
        total += tree[place]
        place &= place - 1
    return total
