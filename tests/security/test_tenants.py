"""Isolation of tenants: limits on what one tenant's key may do to the others."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tonnage.server.engines.base import Capabilities
from tonnage.server.engines.fake import FakeEngine
from tonnage.server.engines.request import BASIC_PARAMS, GenerationRequest
from tonnage.server.errors import ApiError
from tonnage.server.http.turns import Turns
from tonnage.server.security import rejection_limits
from tonnage.server.security.keys import load_keys
from tonnage.server.security.tenants import Quotas, Tenant
from tonnage.server.text.tokenizer import Tokenizer

ALICE, BOB, WATCH = "key-of-alice-in-the-tests", "key-of-bob-in-the-tests", "key-that-watches-the-tests"


def key_file(folder: Path, *keys: dict[str, Any]) -> Path:
    path = folder / "keys.toml"
    lines = [
        "\n".join(["[[key]]", *(f"{name} = {json.dumps(value)}" for name, value in key.items())])
        for key in keys
    ]
    path.write_text("\n\n".join(lines), encoding="utf-8")
    return path


def bearer(key: str | bytes) -> dict[bytes, bytes]:
    return {b"authorization": b"Bearer " + (key if isinstance(key, bytes) else key.encode())}


class Asked:
    """A reply of one token a sequence, and the requests it was asked for."""

    def __init__(self) -> None:
        self.requests: list[GenerationRequest] = []

    def __call__(self, request: GenerationRequest, index: int) -> Iterator[int]:
        self.requests.append(request)
        return iter((7,) * 100)


class Ordered(FakeEngine):
    """It lets clients name a priority, as hf and vLLM do."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(honours=BASIC_PARAMS | {"priority"})


async def test_cache_salts_of_tenants_never_collide(run_server, small_plan, tmp_path) -> None:
    """Sharing keys and salted keys, without and with salts of their own that look like another's."""
    path = key_file(
        tmp_path,
        {"name": "alice", "key": ALICE},
        {"name": "bob", "key": BOB, "share_prefixes": True},
        {"name": "carol", "key": WATCH, "share_prefixes": True},
    )
    async with run_server(FakeEngine(small_plan(1024)), api_key_file=path) as server:

        async def cached(key: str, **more: Any) -> int:
            body = {"model": "demo", "prompt": [7] * 64, "max_tokens": 2, **more}
            answer = await server.http.post("/v1/completions", json=body, headers=bearer(key))
            return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert [await cached(ALICE), await cached(ALICE)] == [0, 48]
        for salt in ("alice/", "alice", "/alice/", "/"):
            assert await cached(BOB, cache_salt=salt) == 0, salt
        assert await cached(ALICE, cache_salt="x") == 0
        assert await cached(BOB, cache_salt="alice/x") == 0
        # Sharing keys share as before: prompts without a salt, and prompts of the same salt.
        assert [await cached(BOB), await cached(WATCH)] == [0, 48]
        assert [await cached(BOB, cache_salt="y"), await cached(WATCH, cache_salt="y")] == [0, 48]


async def test_api_keys_take_turns_at_encoding_long_texts(
    run_server, small_plan, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six texts of one key are there before one text of another, of which two are encoded at a time."""
    begun, came, all_here = list[str](), asyncio.Semaphore(0), threading.Event()
    enter, encode = Turns.__aenter__, Tokenizer.encode_all

    async def counted(turns: Turns) -> None:
        came.release()
        await enter(turns)

    def waiting(tokenizer: Tokenizer, texts: list[str], *more: Any) -> list[list[int]]:
        begun.append(texts[0][0])
        assert all_here.wait(60)
        return encode(tokenizer, texts, *more)

    monkeypatch.setattr(Turns, "__aenter__", counted)
    monkeypatch.setattr(Tokenizer, "encode_all", waiting)
    path = key_file(tmp_path, {"name": "alice", "key": ALICE}, {"name": "bob", "key": BOB})
    async with run_server(FakeEngine(small_plan()), api_key_file=path) as server, asyncio.TaskGroup() as tasks:

        async def tokenize(key: str, letter: str) -> None:
            answer = await server.http.post(
                "/tokenize", json={"prompt": f"{letter} " * 10_000}, headers=bearer(key), timeout=60
            )
            assert answer.status_code == 200

        for key, letter in [*[(ALICE, "a")] * 6, (BOB, "b")]:
            tasks.create_task(tokenize(key, letter))
            await came.acquire()
        all_here.set()
    assert "".join(begun) in ("aaabaaa", "aabaaaa")


async def test_request_priority_cannot_exceed_that_of_its_key(
    run_server, small_plan, tmp_path, checked
) -> None:
    asked = Asked()
    path = key_file(tmp_path, {"name": "a", "key": ALICE}, {"name": "b", "key": BOB, "priority": -5})
    async with run_server(Ordered(small_plan(), reply=asked), api_key_file=path) as server:

        async def ask(key: str, **more: Any) -> httpx.Response:
            body = {"model": "demo", "prompt": "a", "max_tokens": 1} | more
            return await server.http.post("/v1/completions", json=body, headers=bearer(key))

        for key, priority, lowest in ((ALICE, -1000, 0), (ALICE, -1, 0), (BOB, -6, -5)):
            error = checked(await ask(key, priority=priority))
            assert (error.code, error.param) == ("invalid_value", "priority")
            assert f"{lowest} or more" in error.message
        assert asked.requests == []
        for key, more in ((ALICE, {"priority": 3}), (ALICE, {}), (BOB, {"priority": -5}), (BOB, {})):
            assert (await ask(key, **more)).status_code == 200
        assert [request.priority for request in asked.requests] == [3, 0, -5, -5]


async def test_single_api_key_holds_at_most_half_of_the_queue(run_server, small_plan, checked) -> None:
    engine = FakeEngine(small_plan(1024), token_rate=20)
    async with run_server(engine, api_key=(ALICE, BOB), max_num_queued_reqs=8) as server:

        async def ask(key: str, **more: Any) -> httpx.Response:
            body = {"model": "demo", "prompt": "a", "max_tokens": 2000, "ignore_eos": True} | more
            return await server.http.post("/v1/completions", json=body, headers=bearer(key))

        error = checked(await ask(ALICE, n=5))
        assert (error.code, "may have 4" in error.message) == ("insufficient_quota", True)
        tasks = [asyncio.create_task(ask(ALICE, n=4))]
        await server.until(lambda: engine.stats().running == 4)
        error = checked(await ask(ALICE, max_tokens=1))
        assert error.code == "rate_limit_exceeded"
        assert (await ask(BOB, max_tokens=1)).status_code == 200
        tasks.append(asyncio.create_task(ask(BOB, n=2)))
        await server.until(lambda: engine.stats().running == 6)
        assert checked(await ask(BOB, max_tokens=1)).code == "rate_limit_exceeded"
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.until(lambda: engine.stats().running == 0 and server.state.accounts.in_flight == 0)
    async with run_server(FakeEngine(small_plan()), api_key=(ALICE,), max_num_queued_reqs=8) as server:
        body = {"model": "demo", "prompt": "a", "max_tokens": 1, "n": 8}  # alone it has all of it
        answer = await server.http.post("/v1/completions", json=body, headers=bearer(ALICE))
        assert answer.status_code == 200


@pytest.mark.parametrize("queue", [1, 2, 3, 7, 512])
def test_queue_always_keeps_a_place_free_for_one_more_tenant(queue: int) -> None:
    """Let greedy tenants take as much of the queue as they can, one after another.

    The free places run out only when every place belongs to another tenant.
    """
    quotas, queued, takers = Quotas(tenants=1000), 0, 0
    while queued < queue:
        tenant, held = Tenant(f"t{takers}"), 0
        takers += 1
        while queued < queue:
            try:
                quotas.check_share(tenant, 1, queued, queue, 1.0)
            except ApiError:
                break
            quotas.enter(tenant, 1, 1, 1.0)
            held, queued = held + 1, queued + 1
        assert held >= 1
        assert held <= max(1, queue - queued)
    limited = Tenant("limited", max_num_seqs=queue)  # the operator's own figure stands
    quotas.check_share(limited, queue, 0, queue, 1.0)


async def test_metrics_of_all_tenants_require_a_metrics_key(run_server, small_plan, tmp_path, checked) -> None:
    path = key_file(tmp_path, {"name": "a", "key": ALICE}, {"name": "watch", "key": WATCH, "metrics": True})
    async with run_server(FakeEngine(small_plan()), api_key_file=path) as server:
        for page in ("/metrics", "/metrics/vllm"):
            error = checked(await server.http.get(page, headers=bearer(ALICE)))
            assert (error.code, "metrics = true" in error.message) == ("permission_denied", True)
        for key in (ALICE, WATCH):
            report = (await server.http.get("/memory", headers=bearer(key))).json()
            told = report["requests"], report["drain_seconds"], report["headroom"]["requests"]
            assert [part is None for part in told] == [key == ALICE] * 3
            load = (await server.http.get("/load", headers=bearer(key))).json()
            assert load.pop("max_num_queued_reqs") > 0
            assert set(load.values()) == {None if key == ALICE else 0}
            page = (await server.http.get("/", headers=bearer(key))).text
            assert ("KV pool" in page, "<dt>drain" in page, "<dt>waiting" in page) == (
                True,
                *[key == WATCH] * 2,
            )
        for path in ("/", "/memory", "/plan/", "/docs", "/openapi.json"):
            assert (await server.http.get(path)).status_code == 401, path
        assert (await server.http.get("/metrics", headers=bearer(WATCH))).status_code == 200
        assert (await server.http.get("/v1/models", headers=bearer(ALICE))).status_code == 200
    async with run_server(FakeEngine(small_plan()), api_key=(ALICE, BOB)) as server:
        assert checked(await server.http.get("/metrics", headers=bearer(BOB))).code == "permission_denied"
    async with run_server(FakeEngine(small_plan()), api_key=(ALICE, BOB), metrics_public=True) as server:
        assert (await server.http.get("/metrics")).status_code == 200


async def test_non_ascii_api_key_is_accepted(run_server, small_plan, tmp_path) -> None:
    # The last character's last byte, A0, is white space in Latin-1, as which headers are read.
    word = "schlüssel-à"
    path = key_file(tmp_path, {"name": "a", "key": word})
    async with run_server(FakeEngine(small_plan()), api_key_file=path) as server:
        assert (await server.http.get("/v1/models", headers=bearer(word))).status_code == 200
        for wrong in (word.encode("latin-1"), word[:-1].encode(), b"\xff\xfe"):
            assert (await server.http.get("/v1/models", headers=bearer(wrong))).status_code == 401
    odd = b"key-\xff-of-the-shell"  # as the environment hands on what is no UTF-8
    assert load_keys((os.fsdecode(odd),), None).tenant(odd) is not None


async def test_rejected_requests_of_one_key_are_rate_limited(run_server, small_plan, monkeypatch) -> None:
    """In the server's time, which the test sets: after a burst each waits for the one before, others do not."""
    slept: list[float] = []
    now = 1000.0

    async def sleep(seconds: float) -> None:
        slept.append(round(seconds, 6))

    monkeypatch.setattr(rejection_limits, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(rejection_limits, "asyncio", SimpleNamespace(sleep=sleep))
    async with run_server(FakeEngine(small_plan()), api_key=(ALICE, BOB)) as server:

        async def refused(key: str, times: int) -> list[float]:
            slept.clear()
            for _ in range(times):
                answer = await server.http.get("/v1/nothing", headers=bearer(key))
                assert answer.status_code == (404 if key in (ALICE, BOB) else 401)
            return list(slept)

        burst, gap = rejection_limits.BURST, 1 / rejection_limits.REJECTIONS_PER_SECOND
        assert await refused(ALICE, burst + 1) == []
        assert await refused(ALICE, 3) == [gap, 2 * gap, 3 * gap]
        assert await refused(BOB, 1) == []
        assert await refused("a wrong key", 1) == []
        answer = await server.http.get("/v1/models", headers=bearer(ALICE))
        assert (answer.status_code, slept) == (200, [])
        monkeypatch.setattr(rejection_limits, "MAX_DELAY_SECONDS", 5 * gap)
        assert max(await refused(ALICE, 10)) <= 5 * gap
        now += 1.0
        assert await refused(ALICE, 1) == []
