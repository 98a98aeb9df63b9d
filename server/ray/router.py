"""PrefixHeadroomRouter: a request goes to the replica that has most of its prompt, else to the one with room.

Ray's own prefix router wants a ``.prompt`` or ``.messages`` on the call and `ray[llm]`; ours sees token ids.
`ray.serve.request_router` is alpha in Ray 2.60, hence the pin in ``make test-ray``.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import xxhash
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from tonnage.server.engines.request import GenerationRequest

CHUNK_TOKENS = 64  # coarser than a block of 16: a shorter common beginning is not worth a longer queue
REMEMBERED_CHUNKS = 1 << 17  # 8 Mi tokens of prompts, about 20 MiB here
# Above this difference of queues affinity gives way: a hit saves a prefill, a queue costs many.
MAX_QUEUE_LEAD = 8


def chain(token_ids: tuple[int, ...], salt: str) -> list[int]:
    """A 64-bit hash for each full chunk of the prompt, each over everything before it."""
    tokens = np.asarray(token_ids, np.int32)
    value = xxhash.xxh3_64_intdigest(salt.encode())
    hashes = []
    for end in range(CHUNK_TOKENS, len(tokens) + 1, CHUNK_TOKENS):
        value = xxhash.xxh3_64_intdigest(tokens[end - CHUNK_TOKENS : end].tobytes(), value)
        hashes.append(value)
    return hashes


class PrefixMemory:
    """Who computed which beginning last: chunk hash -> replica id, least recently used forgotten first."""

    def __init__(self, size: int = REMEMBERED_CHUNKS) -> None:
        self._size = size
        self._owner: OrderedDict[int, str] = OrderedDict()

    def matched(self, hashes: list[int]) -> dict[str, int]:
        """Chunks of this prompt that each replica has seen, counted from the start without a gap."""
        found: dict[str, int] = {}
        for count, value in enumerate(hashes, start=1):
            owner = self._owner.get(value)
            if owner is None:
                break
            found[owner] = count
        return found

    def remember(self, hashes: list[int], replica_id: str) -> None:
        for value in hashes:
            self._owner[value] = replica_id
            self._owner.move_to_end(value)
        while len(self._owner) > self._size:
            self._owner.popitem(last=False)


def order(matched: dict[str, int], queues: dict[str, int], headroom: dict[str, float]) -> list[str]:
    """Replica ids, best first: longest matched beginning, then headroom, then shortest queue.

    A replica whose queue leads the shortest by more than MAX_QUEUE_LEAD loses its claim by affinity.
    """
    shortest = min(queues.values(), default=0)

    def rank(replica_id: str) -> tuple[float, float, int]:
        crowded = queues[replica_id] - shortest > MAX_QUEUE_LEAD
        affinity = 0 if crowded else matched.get(replica_id, 0)
        return (-affinity, -headroom.get(replica_id, 0.0), queues[replica_id])

    return sorted(queues, key=rank)


class PrefixHeadroomRouter(RequestRouter):  # type: ignore[misc]
    """Ray Serve asks it for an order of replicas, best first, one to a rank."""

    def initialize_state(self, **_: Any) -> None:
        self._memory = PrefixMemory()
        # Sent since the replica last reported: the reports are a second old, a burst is faster than that.
        self._sent: dict[str, int] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        hashes = _hashes(pending_request)
        queues = {key: self._sent.get(key, 0) for key in replicas}
        headroom = {
            key: float(replica.routing_stats.get("headroom_blocks", 0)) for key, replica in replicas.items()
        }
        ranked = order(self._memory.matched(hashes), queues, headroom)
        return [[replicas[key]] for key in ranked]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        key = replica_id.unique_id
        self._sent[key] = self._sent.get(key, 0) + 1
        self._memory.remember(_hashes(pending_request), key)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str, *_: Any, **__: Any) -> None:
        key = replica_id.unique_id
        self._sent[key] = max(0, self._sent.get(key, 0) - 1)


def _hashes(pending: PendingRequest | None) -> list[int]:
    request = pending.args[0] if pending is not None and pending.args else None
    if not isinstance(request, GenerationRequest):
        return []
    return chain(request.prompt_token_ids, request.cache_salt)
