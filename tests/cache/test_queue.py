"""The waiting queue: order, ageing, passing, quotas, and the estimate of how fast it drains."""

from __future__ import annotations

import random
from bisect import insort

import pytest

from tonnage.cache.admission import AdmissionRequest, Head, Wait, WaitReason
from tonnage.cache.errors import CacheConfigError, InvalidRequest, UnknownSequence
from tonnage.cache.scheduler.queue import Waiting, WaitingQueue


def entry(id: int, arrival: float, priority: int = 0, tenant: str = "") -> Waiting:
    return Waiting(id, AdmissionRequest(10, 10, tenant=tenant, priority=priority), arrival)


def order_of(queue: WaitingQueue) -> list[int]:
    return [waiting.id for waiting in queue]


def test_queue_is_fifo_and_preempted_requests_precede_later_arrivals() -> None:
    queue = WaitingQueue()
    for id, arrival in ((1, 1.0), (2, 2.0), (3, 3.0)):
        queue.push(entry(id, arrival))
    queue.remove(1)
    queue.push(entry(4, 4.0))
    queue.push(entry(1, 1.0))
    assert order_of(queue) == [1, 2, 3, 4]
    assert queue.tokens == 4 * 20


def test_waiting_requests_gain_priority_with_time_so_that_none_starves() -> None:
    queue = WaitingQueue(ageing=10)
    queue.push(entry(0, 0.0, priority=1))
    for id in range(1, 40):
        queue.push(entry(id, float(id)))
    # One step of priority is ten seconds: requests of the first ten seconds go first, later ones do not.
    assert order_of(queue).index(0) == 9


def test_invalid_push_or_remove_leaves_the_waiting_queue_unchanged() -> None:
    queue = WaitingQueue()
    queue.push(entry(1, 0.0))
    with pytest.raises(InvalidRequest):
        queue.push(entry(1, 5.0))
    with pytest.raises(UnknownSequence):
        queue.remove(2)
    assert order_of(queue) == [1]
    with pytest.raises(CacheConfigError):
        WaitingQueue(ageing=0)
    with pytest.raises(CacheConfigError):
        WaitingQueue(lookahead=-1)


def answers(queue: WaitingQueue, waits: dict[int, Wait], start: int, step: int) -> tuple[int | None, list[int]]:
    """Return which request is admitted, and which requests were tried behind the head."""
    behind = []

    def ask(waiting: Waiting, head: Head | None) -> Wait | str:
        if head is not None:
            behind.append(waiting.id)
        return waits.get(waiting.id, "admitted")

    taken = queue.take(ask, lambda request: Head(request, 10, start), step)
    return (None if taken is None else taken[0].id), behind


def test_no_request_overtakes_the_queue_head_after_the_forecast_start_of_the_head() -> None:
    queue = WaitingQueue(lookahead=2)
    for id in range(5):
        queue.push(entry(id, float(id)))
    wait = Wait(WaitReason.BLOCKS, 1)
    assert answers(queue, {0: wait}, start=7, step=0) == (1, [1])
    assert answers(queue, {0: wait, 2: wait, 3: wait}, start=7, step=3) == (None, [2, 3])  # lookahead 2
    # Forecast anew for step 13: the first reservation, step 7, stands.
    assert answers(queue, {0: wait}, start=7, step=6) == (2, [2])
    assert answers(queue, {0: wait}, start=7, step=7) == (None, [])
    assert answers(queue, {}, start=7, step=8) == (0, [])


def test_tenant_at_its_quota_blocks_no_other_tenant() -> None:
    queue = WaitingQueue()
    queue.push(entry(0, 0.0, tenant="a"))
    queue.push(entry(1, 1.0, tenant="b"))
    assert answers(queue, {0: Wait(WaitReason.TENANT_QUOTA, 5)}, start=1, step=0) == (1, [])
    assert order_of(queue) == [0]


def test_no_further_request_is_considered_when_the_batch_is_full() -> None:
    queue = WaitingQueue()
    queue.push(entry(0, 0.0))
    queue.push(entry(1, 1.0))
    assert answers(queue, {0: Wait(WaitReason.SEQUENCES, 0, 1)}, start=1, step=0) == (None, [])


def test_queue_order_equals_a_sorted_list_after_random_removals() -> None:
    draw, queue, expected = random.Random(2), WaitingQueue(), list[tuple[float, int]]()
    for number in range(3000):
        if expected and draw.random() < 0.45:
            # mostly near the head, as admission removes entries
            place = min(len(expected) - 1, draw.choice((0, 0, 0, 1, 5, draw.randrange(len(expected)))))
            assert queue.remove(expected.pop(place)[1]).id not in queue
        else:
            arrival = float(draw.randrange(1000))
            queue.push(entry(number, arrival))
            insort(expected, (arrival, number))
        assert len(queue) == len(expected)
        if number % 100 == 0:
            assert order_of(queue) == [id for _, id in expected]
