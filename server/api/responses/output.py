"""The output of a response: its items, and the events that tell them as they grow.

Built as dicts, because null and absent are different things in OpenAI's response object.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tonnage.server.text.tool_calls import Call, CallDelta, new_call_id


def message(item_id: str, text: str | None, status: str) -> dict[str, Any]:
    """An item of text; None: nothing of it yet."""
    content = [] if text is None else [part(text)]
    return {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": content}


def part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def function_call(item_id: str, call: Call, status: str) -> dict[str, Any]:
    return {
        "id": item_id,
        "type": "function_call",
        "status": status,
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
    }


def items(request_id: str, text: str, calls: Sequence[Call], status: str) -> list[dict[str, Any]]:
    """A whole answer: its text first, if there is any or nothing else."""
    found = [message(f"msg_{request_id}", text, status)] if text or not calls else []
    return found + [function_call(f"fc_{request_id}_{at}", call, status) for at, call in enumerate(calls)]


def event(fields: dict[str, Any]) -> bytes:
    return f"event: {fields['type']}\ndata: {json.dumps(fields)}\n\n".encode()


class OutputEvents:
    """Writes the events of one stream and keeps its items. One item is open at a time."""

    def __init__(self, request_id: str) -> None:
        self.items: list[dict[str, Any]] = []  # those that are done
        self._request_id = request_id
        self._number = 0
        self._text: str | None = None  # of the open message
        self._call: Call | None = None  # the open one
        self._index = -1  # its number among the calls

    def tell(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return event({"type": kind, "sequence_number": self._number - 1, **fields})

    def text(self, text: str) -> bytes:
        """More text; an empty one only opens the message."""
        told = b""
        if self._text is None:
            told += self.close("completed") + self._open(message(self._message_id, None, "in_progress"))
            told += self.tell("response.content_part.added", **self._place, part=part(""))
            self._text = ""
        if text:
            self._text += text
            told += self.tell("response.output_text.delta", **self._place, delta=text, logprobs=[])
        return told

    def call(self, delta: CallDelta) -> bytes:
        """More of a call; the one before it is complete."""
        told = b""
        if self._call is None or delta.index != self._index:
            told += self.close("completed")
            self._call = Call(delta.id or new_call_id(), delta.name or "", "")
            self._index = delta.index
            told += self._open(function_call(self._call_id, self._call, "in_progress"))
        if delta.arguments:
            self._call.arguments += delta.arguments
            told += self.tell(
                "response.function_call_arguments.delta",
                item_id=self._call_id,
                output_index=len(self.items),
                delta=delta.arguments,
            )
        return told

    def close(self, status: str) -> bytes:
        """End the open item, if there is one."""
        if self._text is not None:
            text, place = self._text, self._place
            told = self.tell("response.output_text.done", **place, text=text, logprobs=[])
            told += self.tell("response.content_part.done", **place, part=part(text))
            item = message(self._message_id, text, status)
        elif self._call is not None:
            told = self.tell(
                "response.function_call_arguments.done",
                item_id=self._call_id,
                output_index=len(self.items),
                name=self._call.name,
                arguments=self._call.arguments,
            )
            item = function_call(self._call_id, self._call, status)
        else:
            return b""
        told += self.tell("response.output_item.done", output_index=len(self.items), item=item)
        self.items.append(item)
        self._text = self._call = None
        return told

    def _open(self, item: dict[str, Any]) -> bytes:
        return self.tell("response.output_item.added", output_index=len(self.items), item=item)

    @property
    def _message_id(self) -> str:
        return f"msg_{self._request_id}" + (f"_{len(self.items)}" if self.items else "")

    @property
    def _call_id(self) -> str:
        return f"fc_{self._request_id}_{self._index}"

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._message_id, "output_index": len(self.items), "content_index": 0}
