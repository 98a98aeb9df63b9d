"""The output of a response: its items, and the events that report them while the response streams.

Items are dicts, not models, because OpenAI's response object distinguishes null from absent fields.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tonnage.server.api.sse import event
from tonnage.server.text.tool_calls import Call, CallDelta, new_call_id


def message(item_id: str, text: str | None, status: str) -> dict[str, Any]:
    """Return a message item of a response's output.

    A ``text`` of None makes an item without content, as it is at the start of a stream.
    """
    content = [] if text is None else [part(text)]
    return {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": content}


def part(text: str) -> dict[str, Any]:
    """Return ``text`` as an ``output_text`` part of a message's content."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def function_call(item_id: str, call: Call, status: str) -> dict[str, Any]:
    """Return a function call item of a response's output."""
    return {
        "id": item_id,
        "type": "function_call",
        "status": status,
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
    }


def reasoning_item(item_id: str, text: str | None, status: str) -> dict[str, Any]:
    """Return a reasoning item of a response's output; a ``text`` of None makes an item without content."""
    content = [] if text is None else [reasoning_part(text)]
    return {"id": item_id, "type": "reasoning", "summary": [], "content": content, "status": status}


def reasoning_part(text: str) -> dict[str, Any]:
    """Return ``text`` as a part of a reasoning item's content."""
    return {"type": "reasoning_text", "text": text}


def items(
    request_id: str, text: str, calls: Sequence[Call], status: str, thought: str = ""
) -> list[dict[str, Any]]:
    """Return the output items of a complete answer: its reasoning, its text as a message, then its calls.

    An empty text makes no message when there are calls.
    """
    found = []
    if thought:
        cut = status if not text and not calls else "completed"
        found.append(reasoning_item(f"rs_{request_id}", thought, cut))
    if text or not calls:
        found.append(message(_numbered(f"msg_{request_id}", len(found)), text, status))
    return found + [function_call(f"fc_{request_id}_{at}", call, status) for at, call in enumerate(calls)]


def _numbered(name: str, index: int) -> str:
    return f"{name}_{index}" if index else name


@dataclass(frozen=True, slots=True)
class _TextKind:
    """A kind of output item that has text: a message or reasoning.

    Attributes:
        prefix: Beginning of the item's id.
        event: Beginning of the types of the events that report the text.
        item: Function that makes the item from its id, its text and its status.
        part: Function that makes the content part from the text.
        more: Further members of the events that report the text.
    """

    prefix: str
    event: str
    item: Callable[[str, str | None, str], dict[str, Any]]
    part: Callable[[str], dict[str, Any]]
    more: dict[str, Any]


_MESSAGE = _TextKind("msg", "response.output_text", message, part, {"logprobs": []})
_REASONING = _TextKind("rs", "response.reasoning_text", reasoning_item, reasoning_part, {})


class OutputEvents:
    """Writer of the events of one streamed response, which also collects the completed output items.

    At most one item (a message, reasoning or a function call) is open, which means incomplete, at a time.
    """

    def __init__(self, request_id: str) -> None:
        self.items: list[dict[str, Any]] = []  # output items that are complete
        self._request_id = request_id
        self._number = 0
        self._kind: _TextKind | None = None  # kind of the output item being streamed; None if it has no text
        self._text = ""  # text of the output item being streamed
        self._call: Call | None = None  # the function call that is open, None when no call is
        self._index = -1  # index of the open call among the calls of the response

    def numbered_event(self, kind: str, **fields: Any) -> bytes:
        """Return an event of type ``kind`` with the next sequence number."""
        self._number += 1
        return event({"type": kind, "sequence_number": self._number - 1, **fields})

    def text(self, text: str) -> bytes:
        """Return the events that append ``text`` to the open message; if none is open, open one first."""
        return self._append(_MESSAGE, text)

    def reasoning(self, text: str) -> bytes:
        """Return the events that append ``text`` to the open reasoning; if none is open, open one first."""
        return self._append(_REASONING, text)

    def _append(self, kind: _TextKind, text: str) -> bytes:
        events = b""
        if self._kind is not kind:
            events += self.close("completed")
            self._kind, self._text = kind, ""
            events += self._open(kind.item(self._text_id, None, "in_progress"))
            events += self.numbered_event("response.content_part.added", **self._place, part=kind.part(""))
        if text:
            self._text += text
            events += self.numbered_event(f"{kind.event}.delta", **self._place, delta=text, **kind.more)
        return events

    def call(self, delta: CallDelta) -> bytes:
        """Return the events that append ``delta`` to the open function call.

        A new call first completes the item that is open.
        """
        events = b""
        if self._call is None or delta.index != self._index:
            events += self.close("completed")
            self._call = Call(delta.id or new_call_id(), delta.name or "", "")
            self._index = delta.index
            events += self._open(function_call(self._call_id, self._call, "in_progress"))
        if delta.arguments:
            self._call.arguments += delta.arguments
            events += self.numbered_event(
                "response.function_call_arguments.delta",
                item_id=self._call_id,
                output_index=len(self.items),
                delta=delta.arguments,
            )
        return events

    def close(self, status: str) -> bytes:
        """Complete the open item, if any, and return its last events; ``status`` becomes the item's status."""
        if (kind := self._kind) is not None:
            text, place = self._text, self._place
            events = self.numbered_event(f"{kind.event}.done", **place, text=text, **kind.more)
            events += self.numbered_event("response.content_part.done", **place, part=kind.part(text))
            item = kind.item(self._text_id, text, status)
        elif self._call is not None:
            events = self.numbered_event(
                "response.function_call_arguments.done",
                item_id=self._call_id,
                output_index=len(self.items),
                name=self._call.name,
                arguments=self._call.arguments,
            )
            item = function_call(self._call_id, self._call, status)
        else:
            return b""
        events += self.numbered_event("response.output_item.done", output_index=len(self.items), item=item)
        self.items.append(item)
        self._kind = self._call = None
        return events

    def _open(self, item: dict[str, Any]) -> bytes:
        return self.numbered_event("response.output_item.added", output_index=len(self.items), item=item)

    @property
    def _text_id(self) -> str:
        assert self._kind is not None  # callers read _text_id only while a message or reasoning item is open
        return _numbered(f"{self._kind.prefix}_{self._request_id}", len(self.items))

    @property
    def _call_id(self) -> str:
        return f"fc_{self._request_id}_{self._index}"

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._text_id, "output_index": len(self.items), "content_index": 0}
