"""KV tiers in a replay: hits in host memory and on disk, their loads, and the bytes that move.

The rules are those of vLLM 0.32's OffloadingConnector. Full chunks of prompts are stored as they are computed
(offload_prompt_only). When a request starts, the tiers are searched for the chunks after its hit in the GPU's
prefix cache. The chunks up to the first missing one are loaded, while other requests compute. Loads share the
link from host memory, one after the other. A disk tier gets every chunk that is stored; its hits go through
host memory first. The learned order is used in the last tier: in front of a disk, host memory is LRU, because
chunks that it evicts are on disk.

The simulation simplifies two things. Stores take no time, since both directions of a link work at once. A block
that is still being loaded counts as a hit for other requests.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

from tonnage.cache.errors import CacheConfigError
from tonnage.cache.replay.chunk_store import ChunkStore, ChunkUse
from tonnage.cache.replay.trace import Trace
from tonnage.cache.replay.trace_request import TraceRequest


@dataclass(frozen=True, slots=True)
class TierSetup:
    """The configuration of the KV tiers (host memory, disk) behind one engine's GPU pool.

    Attributes:
        host_bytes: Size of the tier in host memory.
        token_bytes: Bytes of K/V per token over all layers.
        disk_bytes: Size of the tier on disk; 0: none.
        policy: Order of eviction: lru, arc or learned.
        host_bandwidth: Bytes per second from host memory to the GPU.
        disk_bandwidth: Bytes per second from disk to host memory.
    """

    host_bytes: int
    token_bytes: int
    disk_bytes: int = 0
    policy: str = "lru"
    host_bandwidth: float = 50e9
    disk_bandwidth: float = 5e9


@dataclass(slots=True)
class TierCounts:
    """Counters of the KV tiers in a replay; bytes are counted by the direction in which they move."""

    host_hit_tokens: int = 0
    disk_hit_tokens: int = 0
    loads: int = 0
    host_loaded_bytes: int = 0
    host_stored_bytes: int = 0
    disk_loaded_bytes: int = 0
    disk_stored_bytes: int = 0
    load_seconds: float = 0.0
    waited_seconds: float = 0.0  # seconds from a request's start until its load has ended, sum over requests
    chunks_stored: int = 0
    chunks_evicted: int = 0
    refused_stores: int = 0
    chunks_declined: int = 0  # chunks not stored, because their forecast reuse was too low

    @property
    def hit_tokens(self) -> int:
        """Number of prompt tokens that were loaded from any KV tier."""
        return self.host_hit_tokens + self.disk_hit_tokens


@dataclass(slots=True, eq=False)
class _Request:
    """The chunks of one request: its use of each store, and how much of its prompt has been stored."""

    host: ChunkUse
    disk: ChunkUse
    next_stored: int = 0
    loading: tuple[int, int] | None = None


@dataclass(slots=True)
class Tiers:
    """The simulated KV tiers (host memory, disk) of one replayed engine.

    Attributes:
        setup: Sizes and bandwidths.
        chunk_tokens: Tokens of a chunk, which are those of a hash id of the trace.
        host: The store in host memory. A benchmark replaces it by vLLM's own.
        unstored: Sequences with chunks that were not offered to the tiers yet; `computed` ignores all others.
    """

    setup: TierSetup
    chunk_tokens: int
    host: Any = None
    disk: ChunkStore | None = None
    counts: TierCounts = field(default_factory=TierCounts)
    unstored: set[int] = field(default_factory=set)
    _keys: dict[tuple[int, int], int] = field(default_factory=dict)
    _requests: dict[int, _Request] = field(default_factory=dict)
    _writing: list[tuple[Any, list[int]]] = field(default_factory=list)
    _link_free: float = 0.0

    def __post_init__(self) -> None:
        policy = self.setup.policy
        if self.setup.disk_bytes:
            self.disk = ChunkStore(self._chunks(self.setup.disk_bytes, "disk"), policy)
            policy = "lru" if policy == "learned" else policy
        self.host = self.host or ChunkStore(self._chunks(self.setup.host_bytes, "host"), policy)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of K and V in one chunk of a KV tier."""
        return self.chunk_tokens * self.setup.token_bytes

    def _chunks(self, size: int, name: str) -> int:
        chunks = size // self.chunk_bytes
        if chunks < 1:
            raise CacheConfigError(
                f"{name}={size:,} bytes hold no chunk ({self.chunk_tokens} tokens, {self.chunk_bytes:,} bytes)",
                field="--tiers",
                hint="give a larger size",
            )
        return chunks

    # -- the life of a request -----------------------------------------------------------------------------

    def load(self, sequence: int, trace: TraceRequest, computed: int, now: float) -> tuple[int, float]:
        """Return how many tokens after ``computed`` a request loads from the tiers, and when the load ends."""
        request = self._requests.get(sequence)
        if request is None:
            found = chunk_keys(trace, self._keys)
            request = self._requests[sequence] = _Request(ChunkUse(found), ChunkUse(found))
            self.unstored.add(sequence)
            # The disk tier counts all chunks that the request uses, also those that it loads from host memory.
            if self.disk is not None:
                request.disk.seen.update(range(len(found)))
                request.disk.reused.update(itertools.takewhile(self.disk.lookup, found))
        keys, size = request.host.keys, self.chunk_tokens
        start, ends = computed // size, len(keys)
        end, from_disk = start, list[int]()
        while end < ends:
            if self.host.lookup(keys[end]):
                end += 1
            elif self.disk is not None and self.disk.lookup(keys[end]):
                from_disk.append(end)
                end += 1
            else:
                break
        # The last token of a prompt is always computed, because its logits are needed.
        tokens = min(end * size, trace.prompt_tokens - 1) - computed
        if end == start or end * size - computed < size or tokens <= 0:
            return 0, now
        end = self._begin(request, start, end, from_disk)
        tokens = min(end * size, trace.prompt_tokens - 1) - computed
        if end * size - computed < size or tokens <= 0:
            self.host.loaded(request.host, start, end)
            return 0, now
        request.loading = (start, end)
        request.next_stored = max(request.next_stored, end)
        moved = (end * size - computed) * self.setup.token_bytes
        return tokens, self._took(now, tokens, sum(place < end for place in from_disk), moved)

    def _begin(self, request: _Request, start: int, end: int, from_disk: list[int]) -> int:
        """Begin to load a request's chunks [start, end); return the index after the last chunk loaded.

        Chunks that only the disk holds are first stored in host memory. Before that, the chunks that host
        memory holds already are marked busy, so that these stores do not evict them. If no space is left for a
        chunk, the load ends before this chunk.
        """
        if not from_disk or self.disk is None:
            self.host.load(request.host, start, end)
            return end
        for place in (place for place in range(start, end) if place not in from_disk):
            self.host.load(request.host, place, place + 1)
        for place in from_disk:
            if not self.host.store(request.host, place, place + 1):
                for later in (later for later in range(place + 1, end) if later not in from_disk):
                    self.host.loaded(request.host, later, later + 1)
                return place
            self.host.written([request.host.keys[place]])
            self.host.load(request.host, place, place + 1)
            self.disk.load(request.disk, place, place + 1)
            self.disk.loaded(request.disk, place, place + 1)
        return end

    def _took(self, now: float, tokens: int, from_disk: int, moved: int) -> float:
        """Count a load from the tiers and return the simulated time at which it ends.

        Args:
            now: Simulated time in seconds.
            tokens: Tokens that the load serves.
            from_disk: Number of chunks that are read from disk first.
            moved: Bytes that move from host memory to the GPU.
        """
        setup, counts = self.setup, self.counts
        disk = from_disk * self.chunk_bytes
        seconds = moved / setup.host_bandwidth + disk / setup.disk_bandwidth
        self._link_free = max(self._link_free, now) + seconds
        counts.loads += 1
        counts.disk_hit_tokens += min(tokens, from_disk * self.chunk_tokens)
        counts.host_hit_tokens += tokens - min(tokens, from_disk * self.chunk_tokens)
        counts.host_loaded_bytes += moved
        counts.disk_loaded_bytes += disk
        counts.load_seconds += seconds
        counts.waited_seconds += self._link_free - now
        return self._link_free

    def loaded(self, sequence: int) -> None:
        """Record that the load of a request's chunks from the tiers has ended."""
        request = self._requests[sequence]
        if request.loading is not None:
            self.host.loaded(request.host, *request.loading)
            request.loading = None

    def computed(self, sequence: int, tokens: int) -> None:
        """Store in the tiers the full chunks of a prompt of which ``tokens`` tokens are computed."""
        request = self._requests[sequence]
        end = min(tokens // self.chunk_tokens, len(request.host.keys))
        if end <= request.next_stored:
            return
        new = self.host.store(request.host, request.next_stored, end)
        if new is None:  # No space could be made in host memory. The next step tries again to store the chunks.
            return
        self._writing.append((self.host, new))
        self.counts.host_stored_bytes += len(new) * self.chunk_bytes
        if self.disk is not None and (kept := self.disk.store(request.disk, request.next_stored, end)):
            self._writing.append((self.disk, kept))
            self.counts.disk_stored_bytes += len(kept) * self.chunk_bytes
        request.next_stored = end
        if end == len(request.host.keys):
            self.unstored.discard(sequence)

    def step_ended(self) -> None:
        """Let requests load the chunks that were stored in the tiers in this step."""
        for store, keys in self._writing:
            store.written(keys)
        self._writing.clear()

    def ended(self, sequence: int) -> None:
        """Record the end of a request in the eviction orders of all tiers."""
        request = self._requests.pop(sequence)
        self.unstored.discard(sequence)
        self.host.finish(request.host)
        if self.disk is not None:
            self.disk.finish(request.disk)

    def result(self) -> TierCounts:
        """Return the counters of all KV tiers, including those of the store in host memory."""
        counts = self.counts
        counts.chunks_stored, counts.chunks_evicted = self.host.stored, self.host.evicted
        counts.refused_stores, counts.chunks_declined = self.host.refused, self.host.declined
        return counts


def chunk_keys(trace: TraceRequest, known: dict[tuple[int, int], int]) -> tuple[int, ...]:
    """Return a key for each full chunk of a prompt; equal keys mean equal prompts up to the chunk's end.

    ``known`` maps (key of the chunk before, hash id) to the key; new chunks are added to it.
    """
    keys, parent = [], -1
    for place in (trace.hash_ids or ())[: trace.prompt_tokens // trace.hash_block]:
        parent = known.setdefault((parent, place), len(known))
        keys.append(parent)
    return tuple(keys)


def chunk_tokens_of(trace: Trace) -> int:
    """Return the number of prompt tokens per hash id of a trace, which is also the chunk size of the tiers.

    Raises:
        CacheConfigError: The trace has no hash ids, or hash ids of different sizes.
    """
    sizes = {request.hash_block for request in trace.requests if request.hash_ids is not None}
    if not sizes:
        raise CacheConfigError(
            f"{trace.name} has no hash_ids, so it does not say which prompts share a prefix", field="--tiers"
        )
    if len(sizes) > 1:
        raise CacheConfigError(
            f"{trace.name} has hash ids of different sizes, {sorted(sizes)} tokens", field="--tiers",
            hint="replay the requests of one size",
        )  # fmt: skip
    return sizes.pop()
