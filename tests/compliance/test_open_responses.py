"""Requirements of Open Responses' specification and tests beyond llm-comply's cases, on the same server.

The specification is openresponses.org/specification; its OpenAPI description of 2026-04-24 comes from
llm-comply's package. The tests of openresponses/openresponses (src/lib/compliance-tests.ts) run under bun from
a checkout, and no package index has them. This file repeats these after their descriptions:
tool-calling-streaming, function-call-roundtrip, file-input, previous-response-id, file-search
and websocket-*.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from serving import PATIENCE
from toolcalls import CLOCK, WEATHER

ASK = [{"type": "message", "role": "user", "content": "What is the weather in Paris?"}]
TOOLS = [{"type": "function", **tool["function"]} for tool in (WEATHER, CLOCK)]
NAMED = {"type": "function", "name": "get_weather"}
ENDS = {"response.completed", "response.incomplete", "response.failed"}


class Document:
    """The OpenAPI description, whose schemas are used directly as JSON Schema 2020-12."""

    def __init__(self, file: Path) -> None:
        self._components = json.loads(file.read_text())["components"]
        self._events = {
            schema["properties"]["type"]["enum"][0]: name
            for name, schema in self._components["schemas"].items()
            if name.endswith("StreamingEvent")
        }

    def check(self, name: str, value: Any) -> None:
        schema = {"$ref": f"#/components/schemas/{name}", "components": self._components}
        jsonschema.Draft202012Validator(schema).validate(value)

    def check_event(self, event: dict[str, Any]) -> None:
        self.check(self._events[event["type"]], event)


@pytest.fixture(scope="module")
def document(llm_comply: Path) -> Document:
    (file,) = llm_comply.parent.parent.glob("lib/python3*/site-packages/llm_comply/specs/openresponses.json")
    return Document(file)


class Api:
    def __init__(self, url: str, document: Document) -> None:
        self.http = httpx.Client(base_url=f"{url}/v1", timeout=PATIENCE, trust_env=False)
        self.document = document

    def ask(self, **body: Any) -> dict[str, Any]:
        response = self.http.post("/responses", json={"model": "demo", "input": ASK, "temperature": 0, **body})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == "application/json"
        answer: dict[str, Any] = response.json()
        self.document.check("ResponseResource", answer)
        return answer

    def events(self, **body: Any) -> list[dict[str, Any]]:
        """Return the events of a response after checking validity, order, names and the final event."""
        body = {"model": "demo", "input": ASK, "temperature": 0, "stream": True, **body}
        response = self.http.post("/responses", json=body)
        assert response.headers["content-type"].startswith("text/event-stream")
        events = []
        for block in response.text.strip().split("\n\n"):
            name, data = block.split("\n")
            event = json.loads(data.removeprefix("data: "))
            assert name == f"event: {event['type']}"
            assert event["sequence_number"] == len(events)
            self.document.check_event(event)
            events.append(event)
        assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
        assert [event["type"] for event in events if event["type"] in ENDS] == [events[-1]["type"]]
        return events


@pytest.fixture(scope="module")
def api(url: str, document: Document) -> Iterator[Api]:
    api = Api(url, document)
    with api.http:
        yield api


def test_responses_endpoint_treats_a_string_input_as_a_user_message(api: Api) -> None:
    one = api.ask(input=ASK[0]["content"], max_output_tokens=4)
    other = api.ask(max_output_tokens=4)
    assert one["output"][0]["content"] == other["output"][0]["content"]
    assert one["usage"]["input_tokens"] == other["usage"]["input_tokens"]
    more = api.ask(instructions="Be brief.", max_output_tokens=4)
    assert more["instructions"] == "Be brief."
    assert more["usage"]["input_tokens"] > one["usage"]["input_tokens"]


@pytest.mark.parametrize("tokens", [None, 3], ids=["completed", "incomplete"])
def test_responses_stream_of_a_message_has_all_events_in_order(api: Api, tokens: int | None) -> None:
    *events, last = api.events(max_output_tokens=tokens)
    status = "completed" if tokens is None else "incomplete"
    assert last["type"] == f"response.{status}"
    (item,) = last["response"]["output"]
    kinds = [event["type"].removeprefix("response.") for event in events[2:]]
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert kinds == [
        *("output_item.added", "content_part.added"),
        *["output_text.delta"] * len(deltas),
        *("output_text.done", "content_part.done", "output_item.done"),
    ]
    added, part, text, part_done, done = events[2], events[3], *events[-3:]
    assert (added["item"]["status"], added["item"]["content"]) == ("in_progress", [])
    assert (added["item"]["role"], added["item"]["id"]) == ("assistant", item["id"])
    assert part["part"]["text"] == ""
    assert {event["item_id"] for event in (part, *deltas, text, part_done)} == {item["id"]}
    assert "".join(event["delta"] for event in deltas) == text["text"] == item["content"][0]["text"]
    assert part_done["part"] == item["content"][0]
    # Cut off, an item is incomplete, the last one, and so is its response.
    assert done["item"] == item
    assert (item["status"], last["response"]["status"]) == (status, status)
    assert (last["response"]["incomplete_details"] is None) == (last["response"]["completed_at"] is not None)


def test_responses_stream_of_a_tool_call_has_all_events_in_order(api: Api) -> None:
    """Repeat the test tool-calling-streaming; the model may call any of the tools."""
    *events, last = api.events(tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    (item,) = last["response"]["output"]
    assert last["response"]["tool_choice"] == "required"
    deltas = [event for event in events if event["type"] == "response.function_call_arguments.delta"]
    assert [event["type"].removeprefix("response.") for event in events[2:]] == [
        "output_item.added",
        *["function_call_arguments.delta"] * len(deltas),
        *("function_call_arguments.done", "output_item.done"),
    ]
    added, arguments, done = events[2], *events[-2:]
    assert added["item"] == item | {"status": "in_progress", "arguments": ""}
    assert "".join(event["delta"] for event in deltas) == arguments["arguments"] == item["arguments"]
    assert done["item"] == item
    tool = next(tool for tool in TOOLS if tool["name"] == item["name"])
    jsonschema.validate(json.loads(item["arguments"]), tool["parameters"])


def test_output_of_a_tool_call_can_be_sent_back_to_the_responses_endpoint(api: Api) -> None:
    """Repeat the test function-call-roundtrip."""
    called = api.ask(tools=TOOLS, tool_choice=NAMED)
    (call,) = called["output"]
    assert (call["type"], call["name"], call["status"]) == ("function_call", "get_weather", "completed")
    jsonschema.validate(json.loads(call["arguments"]), TOOLS[0]["parameters"])
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "64 degrees and clear"}
    answer = api.ask(input=[*ASK, call, output], tools=TOOLS, tool_choice="none")
    assert [item["type"] for item in answer["output"]] == ["message"]
    assert answer["status"] == "completed"


SCHEMA = {
    "type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False,
}  # fmt: skip


def test_responses_output_matches_the_requested_json_schema(api: Api) -> None:
    form: dict[str, Any] = {"type": "json_schema", "name": "letter", "schema": SCHEMA, "strict": True}
    body = {"model": "demo", "input": ASK, "temperature": 0, "text": {"format": form}}
    answer = api.http.post("/responses", json=body).json()
    jsonschema.validate(json.loads(answer["output"][0]["content"][0]["text"]), SCHEMA)
    assert answer["text"]["format"] == form | {"description": None}
    # The document's response may hold null only where the schema stands; OpenAI's holds the schema, as here.
    answer["text"]["format"]["schema"] = None
    api.document.check("ResponseResource", answer)


IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="}
FILE = {"type": "input_file", "filename": "a.pdf", "file_data": "data:application/pdf;base64,JVBERi0="}
# Deliberate differences: the specification leaves them open (SHOULD, MAY), or they do not apply here.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "image-input": ({"input": [{"role": "user", "content": [IMAGE]}]}, "input"),
    "file-input": ({"input": [{"role": "user", "content": [FILE]}]}, "input"),
    "item reference": ({"input": [*ASK, {"type": "item_reference", "id": "msg_1"}]}, "input"),
    "previous-response-id": ({"previous_response_id": "resp_1"}, "previous_response_id"),
    "conversation": ({"conversation": "conv_1"}, "conversation"),
    "background": ({"background": True}, "background"),
    "file-search": ({"tools": [{"type": "file_search", "vector_store_ids": ["vs_1"]}]}, "tools.0.type"),
    "forced-web-search": ({"tools": TOOLS, "tool_choice": {"type": "web_search"}}, "tool_choice"),
    "truncation": ({"truncation": "auto"}, "truncation"),
    "include": ({"include": ["message.output_text.logprobs"]}, "include"),
    "top_logprobs": ({"top_logprobs": 2}, "top_logprobs"),
    "no model": ({"model": None}, "model"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_unsupported_responses_features_are_rejected_by_name(api: Api, name: str, stream: bool) -> None:
    more, param = REFUSED[name]
    response = api.http.post("/responses", json={"model": "demo", "input": ASK, "stream": stream, **more})
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["param"] == param
    assert response.headers["x-should-retry"] == "false"
    api.document.check("ErrorPayload", error)


def test_responses_endpoint_offers_no_compaction_and_no_websocket(api: Api) -> None:
    compact = api.http.post("/responses/compact", json={"model": "demo", "input": ASK})
    assert (compact.status_code, compact.json()["error"]["code"]) == (404, "unknown_url")
    upgrade = {
        "connection": "Upgrade", "upgrade": "websocket", "sec-websocket-version": "13",
        "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==",
    }  # fmt: skip
    refused = api.http.get("/responses", headers=upgrade)
    assert refused.status_code == 405
    assert refused.json()["error"]["code"] == "method_not_allowed"
