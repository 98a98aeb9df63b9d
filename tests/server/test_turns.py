"""Turns at work that few requests may do at once: their order, and that no place is ever lost."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

from tonnage.server.http.turns import Turns, work_for


async def test_api_keys_take_turns_at_slots_of_limited_concurrency_and_requests_of_a_key_keep_order() -> None:
    turns, done = Turns(1), list[str]()

    async def request(name: str) -> None:
        work_for(name[0])
        async with turns:
            await asyncio.sleep(0)
            done.append(name)

    names = ["a1", "a2", "a3", "a4", "b1", "b2", "c1"]
    await asyncio.gather(*map(request, names))
    assert done == ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]


async def test_cancelled_requests_neither_leak_nor_duplicate_slots_of_limited_concurrency() -> None:
    draw, turns, inside, most = random.Random(0), Turns(3), 0, 0

    async def request(key: str) -> None:
        nonlocal inside, most
        work_for(key)
        async with turns:
            inside += 1
            most = max(most, inside)
            try:
                for _ in range(draw.randrange(4)):
                    await asyncio.sleep(0)
            finally:
                inside -= 1

    for _ in range(200):
        tasks = [asyncio.create_task(request(draw.choice("abc"))) for _ in range(draw.randrange(1, 30))]
        for _ in range(draw.randrange(8)):
            await asyncio.sleep(0)
            draw.choice(tasks).cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task
        assert inside == 0
        assert turns._free == 3
        assert not turns._waiting
    assert most == 3


async def test_request_cancelled_at_the_moment_of_its_turn_passes_the_turn_to_the_next_request() -> None:
    turns, served = Turns(1), list[int]()

    async def request(number: int) -> None:
        async with turns:
            served.append(number)

    await turns.__aenter__()
    first, second = asyncio.create_task(request(1)), asyncio.create_task(request(2))
    await asyncio.sleep(0)
    await turns.__aexit__()  # gives the place to the first
    first.cancel()
    await second
    assert first.cancelled()
    assert served == [2]
