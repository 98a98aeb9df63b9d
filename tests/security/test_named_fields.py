"""Errors of a request's body name the field or the header at fault."""

from __future__ import annotations

from typing import Any

import pytest

from tonnage.server.engines.fake import FakeEngine
from tonnage.server.errors import ErrorCode

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
HELLO = {"role": "user", "content": "hello"}


@pytest.mark.parametrize("encoding", ["gzip", "br", "gzip, deflate"])
async def test_compressed_body_is_rejected_naming_the_content_encoding_header(
    server, checked, encoding: str
) -> None:
    response = await server.http.post(
        COMPLETIONS,
        content=b"\x1f\x8b\x08",
        headers={"content-encoding": encoding, "content-type": "application/json"},
    )
    assert response.status_code == 415
    assert f"content-encoding '{encoding}'" in checked(response).message


@pytest.mark.parametrize(
    ("path", "body", "param", "where"),
    [
        (COMPLETIONS, '{"model":"demo","prompt":"a\\ud83d b"}', "prompt", "prompt: character 1 "),
        (
            CHAT,
            '{"model":"demo","messages":[{"role":"user","content":"\\uDE00"}]}',
            "messages",
            "messages[0].content",
        ),
        (
            RESPONSES,
            '{"model":"demo","input":[{"role":"user","content":"x\\ud800"}]}',
            "input",
            "input[0].content",
        ),
    ],
)
async def test_unpaired_surrogate_in_a_string_is_rejected_naming_its_field(
    server, checked, path: str, body: str, param: str, where: str
) -> None:
    error = checked(await server.http.post(path, content=body, headers={"content-type": "application/json"}))
    assert (error.code, error.param) == (ErrorCode.INVALID_JSON, param)
    assert where in error.message
    assert "half of a surrogate pair" in error.message


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "field", "body"),
    [
        (COMPLETIONS, "prompt", {"prompt": "word " * 9000}),
        (CHAT, "messages", {"messages": [{"role": "user", "content": "word " * 9000}]}),
        (RESPONSES, "input", {"input": "word " * 9000}),
    ],
)
async def test_error_for_a_conversation_beyond_the_context_names_the_endpoints_field(
    server, checked, path: str, field: str, body: dict[str, Any], stream: bool
) -> None:
    error = checked(await server.http.post(path, json={"model": "demo", "stream": stream, **body}))
    assert (error.code, error.param) == (ErrorCode.CONTEXT_LENGTH_EXCEEDED, field)


@pytest.mark.parametrize(
    ("path", "field", "body"),
    [
        (COMPLETIONS, "prompt", {"prompt": "a", "max_tokens": 4000}),
        (CHAT, "messages", {"messages": [HELLO], "max_tokens": 4000}),
        (RESPONSES, "input", {"input": "a", "max_output_tokens": 4000}),
    ],
)
async def test_error_for_a_request_that_never_fits_the_pool_names_the_endpoints_field(
    run_server, small_plan, checked, path: str, field: str, body: dict[str, Any]
) -> None:
    plan = small_plan(blocks=100, max_model_len=8192)
    async with run_server(FakeEngine(plan)) as server:
        error = checked(await server.http.post(path, json={"model": "demo", **body}))
    assert error.param == field
