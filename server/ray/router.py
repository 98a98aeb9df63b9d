"""Routing of requests to Ray Serve replicas: longest cached prefix of the prompt first, else most headroom.

Ray's own prefix router needs `ray[llm]` and calls with ``.prompt`` or ``.messages``, while the calls here have
token ids. `ray.serve.request_router` is alpha in Ray 2.60, hence the pin in ``make test-ray``.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import xxhash
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from tonnage.server.engines.request import GenerationRequest

# Prefixes are compared in chunks of this many tokens, coarser than blocks of 16: a shorter common prefix is not
# worth a longer queue.
CHUNK_TOKENS = 64
REMEMBERED_CHUNKS = 1 << 17  # The router remembers this many chunks: 8 Mi tokens of prompts, in about 20 MiB.
# A replica's cached prefix is ignored when its queue is longer than the shortest by more than this. A hit saves
# one prefill, whereas a long queue costs many.
MAX_QUEUE_LEAD = 8


def chain(token_ids: tuple[int, ...], salt: str) -> list[int]:
    """Return a 64-bit hash for each full chunk of the prompt, over all tokens up to the chunk's end.

    Equal hashes therefore mean equal prefixes with the same salt.
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
        """Return how many of the prompt's leading chunks are remembered for each replica.

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
    """Return the replica ids, best first: longest matched prefix, then most headroom, then shortest queue.

    A replica whose queue is longer than the shortest by more than MAX_QUEUE_LEAD is ranked as if it had no
    matched prefix. A replica without a report of its headroom has just started, so it is taken to have as much
    as the best one; then the shortest queue decides.
    """
    shortest, most = min(queues.values(), default=0), max(headroom.values(), default=0.0)

    def rank(replica_id: str) -> tuple[float, float, int]:
        crowded = queues[replica_id] - shortest > MAX_QUEUE_LEAD
        affinity = 0 if crowded else matched.get(replica_id, 0)
        return (-affinity, -headroom.get(replica_id, most), queues[replica_id])

    return sorted(queues, key=rank)


class PrefixHeadroomRouter(RequestRouter):  # type: ignore[misc]
    """A request router for Ray Serve that ranks the replicas by cached prefix and headroom, best first."""

    def initialize_state(self, **_: Any) -> None:
        """Create the router's state; Ray calls this method once."""
        self._memory = PrefixMemory()
        # Number of unfinished requests by replica, counted here because the replicas' reports are up to one
        # second old.
        self._sent: dict[str, int] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the candidate replicas, best first, each in a list of its own."""
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        hashes = _hashes(pending_request)
        queues = {key: self._sent.get(key, 0) for key in replicas}
        headroom = {
            key: float(blocks)
            for key, replica in replicas.items()
            if (blocks := replica.routing_stats.get("headroom_blocks")) is not None
        }
        ranked = order(self._memory.matched(hashes), queues, headroom)
        return [[replicas[key]] for key in ranked]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Record that a request was sent to a replica."""
        key = replica_id.unique_id
        self._sent[key] = self._sent.get(key, 0) + 1
        self._memory.remember(_hashes(pending_request), key)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str, *_: Any, **__: Any) -> None:
        """Record that a request ended on a replica."""
        key = replica_id.unique_id
        self._sent[key] = max(0, self._sent.get(key, 0) - 1)


def _hashes(pending: PendingRequest | None) -> list[int]:
    request = pending.args[0] if pending is not None and pending.args else None
    if not isinstance(request, GenerationRequest):
        return []
    return chain(request.prompt_token_ids, request.cache_salt)
