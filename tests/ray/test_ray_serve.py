"""The Ray Serve application on a real local cluster: two replicas of the hf engine with the demo model.

``make test-ray`` has the environment (Ray pins what the other tests cannot have).
"""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest

ray = pytest.importorskip("ray", reason="Ray has its own environment: make test-ray")

from ray import serve  # noqa: E402
from ray.serve._private.common import RequestMetadata  # noqa: E402
from ray.serve.request_router import PendingRequest  # noqa: E402

from tonnage.planner.deployment import Deployment  # noqa: E402
from tonnage.planner.errors import DeploymentError, DoesNotFit, TonnageError  # noqa: E402
from tonnage.planner.planning.build import make_plan  # noqa: E402
from tonnage.server.ray.app import ClusterOptions, build, placement, replicas_wanted  # noqa: E402
from tonnage.server.ray.router import MAX_QUEUE_LEAD, Headroom, PrefixHeadroomRouter, PrefixMemory, chain, order  # noqa: E402

PORT = 8465
URL = f"http://127.0.0.1:{PORT}"
BLOCKS = "256MiB"
RUNNING, TOKENS = "tonnage_engine_requests{", "tonnage_generation_tokens_total"
PATIENCE = 240.0  # as in tests/helpers/serving.py, which this environment has not all of
get, post = functools.partial(httpx.get, timeout=PATIENCE), functools.partial(httpx.post, timeout=PATIENCE)


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(num_cpus=4, include_dashboard=False, _node_ip_address="127.0.0.1", object_store_memory=100 * 2**20)
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    args = {"model": "demo", "replicas": 2, "cpus_per_replica": 1, "kv_cache_memory_bytes": BLOCKS}
    try:
        serve.run(build(args), name="tonnage", route_prefix="/")
        _wait_for_replicas(2)
        yield URL
    finally:
        serve.shutdown()
        ray.shutdown()


def _replicas() -> dict[str, str]:
    """replica id -> address of its own page."""
    return {each["labels"]["replica"]: each["targets"][0] for each in get(f"{URL}/replicas").json()}


def _wait_for_replicas(count: int, before: Collection[str] = ()) -> dict[str, str]:
    """Wait for the replicas to differ from ``before``; a dead replica stays listed for a second."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        if get(f"{URL}/ready").status_code == 200:
            found = _replicas()
            if len(found) == count and found.keys() != set(before):
                return found
        time.sleep(0.5)
    raise AssertionError(f"not {count} replicas after {PATIENCE:g} s: {_replicas()}")


def _metric(address: str, start: str, label: str = "") -> float:
    page = get(f"http://{address}/metrics").text
    values = [line.rsplit(" ", 1)[1] for line in page.splitlines() if line.startswith(start) and label in line]
    assert values, f"no {start} with {label} on {address}"
    return sum(float(value) for value in values)


def _all_run(addresses: Collection[str]) -> bool:
    return all(_metric(address, RUNNING, 'state="running"') for address in addresses)


async def _ask(client: openai.AsyncOpenAI, prompt: str, max_tokens: int = 8) -> str:
    answer = await client.completions.create(
        model="demo", prompt=prompt, max_tokens=max_tokens, temperature=0, stream=True
    )
    return "".join([chunk.choices[0].text async for chunk in answer if chunk.choices])


def _client() -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="-", max_retries=0, timeout=PATIENCE)


async def test_both_ray_replicas_answer_and_expose_metrics(cluster: str) -> None:
    before = {key: _metric(at, TOKENS) for key, at in _wait_for_replicas(2).items()}
    async with _client() as client:
        answers = await asyncio.gather(*(_ask(client, f"Number {i} is a number that") for i in range(12)))
        assert all(answers)
        same = await asyncio.gather(*(_ask(client, "The capital of France is") for _ in range(2)))
        assert same[0] == same[1]
    replicas = _wait_for_replicas(2)
    assert replicas.keys() == before.keys()
    written = {key: _metric(at, TOKENS) - before[key] for key, at in replicas.items()}
    assert min(written.values()) > 0, f"one replica did nothing: {written}"
    for address in replicas.values():  # each page has its own memory beside its own plan
        planned = _metric(address, "tonnage_memory_planned_bytes{", 'component="weights"')
        assert _metric(address, "tonnage_memory_measured_bytes{", 'component="weights"') == planned > 0


async def test_request_is_routed_to_the_replica_that_caches_its_prefix(cluster: str) -> None:
    long = "It was a bright cold day in April, and the clocks were striking thirteen. " * 20
    async with _client() as client:
        for question in ("Who?", "When?", "Where?", "Why?"):
            usage = (await client.completions.create(model="demo", prompt=long + question, max_tokens=1)).usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens is not None
    assert usage.prompt_tokens_details.cached_tokens > 0.9 * usage.prompt_tokens


def test_http_page_of_a_ray_replica_rejects_generation_and_endless_headers(cluster: str) -> None:
    """They would pass by the API's queue and quotas, and wait for no end."""
    for address in _wait_for_replicas(2).values():
        assert get(f"http://{address}/ready").status_code == 200
        body = {"model": "demo", "prompt": "Hi", "max_tokens": 2}
        for route in ("completions", "chat/completions", "responses"):
            assert post(f"http://{address}/v1/{route}", json=body).status_code == 404
        assert post(f"http://{address}/tokenize", json=body).status_code == 404
        assert get(f"http://{address}/metrics", headers={"x-long": "a" * 70_000}).status_code == 431


async def test_ray_server_rejects_a_request_that_can_never_fit_with_numbers(cluster: str) -> None:
    async with _client() as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.completions.create(model="demo", prompt=[1] * 8000, max_tokens=8000)
    assert "8000" in str(refused.value) or "16000" in str(refused.value)


async def test_requests_of_a_killed_ray_replica_fail_and_the_replica_is_replaced(cluster: str) -> None:
    before = _wait_for_replicas(2)
    async with _client() as client:
        asked = [asyncio.create_task(_ask(client, f"Story {i}: once upon a time", 200)) for i in range(16)]
        async with asyncio.timeout(PATIENCE):
            while not await asyncio.to_thread(_all_run, before.values()):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        victim = min(_engine_processes())
        os.kill(victim, signal.SIGKILL)
        ended = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), PATIENCE)
    failed = [each for each in ended if isinstance(each, BaseException)]
    assert all(isinstance(each, openai.APIError) for each in failed), failed
    assert failed, "no request failed although a replica died"
    assert len(failed) < len(ended), "the other replica's requests died too"
    _wait_for_replicas(2, before)
    async with _client() as client:
        assert await _ask(client, "And now")


def _engine_processes() -> list[int]:
    """Ray's worker processes that run an engine replica."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if b"ServeReplica:tonnage:engine" in name:
            found.append(int(folder.name))
    return found


def test_router_matches_prefixes_from_the_first_chunk_and_forgets_the_oldest_prefixes() -> None:
    memory = PrefixMemory(size=3)
    first, second = chain(tuple(range(256)), ""), chain((*range(128), *range(500, 628)), "")
    assert len(first) == 4
    assert first[:2] == second[:2]
    assert first[2] != second[2]
    memory.remember(first[:3], "a")
    assert memory.matched(second) == {"a": 2}
    memory.remember(
        second[2:], "b"
    )  # two more: the first chunk is forgotten, so nothing matches from the start
    assert memory.matched(first) == {}
    assert chain(tuple(range(256)), "salt") != first


def test_router_prefers_prefix_then_headroom_then_shorter_queue() -> None:
    queues, headroom = {"a": 2, "b": 0}, {"a": 10.0, "b": 500.0}
    assert order({"a": 3}, queues, headroom) == ["a", "b"]
    assert order({}, queues, headroom) == ["b", "a"]
    assert order({}, queues, {}) == ["b", "a"]
    assert order({}, queues, {"a": 9.0}) == ["b", "a"]  # b has just started: its report is not yet here
    assert order({}, {"a": 0, "b": 1}, {"a": 9.0}) == ["a", "b"]
    assert order({"a": 3}, {"a": MAX_QUEUE_LEAD + 1, "b": 0}, headroom) == ["b", "a"]


def test_burst_of_requests_between_two_replica_reports_is_spread_over_the_replicas() -> None:
    headroom, sent = Headroom(), {"a": 0, "b": 0}
    reports = {
        key: {"headroom_blocks": blocks, "block_size": 16, "number": 1}
        for key, blocks in (("a", 99), ("b", 90))
    }
    for _ in range(16):
        chosen = order({}, sent, headroom.blocks(reports))[0]
        headroom.sent(chosen, 208)
        sent[chosen] += 1
    assert sent == {"a": 8, "b": 8}
    assert headroom.blocks(reports) == {"a": 99 - 8 * 13, "b": 90 - 8 * 13}
    reports["a"] = {"headroom_blocks": 0, "block_size": 16, "number": 2}
    assert headroom.blocks({**reports, "c": {}}) == {"a": 0, "b": 90 - 8 * 13}


async def test_router_counts_a_request_for_its_replica_from_the_choice_until_its_end() -> None:
    """Ray chooses for all requests of a burst before it reports the first of them as routed."""
    router = PrefixHeadroomRouter.__new__(PrefixHeadroomRouter)
    router.initialize_state()
    replicas: list[Any] = [
        SimpleNamespace(replica_id=SimpleNamespace(unique_id=key), routing_stats={}) for key in ("a", "b")
    ]

    async def first(pending: PendingRequest) -> str:
        best, _ = await router.choose_replicas(replicas, pending)
        return str(best[0].replica_id.unique_id)

    burst = [PendingRequest([], {}, RequestMetadata(str(i), str(i))) for i in range(16)]
    chosen = [await first(pending) for pending in burst]
    assert (chosen.count("a"), chosen.count("b")) == (8, 8)
    for pending, key in zip(burst, chosen, strict=True):
        if key == "b":
            pending.future.cancel()
    await asyncio.sleep(0)
    assert await first(PendingRequest([], {}, RequestMetadata("x", "x"))) == "b"
    for pending, key in zip(burst, chosen, strict=True):
        if key == "a":
            router.on_request_completed(replicas[0].replica_id, pending.metadata.internal_request_id)
    assert await first(PendingRequest([], {}, RequestMetadata("y", "y"))) == "a"


class _Context:
    def __init__(self, replicas: int, waiting: list[float], reserved: list[float]) -> None:
        self.current_num_replicas = replicas
        self.aggregated_metrics = {
            "waiting": dict(enumerate(waiting)),
            "promised_share": dict(enumerate(reserved)),
        }


def test_autoscaling_adds_replicas_for_waiting_requests_and_removes_them_only_with_headroom() -> None:
    assert replicas_wanted(_Context(1, [9], [1.0]))[0] == 3  # type: ignore[arg-type]
    assert replicas_wanted(_Context(2, [4, 4], [1.0, 1.0]))[0] == 2  # type: ignore[arg-type]
    assert replicas_wanted(_Context(2, [0, 0], [0.3, 0.3]))[0] == 1  # type: ignore[arg-type]
    assert replicas_wanted(_Context(2, [0, 0], [0.5, 0.5]))[0] == 2  # type: ignore[arg-type]
    assert replicas_wanted(_Context(1, [0], [0.0]))[0] == 1  # type: ignore[arg-type]


def test_ray_replica_reserves_the_resources_of_its_plan() -> None:
    plan = make_plan("demo", Deployment(kv_cache_memory_bytes=2**28))
    options = placement(plan, ClusterOptions(cpus_per_replica=2))["ray_actor_options"]
    assert options == {"num_cpus": 2, "memory": plan.rank.used_bytes}


@pytest.mark.parametrize(
    ("args", "error"),
    [
        ({"model": "demo", "replicas": 0}, DeploymentError),
        ({"model": "demo", "replicas": 4, "max_replicas": 2}, DeploymentError),
        ({"model": "demo", "no_such_setting": 1}, DeploymentError),
        ({"model": "no/such/folder/here"}, TonnageError),
        ({"model": "demo", "device_memory": "300MiB"}, DoesNotFit),
    ],
)
def test_invalid_arguments_are_rejected_before_any_ray_replica_starts(
    args: dict[str, object], error: type[TonnageError]
) -> None:
    with pytest.raises(error):
        build(dict(args))
