"""KV events: a router can rebuild the prefix index from them, and vLLM's own classes decode the wire format."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pool_lists
import pytest
import zmq
from invariants import check_invariants
from kv_calls import commit, extend
from serving import PATIENCE
from vllm.distributed import kv_events as vllm_events

from tonnage.cache.errors import CacheBusy, CacheConfigError
from tonnage.cache.manager import Admitted, KVCacheManager
from tonnage.cache.prefix.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from tonnage.cache.replay.trace import read_trace
from tonnage.planner.model.layout import KVGroup, KVLayout
from tonnage.server.engines.kv_events import END, KVEventPublisher, encode


def make(blocks: int = 33, **options: object) -> KVCacheManager:
    groups = (KVGroup("full", (0,)), KVGroup("sliding", (1,), window=8))
    layout = KVLayout(groups, 4, 1, kv_heads=1, head_size=8, dtype="float32", dtype_bytes=4)
    return KVCacheManager(
        layout,
        blocks,
        max_num_seqs=8,
        max_model_len=64,
        max_num_batched_tokens=64,
        **{"kv_events": True, **options},  # type: ignore[arg-type]
    )


class Router:
    """A subscriber's view of the prefix index: block hash -> (parent hash, tokens)."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        self.cleared = self.batches = 0

    def __call__(self, events: Sequence[KVEvent]) -> None:
        self.batches += 1
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.blocks.clear()
                self.cleared += 1
            elif isinstance(event, BlockRemoved):
                for value in event.block_hashes:
                    del self.blocks[value]
            else:
                parent = event.parent_block_hash
                assert parent is None or parent in self.blocks
                for at, value in enumerate(event.block_hashes):
                    assert value not in self.blocks
                    tokens = event.token_ids[at * event.block_size : (at + 1) * event.block_size]
                    self.blocks[value] = (parent, tokens)
                    parent = value


def test_subscriber_of_kv_events_can_reproduce_the_prefix_cache_index() -> None:
    manager, router, pick = make(blocks=65), Router(), random.Random(1)
    manager.subscribe(router)
    live: list[int] = []
    for number in range(400):
        prompt = [1, 2, 3, 4] * pick.randint(0, 4) + pick.choices(range(3), k=pick.randint(1, 20))
        if isinstance(manager.admit(number, prompt, 4), Admitted):
            extend(manager, number, len(prompt))
            commit(manager, number, len(prompt))
            live.append(number)
            manager.decode(live[-1:], [9])
        while len(live) > pick.randint(0, 3):
            manager.free([live.pop(0)])
        index = manager.core
        nodes = pool_lists.nodes(manager.core)
        known = {
            int(index.node_hash[n]): (
                int(index.node_hash[index.parent[n]]) if index.parent[n] else None,
                tuple(index.node_tokens[n].tolist()),
            )
            for n in nodes
        }
        assert router.blocks == known
    assert manager.stats().evictions > 100
    while live:
        manager.free([live.pop()])
    manager.reset_prefix_cache()
    assert (router.blocks, router.cleared, manager.stats().cached) == ({}, 1, 0)
    check_invariants(manager)


def test_published_kv_events_can_be_replayed_as_a_trace(tmp_path: Path) -> None:
    """Two prompts have four equal blocks, which the second one hits; only its other blocks are stored."""
    manager = make(blocks=65)
    payloads: list[bytes] = []
    manager.subscribe(lambda events: payloads.append(encode(events, 10.0 + len(payloads))))
    first, second = list(range(100, 124)), [*range(100, 116), *range(200, 217)]
    for number, prompt in enumerate((first, second)):
        assert isinstance(manager.admit(number, prompt, 4), Admitted)
        extend(manager, number, len(prompt))
        commit(manager, number, len(prompt))
        manager.free([number])
    path = tmp_path / "events.msgpack"
    path.write_bytes(b"".join(payloads))
    one, two = read_trace(path).requests
    assert (one.prompt_tokens, two.prompt_tokens, one.hash_block) == (24, 32, 4)
    assert one.hash_ids is not None
    assert two.hash_ids is not None
    assert [a == b for a, b in zip(one.hash_ids, two.hash_ids, strict=False)] == [True] * 4 + [False] * 2


def test_subscribing_to_kv_events_is_rejected_if_they_are_off() -> None:
    with pytest.raises(CacheConfigError, match="kv_events"):
        make(kv_events=False).subscribe(print)


def test_reset_of_the_prefix_cache_is_rejected_while_blocks_are_in_use() -> None:
    manager = make()
    manager.admit(1, [1] * 9, 4)
    before = manager.stats()
    with pytest.raises(CacheBusy):
        manager.reset_prefix_cache()
    assert manager.stats() == before


EVENTS = (
    BlockStored((2**64 - 1, 5), None, (1, 2, 3, 4, 5, 6, 7, 8), 4),
    BlockRemoved((5,)),
    AllBlocksCleared(),
)


def check_with_vllm(payload: bytes) -> None:
    batch = msgspec.msgpack.decode(payload, type=vllm_events.KVEventBatch)
    stored, removed, cleared = batch.events
    assert isinstance(stored, vllm_events.BlockStored)
    assert stored.block_hashes == [2**64 - 1, 5]
    assert (stored.parent_block_hash, stored.block_size, stored.medium) == (None, 4, vllm_events.MEDIUM_GPU)
    assert stored.token_ids == [1, 2, 3, 4, 5, 6, 7, 8]
    assert isinstance(removed, vllm_events.BlockRemoved)
    assert removed.block_hashes == [5]
    assert isinstance(cleared, vllm_events.AllBlocksCleared)


def test_vllms_kv_event_classes_decode_a_published_batch() -> None:
    check_with_vllm(encode(EVENTS, 1.5))
    batch = msgspec.msgpack.decode(encode(EVENTS, 1.5, rank=3), type=vllm_events.KVEventBatch)
    assert (batch.ts, batch.data_parallel_rank) == (1.5, 3)


def test_kv_event_publisher_replays_earlier_batches_to_a_late_subscriber() -> None:
    publisher = KVEventPublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", topic="kv")
    context = zmq.Context()
    try:
        subscriber = context.socket(zmq.SUB)
        subscriber.connect(publisher.endpoint)
        subscriber.subscribe("kv")
        received: list[list[bytes]] = []
        deadline = time.monotonic() + PATIENCE
        while not received and time.monotonic() < deadline:  # a PUB socket drops what comes before it is joined
            publisher.publish(EVENTS)
            if subscriber.poll(50):
                received.append(subscriber.recv_multipart())
        topic, _, payload = received[0]
        assert topic == b"kv"
        check_with_vllm(payload)
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.RCVTIMEO, int(PATIENCE * 1000))
        assert publisher.replay_endpoint is not None
        dealer.connect(publisher.replay_endpoint)
        dealer.send_multipart((b"", (0).to_bytes(8, "big")))
        sequences = []
        while True:
            _, _, sequence, payload = dealer.recv_multipart()
            if sequence == END:
                break
            sequences.append(int.from_bytes(sequence, "big"))
            check_with_vllm(payload)
        assert sequences == list(range(len(sequences)))
        assert sequences
        assert publisher.dropped == 0
    finally:
        context.destroy(linger=0)
        publisher.close()
