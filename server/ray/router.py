"""Routing of requests to Ray Serve replicas: longest cached prefix of the prompt first, else most headroom.

Ray's own prefix router needs `ray[llm]` and calls with ``.prompt`` or ``.messages``, while the calls here have
token ids. `ray.serve.request_router` is alpha in Ray 2.60, hence the pin in ``make test-ray``.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import xxhash
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from tonnage.server.engines.request import GenerationRequest

# Prefixes are compared in chunks of this many tokens, not in blocks of 16. A common prefix shorter than a chunk
# is not worth choosing a replica with a longer queue.
CHUNK_TOKENS = 64
# The router remembers the hashes of this many chunks: 8 Mi tokens of prompts, in about 20 MiB.
REMEMBERED_CHUNKS = 1 << 17

# A replica's cached prefix is ignored when its queue is longer than the shortest by more than this. A hit saves
# one prefill, whereas a long queue costs many.
MAX_QUEUE_LEAD = 8


def chain(token_ids: tuple[int, ...], salt: str) -> list[int]:
    """Return one 64-bit hash per full chunk of a prompt's tokens, over all tokens up to the chunk's end.

    Equal hashes therefore mean equal prefixes with the same cache salt.
    """
    tokens = np.asarray(token_ids, np.int32)
    value = xxhash.xxh3_64_intdigest(salt.encode())
    hashes = []
    for end in range(CHUNK_TOKENS, len(tokens) + 1, CHUNK_TOKENS):
        value = xxhash.xxh3_64_intdigest(tokens[end - CHUNK_TOKENS : end].tobytes(), value)
        hashes.append(value)
    return hashes


class PrefixMemory:
    """A map from the hash of a prefix to the id of the replica that computed it last, with LRU eviction."""

    def __init__(self, size: int = REMEMBERED_CHUNKS) -> None:
        self._size = size
        self._owner: OrderedDict[int, str] = OrderedDict()

    def matched(self, hashes: list[int]) -> dict[str, int]:
        """Return, for each replica id, how many leading chunks of a prompt the replica has computed.

        `hashes` are the chunk hashes of the prompt. The count ends at the first chunk that no replica has
        computed.
        """
        found: dict[str, int] = {}
        for count, value in enumerate(hashes, start=1):
            owner = self._owner.get(value)
            if owner is None:
                break
            found[owner] = count
        return found

    def remember(self, hashes: list[int], replica_id: str) -> None:
        """Record that a replica computes a prompt with these chunk hashes."""
        for value in hashes:
            self._owner[value] = replica_id
            self._owner.move_to_end(value)
        while len(self._owner) > self._size:
            self._owner.popitem(last=False)


def order(matched: dict[str, int], queues: dict[str, int], headroom: dict[str, float]) -> list[str]:
    """Return the replicas' ids, best first: longest cached prefix, most unreserved blocks, shortest queue.

    A replica whose queue is longer than the shortest by more than MAX_QUEUE_LEAD is ranked as if it had no
    matched prefix. A replica without a report of its headroom has just started, so its headroom counts as equal
    to the largest reported one, and the length of its queue decides.
    """
    shortest, most = min(queues.values(), default=0), max(headroom.values(), default=0.0)

    def rank(replica_id: str) -> tuple[float, float, int]:
        crowded = queues[replica_id] - shortest > MAX_QUEUE_LEAD
        affinity = 0 if crowded else matched.get(replica_id, 0)
        return (-affinity, -headroom.get(replica_id, most), queues[replica_id])

    return sorted(queues, key=rank)


class Headroom:
    """The replicas' unreserved blocks: those of the last reports, minus the needs of requests sent since then.

    Reports are up to one second old. Without the subtraction, all requests of a burst would go to one replica.
    """

    def __init__(self) -> None:
        self._report: dict[str, Mapping[str, float]] = {}
        self._sent_tokens: dict[str, int] = {}

    def blocks(self, reports: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
        """Return the number of unreserved KV blocks by replica id; a replica without a report is left out.

        `reports` are the replicas' routing statistics by replica id (`EngineReplica.record_routing_stats`).
        """
        known = {}
        for key, report in reports.items():
            if "headroom_blocks" not in report:
                continue
            if self._report.get(key, {}).get("number") != report["number"]:
                self._report[key], self._sent_tokens[key] = report, 0
            known[key] = report["headroom_blocks"] - self._sent_tokens[key] / report["block_size"]
        return known

    def sent(self, replica_id: str, tokens: int) -> None:
        """Record that a request, which may grow to ``tokens`` tokens, was sent to a replica."""
        self._sent_tokens[replica_id] = self._sent_tokens.get(replica_id, 0) + tokens


class PrefixHeadroomRouter(RequestRouter):  # type: ignore[misc]
    """A request router for Ray Serve that ranks the replicas by cached prefix and headroom, best first."""

    def initialize_state(self, **_: Any) -> None:
        """Create the router's state; Ray calls this method once."""
        self._memory = PrefixMemory()
        self._headroom = Headroom()
        # The replica of each unfinished request, by Ray's internal request id. A request is entered as soon as
        # its replica is chosen, because Ray chooses replicas for all requests of a burst before the first one
        # has reached its replica.
        self._replica: dict[str, str] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the candidate replicas, best first, each in a list of its own."""
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        hashes = _hashes(pending_request)
        unfinished = Counter(self._replica.values())
        queues = {key: unfinished[key] for key in replicas}
        headroom = self._headroom.blocks({key: each.routing_stats for key, each in replicas.items()})
        ranked = order(self._memory.matched(hashes), queues, headroom)
        if ranked and pending_request is not None:
            self._count(pending_request, ranked[0])
        return [[replicas[key]] for key in ranked]

    def _count(self, pending: PendingRequest, replica_id: str) -> None:
        """Add a request to the replica's queue count, until the request is completed or cancelled."""
        request_id = pending.metadata.internal_request_id
        if request_id not in self._replica:
            pending.future.add_done_callback(
                lambda future: self._replica.pop(request_id, None) if future.cancelled() else None
            )
        self._replica[request_id] = replica_id
        if (request := _request(pending)) is not None:
            tokens = len(request.prompt_token_ids) + request.n * request.params.max_tokens
            self._headroom.sent(replica_id, tokens)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Record which replica has accepted a request; the best-ranked replica may have been full."""
        key = replica_id.unique_id
        request_id = pending_request.metadata.internal_request_id
        if request_id in self._replica:  # a request that has already ended has no entry any more
            self._replica[request_id] = key
        self._memory.remember(_hashes(pending_request), key)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str, *_: Any, **__: Any) -> None:
        """Record that a request ended on a replica."""
        self._replica.pop(internal_request_id, None)


def _request(pending: PendingRequest | None) -> GenerationRequest | None:
    request = pending.args[0] if pending is not None and pending.args else None
    return request if isinstance(request, GenerationRequest) else None


def _hashes(pending: PendingRequest | None) -> list[int]:
    request = _request(pending)
    return [] if request is None else chain(request.prompt_token_ids, request.cache_salt)
