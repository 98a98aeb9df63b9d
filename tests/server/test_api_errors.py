"""Every refusal: status, code, param, headers, in OpenAI's envelope and nothing else."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from tonnage.planner.errors import TonnageError
from tonnage.server.engines.errors import EngineDead
from tonnage.server.engines.fake import FakeEngine
from tonnage.server.errors import ApiError, ErrorCode, from_exception, render

VALID = {"model": "demo", "prompt": "hello", "max_tokens": 2}


FIELD_ERRORS: list[tuple[dict[str, Any], ErrorCode, str | None]] = [
    ({"foo": 1}, ErrorCode.UNKNOWN_PARAMETER, "foo"),
    ({"max_token": 1}, ErrorCode.UNKNOWN_PARAMETER, "max_token"),
    ({"x" * 5000: 1}, ErrorCode.UNKNOWN_PARAMETER, "x" * 60),
    ({"model": "gpt-4"}, ErrorCode.MODEL_NOT_FOUND, "model"),
    ({"model": 5}, ErrorCode.INVALID_TYPE, "model"),
    ({"model": None}, ErrorCode.INVALID_TYPE, "model"),
    ({"prompt": 5}, ErrorCode.INVALID_VALUE, "prompt"),
    ({"prompt": None}, ErrorCode.INVALID_VALUE, "prompt"),
    ({"prompt": ""}, ErrorCode.INVALID_VALUE, "prompt"),
    ({"prompt": []}, ErrorCode.INVALID_VALUE, "prompt"),
    ({"prompt": [[]]}, ErrorCode.INVALID_VALUE, "prompt"),
    ({"prompt": [1, "a"]}, ErrorCode.INVALID_VALUE, "prompt"),
    ({"prompt": [-1]}, ErrorCode.INVALID_VALUE, "prompt"),
    ({"prompt": [49152]}, ErrorCode.INVALID_VALUE, "prompt"),
    ({"prompt": [10**30]}, ErrorCode.INVALID_VALUE, "prompt"),
    ({"prompt": [True]}, ErrorCode.INVALID_VALUE, "prompt"),
    ({"prompt": [1.5]}, ErrorCode.INVALID_VALUE, "prompt"),
    ({"prompt": ["a"] * 600}, ErrorCode.INVALID_VALUE, "prompt"),
    ({"max_tokens": 0}, ErrorCode.INVALID_VALUE, "max_tokens"),
    ({"max_tokens": -5}, ErrorCode.INVALID_VALUE, "max_tokens"),
    ({"max_tokens": "abc"}, ErrorCode.INVALID_TYPE, "max_tokens"),
    ({"max_tokens": "5"}, ErrorCode.INVALID_TYPE, "max_tokens"),
    ({"max_tokens": 5.5}, ErrorCode.INVALID_TYPE, "max_tokens"),
    ({"max_tokens": True}, ErrorCode.INVALID_TYPE, "max_tokens"),
    ({"temperature": -0.1}, ErrorCode.INVALID_VALUE, "temperature"),
    ({"temperature": 2.1}, ErrorCode.INVALID_VALUE, "temperature"),
    ({"temperature": "hot"}, ErrorCode.INVALID_TYPE, "temperature"),
    ({"top_p": 0}, ErrorCode.INVALID_VALUE, "top_p"),
    ({"top_p": 1.5}, ErrorCode.INVALID_VALUE, "top_p"),
    ({"top_k": -2}, ErrorCode.INVALID_VALUE, "top_k"),
    ({"min_p": 1.5}, ErrorCode.INVALID_VALUE, "min_p"),
    ({"n": 0}, ErrorCode.INVALID_VALUE, "n"),
    ({"n": 100_000}, ErrorCode.INVALID_VALUE, "n"),
    ({"n": 65}, ErrorCode.INVALID_VALUE, "n"),  # max_num_seqs is 64
    ({"seed": 2**63}, ErrorCode.INVALID_VALUE, "seed"),
    ({"seed": 1.5}, ErrorCode.INVALID_TYPE, "seed"),
    ({"stream": "yes"}, ErrorCode.INVALID_TYPE, "stream"),
    ({"stop": ""}, ErrorCode.INVALID_VALUE, "stop"),
    ({"stop": ["a", ""]}, ErrorCode.INVALID_VALUE, "stop"),
    ({"stop": ["abcde"] * 1000}, ErrorCode.INVALID_VALUE, "stop"),
    ({"stop": 5}, ErrorCode.INVALID_VALUE, "stop"),
    ({"stream_options": {}}, ErrorCode.INVALID_VALUE, "stream_options"),
    ({"stream": True, "stream_options": {"x": 1}}, ErrorCode.UNKNOWN_PARAMETER, "stream_options.x"),
    (
        {"stream": True, "stream_options": {"continuous_usage_stats": 1}},
        ErrorCode.INVALID_TYPE,
        "stream_options.continuous_usage_stats",
    ),
    ({"logprobs": 0}, ErrorCode.UNSUPPORTED_PARAMETER, "logprobs"),
    ({"best_of": 2}, ErrorCode.UNSUPPORTED_PARAMETER, "best_of"),
    ({"best_of": True}, ErrorCode.INVALID_TYPE, "best_of"),
    ({"suffix": "end"}, ErrorCode.UNSUPPORTED_PARAMETER, "suffix"),
    ({"logit_bias": {"5": 1}}, ErrorCode.UNSUPPORTED_PARAMETER, "logit_bias"),
    ({"presence_penalty": 0.5}, ErrorCode.UNSUPPORTED_PARAMETER, "presence_penalty"),
    ({"frequency_penalty": -1}, ErrorCode.UNSUPPORTED_PARAMETER, "frequency_penalty"),
    ({"priority": 1}, ErrorCode.UNSUPPORTED_PARAMETER, "priority"),
    ({"response_format": {"type": "json_object"}}, ErrorCode.UNSUPPORTED_PARAMETER, "response_format"),
]


async def test_invalid_field_error_names_code_and_parameter(server, checked) -> None:
    for change, code, param in FIELD_ERRORS:
        for stream in ({}, {"stream": True}) if "stream_options" not in change else ({},):
            error = checked(await server.http.post("/v1/completions", json=VALID | stream | change))
            assert (error.code, error.param) == (code, param), change
            assert error.type == "invalid_request_error"
            if param and param in change and len(param) < 60:
                assert param.split(".")[0] in error.message or code == ErrorCode.MODEL_NOT_FOUND
    tries = server.state.accounts.outcomes["rejected"]
    assert tries == server.state.accounts.received > len(FIELD_ERRORS)
    assert server.engine.stats().admissions == ()  # nothing of it reached the engine


async def test_error_for_a_missing_required_request_field_names_it(server, checked) -> None:
    for name in ("model", "prompt"):
        body = {key: value for key, value in VALID.items() if key != name}
        error = checked(await server.http.post("/v1/completions", json=body))
        assert (error.code, error.param) == (ErrorCode.MISSING_PARAMETER, name)


BODIES: list[tuple[bytes, ErrorCode]] = [
    (b"", ErrorCode.INVALID_JSON),
    (b"{", ErrorCode.INVALID_JSON),
    (b"{'model': 'demo'}", ErrorCode.INVALID_JSON),
    (b'{"model": "demo", "prompt": "a", "temperature": NaN}', ErrorCode.INVALID_JSON),
    (b'{"model": "demo", "prompt": "\\ud800"}', ErrorCode.INVALID_JSON),
    (b'{"model": "demo", "prompt": "a"} x', ErrorCode.INVALID_JSON),
    (b"[" * 100_000, ErrorCode.INVALID_JSON),
    (b'{"a":' * 100_000, ErrorCode.INVALID_JSON),
    (b'{"model": "demo", "prompt": "a", "seed": ' + b"9" * 10_000 + b"}", ErrorCode.INVALID_JSON),
    (b'{"model": "demo", "prompt": "a", "temperature": 1e999}', ErrorCode.INVALID_VALUE),
    (b"[1, 2]", ErrorCode.INVALID_TYPE),
    (b'"text"', ErrorCode.INVALID_TYPE),
    (b"null", ErrorCode.INVALID_TYPE),
    (b"\x80\x81\xfe\xff", ErrorCode.INVALID_ENCODING),
    (b'{"model": "demo", "prompt": "caf\xe9"}', ErrorCode.INVALID_ENCODING),
    ('{"model": "demo", "prompt": "a"}'.encode("utf-16"), ErrorCode.INVALID_ENCODING),
]


async def test_body_that_is_not_valid_json_is_rejected(server, checked) -> None:
    for body, code in BODIES:
        for media in ("application/json", "application/json; charset=utf-8"):
            error = checked(
                await server.http.post("/v1/completions", content=body, headers={"content-type": media})
            )
            assert error.code == code, body[:60]


async def test_only_json_content_types_are_accepted(server, checked) -> None:
    body = json.dumps(VALID).encode()
    for media in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "x" * 3000):
        response = await server.http.post("/v1/completions", content=body, headers={"content-type": media})
        assert checked(response).code == ErrorCode.UNSUPPORTED_MEDIA_TYPE
    for media in ("application/json", "Application/JSON; charset=utf-8", "application/vnd.api+json"):
        response = await server.http.post("/v1/completions", content=body, headers={"content-type": media})
        assert response.status_code == 200
    request = server.http.build_request("POST", "/v1/completions", content=body)
    assert "content-type" not in request.headers
    assert (await server.http.send(request)).status_code == 200


async def test_body_over_the_size_limit_is_rejected(run_server, small_plan, checked) -> None:
    async with run_server(FakeEngine(small_plan()), max_request_body_bytes=100_000) as server:
        for size in (100_001, 700_000, 20_000_000):
            body = json.dumps(VALID | {"prompt": "a" * size})

            async def chunks(body: str = body):
                for at in range(0, len(body), 65536):
                    yield body[at : at + 65536].encode()

            try:
                response = await server.http.post("/v1/completions", content=body)
                assert checked(response).code == ErrorCode.REQUEST_TOO_LARGE
                response = await server.http.post("/v1/completions", content=chunks())  # no Content-Length
                assert checked(response).code == ErrorCode.REQUEST_TOO_LARGE
            except (httpx.WriteError, httpx.ReadError, httpx.RemoteProtocolError):
                assert size > 8 * 100_000  # far over the limit the server hangs up on the sender
        fitting = json.dumps(VALID | {"prompt": [7] * 2000})
        assert (await server.http.post("/v1/completions", content=fitting)).status_code == 200


async def test_unknown_route_and_wrong_method_are_rejected(server, checked) -> None:
    assert (await server.http.head("/health")).status_code == 200
    assert (await server.http.head("/ready")).status_code == 200
    # HEAD on every GET route, a trailing slash on every route.
    for path in ("/v1/models", "/v1/models/demo", "/version", "/metrics", "/memory", "/docs", "/ping"):
        whole, head = await server.http.get(path), await server.http.head(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-type"] == whole.headers["content-type"]
    assert (await server.http.get("/v1/models/")).json() == (await server.http.get("/v1/models")).json()
    assert (await server.http.get("/ping/")).json() == {"status": "ok"}
    body = {"model": "demo", "prompt": "a", "max_tokens": 1}
    assert (await server.http.post("/v1/completions/", json=body)).status_code == 200
    assert (await server.http.head("/v1/completions")).status_code == 405
    assert (await server.http.head("/nope")).status_code == 404
    assert (await server.http.get("/docs/nope/")).status_code == 404
    for path in ("/index.html", "/nope", "/v1/completions/x", "/v1/chat", "/metrics/x", "/" + "a" * 5000):
        assert checked(await server.http.get(path)).code == ErrorCode.UNKNOWN_URL
    for method, path, allow in (
        ("GET", "/v1/completions", "POST"),
        ("POST", "/health", "GET"),
        ("POST", "/", "GET"),
        ("PUT", "/metrics", "GET"),
        ("DELETE", "/v1/models/demo", "GET"),
    ):
        response = await server.http.request(method, path)
        assert checked(response).code == ErrorCode.METHOD_NOT_ALLOWED
        assert response.headers["allow"] == allow
    for name in ("gpt-4", "a/b", "m" * 4000):
        error = checked(await server.http.get(f"/v1/models/{name}"))
        assert (error.code, error.param) == (ErrorCode.MODEL_NOT_FOUND, "model")


@pytest.mark.parametrize("stream", [False, True])
async def test_prompt_longer_than_max_model_len_is_rejected(server, stream: bool, checked) -> None:
    response = await server.complete(prompt=[5] * 2048, max_tokens=1, stream=stream)
    error = checked(response)
    assert (error.code, error.param) == (ErrorCode.CONTEXT_LENGTH_EXCEEDED, "prompt")
    assert "2048 tokens" in error.message
    error = checked(await server.complete(prompt=[5] * 2000, max_tokens=100, stream=stream))
    assert (error.code, error.param) == (ErrorCode.CONTEXT_LENGTH_EXCEEDED, "max_tokens")
    for number in ("2048", "2100", "2000", "100", "48 completion tokens fit"):
        assert number in error.message
    assert (await server.complete(prompt=[5] * 2000, max_tokens=48)).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_request_larger_than_the_block_pool_is_rejected(
    run_server, small_plan, stream: bool, checked
) -> None:
    # 500 + 500 tokens are 63 of 127 blocks; four completions of one prompt need 31 + 4 x 32.
    async with run_server(FakeEngine(small_plan(128, max_model_len=1024))) as server:
        body = {"prompt": [5] * 500, "max_tokens": 500, "stream": stream}
        assert (await server.complete(**body)).status_code == 200
        for prompt in ([5] * 500, [[1, 2], [5] * 500]):
            error = checked(await server.complete(**body | {"n": 4, "prompt": prompt}))
            assert error.code == ErrorCode.EXCEEDS_KV_CAPACITY
            assert "127" in error.message
        with pytest.raises(openai.BadRequestError) as caught:
            await server.openai.completions.create(model="demo", prompt=[5] * 500, max_tokens=500, n=4)
        assert caught.value.code == "exceeds_kv_capacity"
        decisions = {(outcome, reason): count for outcome, reason, count in server.engine.stats().admissions}
        assert decisions["never", "blocks"] >= 3
        assert server.state.accounts.outcomes["rejected"] == 3


def test_internal_error_messages_disclose_no_paths_or_secrets() -> None:
    unexpected = from_exception(RuntimeError("password at /root/.secret"))
    assert unexpected.code == ErrorCode.INTERNAL_ERROR
    assert "secret" not in unexpected.message
    foreign = from_exception(TonnageError("some planner error about /srv/models/x"))
    assert foreign.code == ErrorCode.INTERNAL_ERROR
    dead = from_exception(EngineDead("lost /srv/models/llama/model.safetensors", hint="see /var/log/x"))
    assert dead.code == ErrorCode.ENGINE_DEAD
    assert "/srv" not in dead.message
    assert "/var" not in dead.message


def test_error_response_size_is_bounded() -> None:
    response = render(ApiError(ErrorCode.INVALID_VALUE, "x" * 10**6))
    assert len(response.body) < 1200


async def test_unexpected_exception_returns_the_openai_error_object(run_server, small_plan, checked) -> None:
    def reply(request, index):
        raise ZeroDivisionError("inside /root/secret.py")

    class Broken(FakeEngine):
        def generate(self, request):
            raise ZeroDivisionError("inside /root/secret.py")

    async with run_server(Broken(small_plan())) as server:
        for stream in (False, True):
            error = checked(await server.complete(stream=stream))
            assert (error.code, error.type) == (ErrorCode.INTERNAL_ERROR, "server_error")
        assert server.state.accounts.outcomes["error"] == 2
