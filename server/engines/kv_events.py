"""Publisher of KV cache events over ZeroMQ in vLLM's format, so that routers made for vLLM can subscribe.

A message (vllm/distributed/kv_events.py, 0.32.0) has the frames ``topic, sequence number (8 bytes, big-endian),
payload``. The payload is msgpack of the array ``[timestamp, [event, ...], data_parallel_rank]``. An event is a
map with its class name under ``type``. A second, optional ROUTER socket sends recent batches again. A replay
request is one frame with the first wanted sequence number, and the reply ends with sequence number -1.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import msgspec
import zmq

from tonnage.cache.prefix.events import AllBlocksCleared, BlockStored, KVEvent
from tonnage.server.engines.sharing import KVEventsConfig

END = (-1).to_bytes(8, "big", signed=True)
# Value of ``medium`` in each event. It is vLLM's name for the KV pool that attention reads, even if the pool is
# not on a GPU.
MEDIUM = "GPU"


def encode(events: Sequence[KVEvent], timestamp: float, rank: int | None = None) -> bytes:
    """Return one batch of KV cache events as a msgpack payload in vLLM's format."""
    return msgspec.msgpack.encode([timestamp, [_event(event) for event in events], rank])


def _event(event: KVEvent) -> dict[str, Any]:
    fields: dict[str, Any] = {"type": type(event).__name__}
    if isinstance(event, AllBlocksCleared):
        return fields
    fields |= asdict(event) | {"medium": MEDIUM}
    if isinstance(event, BlockStored):
        fields |= {"lora_id": None, "lora_name": None}
    return fields


class KVEventPublisher:
    """A publisher of KV cache event batches over ZeroMQ, with a thread of its own.

    `publish` never waits for a subscriber.

    Args:
        endpoint: address to bind, such as ``tcp://*:5557``.
        replay_endpoint: address to bind for replay requests; None for no replays.
        topic: first frame of every message.
        rank: data-parallel rank in the payload.
        buffer_steps: number of batches kept for replays.
        max_queue_size: number of queued batches above which `publish` drops and counts batches.
        hwm: ZeroMQ's limit of queued messages per subscriber.

    Raises:
        zmq.ZMQError: an endpoint cannot be bound.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        topic: str = "",
        rank: int | None = None,
        buffer_steps: int = 10_000,
        max_queue_size: int = 100_000,
        hwm: int = 100_000,
    ) -> None:
        self.dropped = 0
        self._topic, self._rank = topic.encode(), rank
        self._queue: queue.Queue[tuple[float, Sequence[KVEvent]] | None] = queue.Queue(max_queue_size)
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self._context = zmq.Context()
        try:
            self._publisher = self._context.socket(zmq.PUB)
            self._publisher.set_hwm(hwm)
            self._publisher.bind(endpoint)
            self.endpoint = self._publisher.getsockopt_string(zmq.LAST_ENDPOINT)
            self._replay: zmq.Socket[bytes] | None = None
            self.replay_endpoint: str | None = None
            if replay_endpoint is not None:
                self._replay = self._context.socket(zmq.ROUTER)
                self._replay.bind(replay_endpoint)
                self.replay_endpoint = self._replay.getsockopt_string(zmq.LAST_ENDPOINT)
        except zmq.ZMQError:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    @classmethod
    def of(cls, config: KVEventsConfig) -> KVEventPublisher:
        """Create the KV event publisher that ``--kv-events-config`` configures."""
        return cls(
            config.endpoint,
            config.replay_endpoint,
            topic=config.topic,
            buffer_steps=config.buffer_steps,
            max_queue_size=config.max_queue_size,
            hwm=config.hwm,
        )

    def publish(self, events: Sequence[KVEvent]) -> None:
        """Queue one batch of KV cache events; usable as the callback of `KVCacheManager.subscribe`."""
        try:
            self._queue.put_nowait((time.time(), events))
        except queue.Full:
            self.dropped += 1

    def close(self) -> None:
        """Send the queued event batches, then stop the publisher's thread and close its sockets."""
        self._queue.put(None)
        self._thread.join()
        self._context.destroy(linger=1000)

    def _run(self) -> None:
        sequence = 0
        while True:
            try:
                # Wait at most 0.1 s for a batch, so that replay requests are answered soon.
                item = self._queue.get(timeout=0.1)
            except queue.Empty:
                self._answer_replays()
                continue
            if item is None:
                return
            timestamp, events = item
            payload = encode(events, timestamp, self._rank)
            self._publisher.send_multipart((self._topic, sequence.to_bytes(8, "big"), payload))
            self._kept.append((sequence, payload))
            sequence += 1
            self._answer_replays()

    def _answer_replays(self) -> None:
        replay = self._replay
        while replay is not None and replay.poll(0):
            frames = replay.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                continue  # a malformed message may lack the sender's address, so no error is sent
            client, first = frames[0], int.from_bytes(frames[2], "big")
            for sequence, payload in self._kept:
                if sequence >= first:
                    replay.send_multipart((client, b"", self._topic, sequence.to_bytes(8, "big"), payload))
            replay.send_multipart((client, b"", b"", END, b""))
