"""Bodies that are small and cost much: what a client gets is one sentence, and nobody else notices."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tonnage.server.engines.fake import FakeEngine
from tonnage.server.errors import ErrorCode

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
HELLO = {"role": "user", "content": "hello"}
NINES = 10**4300 - 1  # the longest integer that Python reads and writes


def called(arguments: str) -> list[dict[str, Any]]:
    """A conversation in which the assistant has called a function with ``arguments``."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [
        HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "a"},
    ]


@pytest.mark.parametrize(
    ("path", "field", "more"),
    [
        (COMPLETIONS, "max_tokens", {"prompt": "a"}),
        (COMPLETIONS, "min_tokens", {"prompt": "a"}),
        (CHAT, "max_tokens", {"messages": [HELLO]}),
        (CHAT, "max_completion_tokens", {"messages": [HELLO]}),
        (RESPONSES, "max_output_tokens", {"input": "a"}),
    ],
)
async def test_a_number_of_4300_nines(server, checked, path: str, field: str, more: dict[str, Any]) -> None:
    response = await server.http.post(path, json={"model": "demo", field: NINES, **more})
    error = checked(response)
    assert (error.code, error.param) == (ErrorCode.INVALID_VALUE, field)
    assert "2147483648" in error.message


@pytest.mark.parametrize("name", ["self", "messages", "tools"])
async def test_names_that_are_not_free_in_a_template(server, checked, name: str) -> None:
    body = {"model": "demo", "messages": [HELLO], "chat_template_kwargs": {name: 1}}
    error = checked(await server.http.post(CHAT, json=body))
    assert (error.code, error.param) == (ErrorCode.INVALID_VALUE, "chat_template_kwargs")


@pytest.mark.parametrize(
    "arguments", ['{"a":' * 5000 + "1" + "}" * 5000, '{"a": "\\ud800"}'], ids=["deep", "half a character"]
)
async def test_arguments_of_a_call_that_no_template_can_show(server, checked, arguments: str) -> None:
    error = checked(await server.http.post(CHAT, json={"model": "demo", "messages": called(arguments)}))
    assert (error.code, error.param) == (ErrorCode.INVALID_VALUE, "messages.1.tool_calls")
    fine = called('{"a": [1, {"b": null}]}')
    response = await server.http.post(CHAT, json={"model": "demo", "messages": fine, "max_tokens": 1})
    assert response.status_code == 200


async def test_a_web_page_cannot_leave_the_content_type_out(server, checked) -> None:
    """The one form of a JSON body that a browser sends to a foreign server without asking it first."""
    body = json.dumps({"model": "demo", "prompt": "a", "max_tokens": 1}).encode()
    for origin in ("https://evil.example", "null"):
        for path in (COMPLETIONS, "/tokenize"):
            response = await server.http.post(path, content=body, headers={"origin": origin})
            error = checked(response)
            assert error.code == ErrorCode.UNSUPPORTED_MEDIA_TYPE
            assert "content-type: application/json" in error.message
    assert server.state.accounts.outcomes["stop"] + server.state.accounts.outcomes["length"] == 0
    assert (await server.http.post(COMPLETIONS, content=body)).status_code == 200  # curl, a script
