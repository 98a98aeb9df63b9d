"""Keys, tenants and their quotas; limits on heads and bodies; ids; what a log line holds."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from serving import PATIENCE

from tonnage.cache.replay.trace import read_trace
from tonnage.planner.errors import DeploymentError
from tonnage.server.engines.fake import FakeEngine
from tonnage.server.http.protocol import MAX_HEAD_BYTES
from tonnage.server.observe.logs import JsonFormatter, TextFormatter
from tonnage.server.security.keys import load_keys
from tonnage.server.settings import load_settings

KEY, OTHER = "first-key-of-the-tests", "second-key-of-the-tests"


def key_file(folder: Path, **limits: Any) -> Path:
    lines = "".join(f"{name} = {json.dumps(value)}\n" for name, value in limits.items())
    path = folder / "keys.toml"
    digest = hashlib.sha256(OTHER.encode()).hexdigest()
    path.write_text(f'[[key]]\nname = "a"\nkey = "{KEY}"\n{lines}\n[[key]]\nname = "b"\nsha256 = "{digest}"\n')
    return path


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_every_route_except_the_probes_requires_an_api_key(run_server, small_plan) -> None:
    async with run_server(FakeEngine(small_plan()), api_key=(KEY,)) as server:
        routes = {route.path: route.methods for route in server.app.routes}
        assert {"/v1/completions", "/tokenize", "/metrics", "/docs", "/openapi.json", "/load"} <= set(routes)
        for path, methods in routes.items():
            for headers in ({}, bearer("wrong-key-of-the-tests"), {"authorization": KEY}):
                method = "POST" if "POST" in methods else "GET"
                response = await server.http.request(method, path, headers=headers)
                if path in ("/health", "/ready", "/ping"):
                    assert response.status_code == 200
                    continue
                assert response.status_code == 401, path
                error = response.json()["error"]
                if path.startswith("/v1/messages"):
                    assert error["type"] == "authentication_error"
                else:
                    assert (error["code"], error["type"]) == ("invalid_api_key", "invalid_request_error")
                assert response.headers["www-authenticate"] == "Bearer"
                assert response.headers["x-should-retry"] == "false"
                assert KEY not in response.text
        assert (await server.http.get("/metrics", headers=bearer(KEY))).status_code == 200
        assert (await server.http.get("/nope", headers=bearer(KEY))).status_code == 404
        client = server.openai.with_options(api_key=KEY)
        assert (await client.completions.create(model="demo", prompt="a", max_tokens=2)).choices
        with pytest.raises(openai.AuthenticationError):
            await server.openai.models.list()
        assert server.state.accounts.received == 1


async def test_metrics_public_setting_makes_metrics_readable_without_a_key(run_server, small_plan) -> None:
    async with run_server(FakeEngine(small_plan()), api_key=(KEY,), metrics_public=True) as server:
        assert (await server.http.get("/metrics")).status_code == 200
        assert (await server.http.get("/memory")).status_code == 401


async def test_tenants_never_hit_each_others_cached_prefixes(run_server, small_plan, tmp_path) -> None:
    body = {"prompt": [7] * 64, "max_tokens": 2}
    async with run_server(FakeEngine(small_plan()), api_key_file=key_file(tmp_path)) as server:

        async def cached(key: str, **more: Any) -> int:
            response = await server.http.post(
                "/v1/completions", json={"model": "demo", **body, **more}, headers=bearer(key)
            )
            return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert await cached(KEY) == 0
        assert await cached(KEY) == 48
        assert await cached(OTHER) == 0
        assert await cached(OTHER, cache_salt="x") == 0
        assert await cached(KEY, cache_salt="x") == 0
        assert await cached(KEY, cache_salt="x") == 48


async def test_tenant_over_its_quota_gets_429_while_others_are_served(run_server, small_plan, tmp_path) -> None:
    engine = FakeEngine(small_plan(1024), token_rate=100)
    async with run_server(engine, api_key_file=key_file(tmp_path, max_num_seqs=2)) as server:

        async def ask(key: str, **more: Any) -> httpx.Response:
            body = {"model": "demo", "prompt": "a", "max_tokens": 40} | more
            return await server.http.post("/v1/completions", json=body, headers=bearer(key))

        running = asyncio.create_task(ask(KEY, n=2))
        await server.until(lambda: engine.stats().running == 2)
        response = await ask(KEY)
        assert (response.status_code, response.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert response.json()["error"]["type"] == "rate_limit_error"
        assert int(response.headers["retry-after-ms"]) > 0
        response = await ask(KEY, n=3)  # more than it may ever run at once
        assert (response.status_code, response.headers["x-should-retry"]) == (429, "false")
        assert response.json()["error"]["code"] == "insufficient_quota"
        assert (await ask(OTHER, max_tokens=2)).status_code == 200
        assert (await running).status_code == 200
        assert (await ask(KEY, max_tokens=2)).status_code == 200  # given back


async def test_tokens_per_minute_quota_returns_429(run_server, small_plan, tmp_path) -> None:
    path = key_file(tmp_path, tokens_per_minute=6000)
    async with run_server(FakeEngine(small_plan(1024)), api_key_file=path) as server:

        async def ask(tokens: int) -> httpx.Response:
            body = {"model": "demo", "prompt": [7] * 500, "max_tokens": tokens, "ignore_eos": True}
            return await server.http.post("/v1/completions", json=body, headers=bearer(KEY))

        answers = [await ask(1500) for _ in range(3)]  # 2,000 tokens each
        assert [answer.status_code for answer in answers] == [200] * 3
        response = await ask(1500)
        assert response.status_code == 429
        # 100 tokens a second come back: the wait is what is missing.
        assert 10 < int(response.headers["retry-after"]) <= 20


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", "must contain"),
        ("key = 1", "must contain"),
        ("[[key]]\nname = 'a'", "key or sha256"),
        ("[[key]]\nname = 'a'\nkey = 'short'", "at least 8"),
        ("[[key]]\nname = 'a/b'\nkey = 'long-enough'", "name"),
        ("[[key]]\nname = 'a'\nkey = 'long-enough'\nquota = 1", "quota"),
        ("[[key]]\nname = 'a'\nkey = 'long-enough'\n[[key]]\nname = 'a'\nkey = 'long-enough-2'", "two keys"),
        ("[[key]]\nname = 'a'\nkey = 'long-enough'\n[[key]]\nname = 'b'\nkey = 'long-enough'", "twice"),
        ("[[key]", "not TOML"),
    ],
)
def test_invalid_key_file_error_names_the_field_and_no_key(tmp_path, text: str, wanted: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(DeploymentError, match=wanted) as caught:
        load_keys((), path)
    assert "long-enough" not in str(caught.value)


async def raw(url: str, data: bytes) -> bytes:
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    try:
        return await asyncio.wait_for(reader.read(), PATIENCE)
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("data", "status", "code"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00", 400, "malformed_http_request"),
        (b"hello\r\n\r\n", 400, "malformed_http_request"),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * (MAX_HEAD_BYTES + 10), 431, "headers_too_large"),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * (MAX_HEAD_BYTES + 10) + b"\r\n\r\n", 431, "headers_too_large"),
    ],
    ids=["tls", "words", "endless", "large"],
)
async def test_malformed_http_requests_get_an_error_response(
    server, data: bytes, status: int, code: str
) -> None:
    head, _, body = (await raw(server.url, data)).partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode())
    assert json.loads(body)["error"]["code"] == code
    assert (await server.http.get("/health")).status_code == 200


async def test_missing_request_body_times_out_with_408(run_server, small_plan) -> None:
    async with run_server(FakeEngine(small_plan()), body_timeout=0.2) as server:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\nConnection: close\r\n\r\n{"
        answer = await raw(server.url, head)
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"request_timeout" in answer


async def test_valid_request_ids_are_returned_and_invalid_ones_replaced(server) -> None:
    response = await server.http.get("/health", headers={"x-request-id": "mine-1"})
    assert response.headers["x-request-id"] == "mine-1"
    response = await server.http.get("/nope", headers={"x-request-id": "bad id" * 90})
    assert len(response.headers["x-request-id"]) == 32
    response = await server.complete(max_tokens=1, request_id="of-the-body")
    assert response.headers["x-request-id"] == "of-the-body"
    assert response.json()["id"] == "cmpl-of-the-body"


async def test_cors_is_off_by_default(run_server, small_plan) -> None:
    origin = {"origin": "https://app.example", "access-control-request-method": "POST"}
    async with run_server(FakeEngine(small_plan())) as server:
        response = await server.http.options("/v1/completions", headers=origin)
        assert "access-control-allow-origin" not in response.headers
    settings = {"allowed_origins": "https://app.example", "api_key": KEY}
    async with run_server(FakeEngine(small_plan()), **settings) as server:
        response = await server.http.options("/v1/completions", headers=origin)
        assert response.headers["access-control-allow-origin"] == "https://app.example"
        foreign = origin | {"origin": "https://evil.example"}
        response = await server.http.options("/v1/completions", headers=foreign)
        assert "access-control-allow-origin" not in response.headers


async def test_access_log_has_token_counts_and_no_text(run_server, small_plan, caplog) -> None:
    caplog.set_level(logging.INFO, "tonnage.access")
    async with run_server(FakeEngine(small_plan()), access_log=True) as server:
        await server.complete(prompt="a secret of the client", max_tokens=3, request_id="r-1")
        await server.complete(prompt="another secret", temperature=9)
    served, refused = [record for record in caplog.records if record.name == "tonnage.access"]
    line = json.loads(JsonFormatter().format(served))
    assert (line["request_id"], line["outcome"], line["completion_tokens"]) == ("r-1", "length", 3)
    assert json.loads(JsonFormatter().format(refused))["code"] == "invalid_value"
    for record in (served, refused):
        assert "secret" not in JsonFormatter().format(record) + TextFormatter().format(record)


async def test_request_log_is_a_readable_trace_for_replay(run_server, small_plan, tmp_path) -> None:
    path = tmp_path / "requests.jsonl"
    async with run_server(FakeEngine(small_plan()), request_log=path) as server:
        more = {"ignore_eos": True}
        await server.complete(prompt=[[7] * 40, [7] * 32 + [8] * 8], max_tokens=5, n=2, **more)
        await server.complete(prompt=[7] * 40, max_tokens=3, cache_salt="other", **more)
        await server.complete(prompt="refused", temperature=9)
    trace = read_trace(path)
    assert [request.output_tokens for request in trace.requests] == [5, 5, 5, 5, 3]
    assert {request.prompt_tokens for request in trace.requests} == {40}
    first, _, second, _, salted = trace.requests
    assert first.hash_block == 16
    assert first.hash_ids[:2] == second.hash_ids[:2]  # two full blocks each, of the same tokens
    assert first.hash_ids[2] != second.hash_ids[2]
    assert set(first.hash_ids).isdisjoint(salted.hash_ids)
    assert "refused" not in path.read_text()


def test_flag_overrides_environment_and_environment_overrides_file(tmp_path, monkeypatch) -> None:
    path = tmp_path / "tonnage.toml"
    path.write_text("model = 'demo'\nmax-model-len = 100\nport = 1\nkv_cache_memory_bytes = '1GiB'\n")
    monkeypatch.setenv("TONNAGE_PORT", "2")
    monkeypatch.setenv("TONNAGE_API_KEY", "key-one-x,key-two-x")
    settings = load_settings(path, host="0.0.0.0")
    assert (settings.host, settings.port, settings.max_model_len) == ("0.0.0.0", 2, 100)
    assert settings.kv_cache_memory_bytes == 2**30
    assert settings.api_key == ("key-one-x", "key-two-x")
    assert "key-one" not in settings.model_dump_json()
    path.write_text("model = 'demo'\nno-such = 1\n")
    with pytest.raises(DeploymentError, match="no_such is not a setting"):
        load_settings(path)
