"""Answers of Anthropic's API: content blocks, the events that report them in a stream, and errors."""

from __future__ import annotations

from collections.abc import Sequence
from json.encoder import encode_basestring_ascii
from typing import Any

import pydantic_core

from tonnage.server.api.sse import event
from tonnage.server.requests.submission import TokenCounts
from tonnage.server.text.tool_calls import Call, CallDelta, new_call_id


def usage(counts: TokenCounts) -> dict[str, Any]:
    """Return Anthropic's token counts, in which cached tokens are no part of ``input_tokens``."""
    details = (
        {} if counts.reasoning is None else {"output_tokens_details": {"thinking_tokens": counts.reasoning}}
    )
    return details | {
        "input_tokens": counts.prompt - counts.cached_total,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": counts.cached_total,
        "output_tokens": counts.completion,
    }


def message(request_id: str, model: str, counts: TokenCounts) -> dict[str, Any]:
    """Return a message object without content, as it is at the start of a stream."""
    return {
        "id": f"msg_{request_id}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage(counts),
    }


def blocks(text: str, calls: Sequence[Call], thought: str = "") -> list[dict[str, Any]]:
    """Return the content blocks of a complete answer: its reasoning, its text and its tool calls.

    An answer without reasoning and calls has a text block even if the text is empty.
    """
    found: list[dict[str, Any]] = []
    if thought:
        found.append({"type": "thinking", "thinking": thought, "signature": ""})
    if text or not (calls or thought):
        found.append({"type": "text", "text": text})
    return found + [
        {"type": "tool_use", "id": _tool_id(call.id), "name": call.name, "input": _input(call.arguments)}
        for call in calls
    ]


class MessageEvents:
    """Writer of the events of one streamed message; at most one content block is open at a time."""

    def __init__(self) -> None:
        self._index = -1  # index of the open block, or of the last one
        self._open = ""  # type of the open block, empty when none is open
        self._call = -1  # index of the open call among the calls of the answer

    def text(self, text: str) -> bytes:
        """Return the events that append ``text`` to the open text block; if none is open, open one first."""
        events = b"" if self._open == "text" else self._begin({"type": "text", "text": ""})
        if text:
            events += (
                b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,'
                b'"delta":{"type":"text_delta","text":%b}}\n\n'
                % (self._index, encode_basestring_ascii(text).encode())
            )
        return events

    def thinking(self, text: str) -> bytes:
        """Return the events that append ``text`` to the open block of reasoning; if none is open, open one."""
        events = b""
        if self._open != "thinking":
            events += self._begin({"type": "thinking", "thinking": "", "signature": ""})
        piece = {"type": "thinking_delta", "thinking": text}
        return events + event({"type": "content_block_delta", "index": self._index, "delta": piece})

    def call(self, delta: CallDelta) -> bytes:
        """Return the events that append ``delta`` to the open tool call; a new call opens a block."""
        events = b""
        if self._open != "tool_use" or delta.index != self._call:
            self._call = delta.index
            name, call_id = delta.name or "", _tool_id(delta.id or new_call_id())
            events += self._begin({"type": "tool_use", "id": call_id, "name": name, "input": {}})
        if delta.arguments:
            piece = {"type": "input_json_delta", "partial_json": delta.arguments}
            events += event({"type": "content_block_delta", "index": self._index, "delta": piece})
        return events

    def close(self) -> bytes:
        """Return the event that closes the open block, if any; a message without blocks gets an empty text."""
        events = self.text("") if self._index < 0 else b""
        if self._open:
            self._open = ""
            events += event({"type": "content_block_stop", "index": self._index})
        return events

    def _begin(self, block: dict[str, Any]) -> bytes:
        events = self.close() if self._open else b""
        self._index += 1
        self._open = block["type"]
        return events + event({"type": "content_block_start", "index": self._index, "content_block": block})


def _tool_id(call_id: str) -> str:
    return f"toolu_{call_id.removeprefix('call_')}"


def _input(arguments: str) -> dict[str, Any]:
    """Return a call's arguments as an object; if they were cut off, only the part that is valid JSON."""
    try:
        found = pydantic_core.from_json(arguments or "{}", allow_partial=True)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
