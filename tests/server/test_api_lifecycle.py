"""Loading, failing, overload, disconnects: nothing is lost, nothing stays allocated."""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
import subprocess
import sys
import textwrap
from typing import Any

import httpx
import openai
import pytest
import uvloop
from engines import Held, Loading
from invariants import check_invariants
from serving import PATIENCE

from tonnage.cache.admission import AdmissionMode, Policy
from tonnage.planner.errors import DoesNotFit
from tonnage.server.app import create_app
from tonnage.server.commands.serve import ACCEPTED_A_ROUND, accepting, listen
from tonnage.server.engines.fake import FakeEngine
from tonnage.server.engines.stats import EngineStats
from tonnage.server.engines.supervisor import SupervisedEngine
from tonnage.server.requests.accounts import Ticket
from tonnage.server.security.tenants import Tenant
from tonnage.server.settings import Settings


class RawClient:
    """A request on a bare socket, so that the test decides when the client is gone."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self._writer = reader, writer

    @classmethod
    async def post(
        cls, url: str, body: dict[str, Any], send: int | None = None, request_id: str = "raw"
    ) -> RawClient:
        """Send a completion request, or only the first ``send`` bytes of its body."""
        host, port = url.removeprefix("http://").split(":")
        client = cls(*await asyncio.open_connection(host, int(port)))
        data = json.dumps({"model": "demo", "prompt": "hello"} | body).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            f"X-Request-Id: {request_id}\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        client._writer.write(head.encode() + data[:send])
        await client._writer.drain()
        return client

    def kill(self) -> None:
        """Reset the connection, as a killed process does."""
        self._writer.transport.abort()


async def test_health_responds_while_the_model_loads(run_server, small_plan) -> None:
    engine = Loading(small_plan())
    async with run_server(engine, ready=False) as server:
        assert (await server.http.get("/health")).status_code == 200
        response = await server.http.get("/ready")
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "model_loading"
        assert int(response.headers["retry-after"]) >= 1
        response = await server.complete()
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "model_loading"
        assert (await server.http.get("/memory")).json()["ready"] is False
        assert "tonnage_engine_ready{" in (await server.http.get("/metrics")).text
        assert (await server.http.get("/v1/models/demo")).status_code == 200
        engine.loaded.set()
        await server.until(lambda: server.state.started)
        assert (await server.http.get("/ready")).status_code == 200
        assert (await server.complete()).status_code == 200


async def test_openai_sdk_retries_while_the_model_loads(run_server, small_plan) -> None:
    engine = Loading(small_plan())
    async with run_server(engine, ready=False) as server:
        client = server.openai.with_options(max_retries=5)
        asked = asyncio.create_task(client.completions.create(model="demo", prompt="hi", max_tokens=2))
        async with asyncio.timeout(PATIENCE):
            while not server.state.accounts.outcomes["rejected"]:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        engine.loaded.set()
        assert (await asked).usage.completion_tokens == 2


async def test_failed_engine_start_is_reported_and_stops_the_engine(small_plan, tokenizer) -> None:
    told: list[Exception] = []
    error = DoesNotFit("needs 5 GiB, has 1 GiB")
    engine = FakeEngine(small_plan(), start_error=error)
    app = create_app(Settings(model="demo"), engine, tokenizer, on_startup_error=told.append)
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            async with asyncio.timeout(PATIENCE):
                while not told:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
            assert told == [error]
            assert app.state.tonnage.startup_error is error
            assert (await http.get("/health")).status_code == 200
            for response in (await http.get("/ready"), await http.post("/v1/completions", json={})):
                assert response.status_code in (400, 503)
            assert (await http.get("/ready")).json()["error"]["code"] == "engine_dead"


async def test_server_can_be_stopped_while_the_model_loads(small_plan, tokenizer) -> None:
    app = create_app(Settings(model="demo"), FakeEngine(small_plan(), load_seconds=60), tokenizer)
    async with asyncio.timeout(PATIENCE), app.router.lifespan_context(app):
        await asyncio.sleep(0.01)
    assert app.state.tonnage.startup_error is None


async def test_engine_death_ends_every_request_with_an_error(run_server, small_plan) -> None:
    async with run_server(FakeEngine(small_plan(), token_rate=100)) as server:
        whole = asyncio.create_task(server.complete(max_tokens=1000))
        async with server.http.stream(
            "POST", "/v1/completions", json={"model": "demo", "prompt": "a", "max_tokens": 1000, "stream": True}
        ) as response:
            assert response.status_code == 200
            await server.until(lambda: server.engine.stats().running == 2)
            server.engine.die()
            lines = [line async for line in response.aiter_lines() if line]
        # After the first chunk: an error event, then the end.
        assert lines[-1] == "data: [DONE]"
        error = json.loads(lines[-2].removeprefix("data: "))["error"]
        assert error["code"] == "engine_dead"
        assert (await whole).status_code == 503
        assert "retry-after" in (await whole).headers
        for stream in (False, True):
            response = await server.complete(stream=stream)
            assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_dead")
        assert (await server.http.get("/ready")).status_code == 503
        assert (await server.http.get("/health")).status_code == 200
        assert server.state.accounts.outcomes["error"] == 4


async def read_and_kill(stream: openai.AsyncStream[Any], engine: FakeEngine) -> None:
    async for _ in stream:
        engine.die()


async def test_openai_sdk_raises_on_a_streamed_error_event(run_server, small_plan) -> None:
    async with run_server(FakeEngine(small_plan(), token_rate=100)) as server:
        stream = await server.openai.completions.create(model="demo", prompt="a", max_tokens=1000, stream=True)
        with pytest.raises(openai.APIError, match="engine process ended"):
            await read_and_kill(stream, server.engine)


async def test_request_to_a_server_with_a_full_queue_is_rejected_with_retry_after(
    run_server, small_plan
) -> None:
    engine = Held(small_plan(), token_rate=200)
    async with run_server(engine, max_num_queued_reqs=4) as server:
        long = [asyncio.create_task(server.complete(max_tokens=100)) for _ in range(2)]
        await server.until(lambda: engine.stats().running == 2)
        engine.held = True
        for body in ({"n": 3}, {"prompt": ["a", "b", "c"]}, {"n": 3, "stream": True}):
            response = await server.complete(max_tokens=2, **body)
            assert (response.status_code, response.json()["error"]["code"]) == (503, "server_overloaded")
            assert int(response.headers["retry-after"]) >= 1
            assert int(response.headers["retry-after-ms"]) >= 1
            assert response.headers["x-should-retry"] == "true"
        # What can never be queued is refused for good, however empty the queue is.
        response = await server.complete(max_tokens=2, n=5)
        assert (response.status_code, response.headers["x-should-retry"]) == (400, "false")
        engine.held = False
        assert (await server.complete(max_tokens=2, n=2)).status_code == 200
        # The SDK comes back by itself and gets its answer.
        client = server.openai.with_options(max_retries=8)
        await asyncio.gather(*(
            client.completions.create(model="demo", prompt="a", max_tokens=20) for _ in range(8)
        ))  # fmt: skip
        assert [(await task).status_code for task in long] == [200, 200]
        assert server.state.accounts.refused["wait", "max_num_queued_reqs"] >= 3


async def test_completions_and_ready_requests_do_not_query_engine_statistics(run_server, small_plan) -> None:
    asked = 0

    class Counted(FakeEngine):
        def stats(self) -> EngineStats:
            nonlocal asked
            asked += 1
            return super().stats()

    engine = Counted(small_plan())
    async with run_server(engine, served=SupervisedEngine(lambda: engine)) as server:
        before = asked
        assert (await server.complete(max_tokens=2)).status_code == 200
        assert (await server.http.get("/ready")).status_code == 200
        assert asked == before


def test_several_connections_are_accepted_per_event_loop_iteration() -> None:
    rounds, accepted = 0, list[int]()

    class Connection(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            accepted.append(rounds)
            transport.close()

    async def burst() -> None:
        nonlocal rounds
        loop, sock = asyncio.get_running_loop(), listen("127.0.0.1", 0)
        clients = [socket.create_connection(sock.getsockname()) for _ in range(64)]
        servers = [await loop.create_server(Connection, sock=one) for one in accepting(sock)]
        while len(accepted) < 64:
            rounds += 1
            await asyncio.sleep(0)
        for closed in (*clients, *servers):
            closed.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(burst(), PATIENCE))
    assert len(set(accepted)) <= 2 * 64 // ACCEPTED_A_ROUND  # uvloop alone: in each of 64 rounds one


async def test_requests_that_wait_for_kv_blocks_are_all_completed(run_server, small_plan) -> None:
    engine = FakeEngine(small_plan(33, max_model_len=256), token_rate=2000)  # 32 blocks: four at a time
    async with run_server(engine) as server:
        responses = await asyncio.gather(*(server.complete(prompt=[i] * 64, max_tokens=64) for i in range(24)))
        assert {response.status_code for response in responses} == {200}
        decisions = {(outcome, reason): count for outcome, reason, count in engine.stats().admissions}
        assert decisions["admit", "fits"] == 24
        assert decisions["wait", "blocks"] >= 1


async def test_all_kv_blocks_are_free_after_50_streaming_clients_are_killed(run_server, small_plan) -> None:
    # 2,000 tokens at 20 a second would take 100 s: what is free after the kill was freed by the kill.
    engine = FakeEngine(small_plan(16384, max_num_seqs=75), token_rate=20)
    async with run_server(engine) as server:
        clients = [
            await RawClient.post(server.url, {"max_tokens": 2000, "n": 1 + number % 2, "stream": True})
            for number in range(50)
        ]
        for client in clients:  # two events each: all are in the middle of their answers
            await client.reader.readuntil(b"data: ")
            await client.reader.readuntil(b"data: ")
        await server.until(lambda: engine.stats().running == 75)
        await server.until(lambda: engine.stats().pool.used >= 75)  # a fork shares at first
        for client in clients:
            client.kill()
        await server.until(lambda: engine.stats().running == 0)
        stats = engine.stats()
        assert (stats.pool.used, stats.pool.reserved) == (0, 0)
        assert stats.pool.cached + stats.pool.free == stats.pool.usable
        await server.until(lambda: server.state.accounts.outcomes["aborted"] == 50)
        assert (await server.complete(max_tokens=2)).status_code == 200


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("more", [{}, {"n": 3}, {"prompt": ["a", "b", "c"]}], ids=["one", "n", "prompts"])
async def test_kv_blocks_of_a_disconnected_client_are_freed(
    run_server, small_plan, stream: bool, more: dict[str, Any]
) -> None:
    engine = FakeEngine(small_plan(1024), token_rate=20)
    async with run_server(engine) as server:
        client = await RawClient.post(server.url, {"max_tokens": 2000, "stream": stream} | more)
        await server.until(lambda: engine.stats().running == (3 if more else 1))
        client.kill()
        await server.until(lambda: server.state.accounts.outcomes["aborted"] == 1)
        stats = engine.stats()
        assert (stats.running, stats.pool.used, stats.pool.reserved) == (0, 0, 0)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_disconnect_while_queued_or_uploading_counts_as_aborted(
    run_server, small_plan, stream: bool
) -> None:
    engine = FakeEngine(small_plan(128, max_num_seqs=1), token_rate=20)
    async with run_server(engine) as server:
        body = {"max_tokens": 1000, "stream": stream}
        first = await RawClient.post(server.url, body)
        await server.until(lambda: engine.stats().running == 1)
        second = await RawClient.post(server.url, body)
        await server.until(lambda: engine.stats().waiting == 1)
        second.kill()
        await server.until(lambda: engine.stats().waiting == 0)
        assert engine.stats().running == 1
        third = await RawClient.post(server.url, body, send=20)
        await server.until(lambda: server.state.accounts.received == 3)
        third.kill()
        await server.until(lambda: server.state.accounts.outcomes["aborted"] == 2)
        first.kill()
        await server.until(lambda: server.state.accounts.outcomes["aborted"] == 3)


async def test_every_received_request_has_exactly_one_outcome_under_overload(
    run_server, small_plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """received = finished + aborted + rejected + errored + in flight, at every moment and at the end."""
    policy = Policy(AdmissionMode.NO_EVICT)  # by its rule the reservations fit
    engine = FakeEngine(small_plan(65, max_model_len=512), token_rate=500, policy=policy)
    draw = random.Random(0)
    sent = {"ok": 0, "bad": 0, "never": 0, "killed": 0}
    done = asyncio.Event()
    received: set[str] = set()
    async with run_server(engine, max_num_queued_reqs=24) as server:
        receive = server.state.accounts.receive

        def recorded(endpoint: str, request_id: str, tenant: Tenant) -> Ticket:
            received.add(request_id)
            return receive(endpoint, request_id, tenant)

        monkeypatch.setattr(server.state.accounts, "receive", recorded)

        async def watch() -> None:
            while not done.is_set():
                server.state.accounts.check()
                stats = engine.stats()
                assert stats.pool.used <= stats.pool.reserved <= stats.pool.usable
                await asyncio.sleep(0.005)

        async def client() -> None:
            for _ in range(12):
                kind = draw.choices(list(sent), (5, 1, 1, 3))[0]
                sent[kind] += 1
                stream = draw.random() < 0.5
                if kind == "ok":
                    response = await server.complete(prompt=[7] * 32, max_tokens=32, n=2, stream=stream)
                    assert response.status_code in (200, 503)
                elif kind == "bad":
                    assert (await server.complete(temperature=9, stream=stream)).status_code == 400
                elif kind == "never":
                    assert (await server.complete(max_tokens=4000, stream=stream)).status_code == 400
                else:
                    body = {"prompt": [7] * 32, "max_tokens": 400, "stream": stream}
                    name = f"killed-{sent['killed']}"
                    victim = await RawClient.post(server.url, body, request_id=name)
                    # a request whose client is gone before its turn never starts, and is not counted
                    await server.until(lambda name=name: name in received)
                    await asyncio.sleep(draw.random() / 20)
                    victim.kill()

        watcher = asyncio.create_task(watch())
        await asyncio.gather(*(client() for _ in range(24)))
        await server.until(lambda: server.state.accounts.in_flight == 0)
        done.set()
        await watcher
        accounts = server.state.accounts
        assert accounts.received == sum(sent.values()) == 24 * 12
        assert sum(accounts.outcomes.values()) == accounts.received
        assert accounts.outcomes["error"] == 0
        assert accounts.outcomes["rejected"] > sent["bad"] + sent["never"]  # the queue was full at times
        assert 0 < accounts.outcomes["aborted"] <= sent["killed"]
        assert accounts.outcomes["length"] > 0
        check_invariants(engine.manager)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_requests_aborted_by_a_server_shutdown_are_counted(
    run_server, small_plan, stream: bool, capsys
) -> None:
    engine = FakeEngine(small_plan(), token_rate=20)
    async with run_server(engine, grace=1) as server:
        client = await RawClient.post(server.url, {"max_tokens": 1000, "stream": stream})
        await server.until(lambda: engine.stats().generation_tokens >= 2)
    answer = (await client.reader.read()).decode()
    assert answer.startswith("HTTP/1.1 200" if stream else "HTTP/1.1 503")
    assert "server_stopping" in answer
    assert server.state.accounts.outcomes["error"] == 1
    assert "Traceback" not in capsys.readouterr().err  # an orderly stop is no error in the log


async def test_openapi_document_has_only_valid_references_and_forbids_unknown_fields(server) -> None:
    document = (await server.http.get("/openapi.json")).json()
    text = json.dumps(document)
    for name in re.findall(r'"\$ref": "([^"]+)"', text):
        where = document
        for part in name.removeprefix("#/").split("/"):
            where = where[part]
    body = document["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body["additionalProperties"] is False
    assert body["properties"]["stream_options"]["anyOf"][0]["properties"].keys() == {
        "include_usage",
        "continuous_usage_stats",
    }


async def test_two_server_apps_in_one_process_are_independent(run_server, small_plan) -> None:
    async with (
        run_server(FakeEngine(small_plan()), served_model_name="one") as one,
        run_server(FakeEngine(small_plan(64)), served_model_name="two") as two,
    ):
        assert (await one.complete(model="one")).status_code == 200
        assert (await two.complete(model="one")).status_code == 404
        assert (one.state.accounts.outcomes["length"], two.state.accounts.outcomes["length"]) == (1, 0)
        assert 'model="two"' not in (await one.http.get("/metrics")).text
        await two.complete(model="two")


def test_api_process_imports_no_torch(small_plan) -> None:
    code = """
        import asyncio, sys
        import httpx
        from tonnage.planner.planning.build import make_plan
        from tonnage.server.app import create_app
        from tonnage.server.engines.fake import FakeEngine
        from tonnage.server.settings import Settings

        async def main():
            settings = Settings(model="demo", kv_cache_memory_bytes="64MiB", max_model_len=512)
            app = create_app(settings, FakeEngine(make_plan("demo", settings.deployment())))
            async with app.router.lifespan_context(app):
                async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://t") as http:
                    while (await http.get("/ready")).status_code != 200:
                        await asyncio.sleep(0.01)
                    body = {"model": "demo", "prompt": "hi", "max_tokens": 4}
                    for stream in (False, True):
                        response = await http.post("/v1/completions", json=body | {"stream": stream})
                        assert response.status_code == 200, response.text
                    for path in ("/metrics", "/memory", "/v1/models"):
                        assert (await http.get(path)).status_code == 200
            print(sorted({"torch", "transformers", "vllm"} & set(sys.modules)))

        asyncio.run(main())
    """
    out = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert out.stdout.strip() == "[]", out.stderr
