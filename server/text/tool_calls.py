"""Calls of tools as values: what an engine's text is read into, and who reads it."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from tonnage.server.text.grammar import Grammar

# A function as templates know it: {"type": "function", "function": {name, description, parameters}}.
ToolDict = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of call number ``index``; its ``id`` and ``name`` come once, with the first piece."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


@dataclass(slots=True)
class Call:
    """A whole call. ``arguments``: JSON as the model wrote it."""

    id: str
    name: str
    arguments: str


class CallReader(Protocol):
    """Reads the calls out of one answer. Each method gives the text that is no call, and the calls."""

    def push(
        self, text: str, token_ids: Sequence[int], *, finished: bool
    ) -> tuple[str, Sequence[CallDelta]]: ...

    def whole(self, text: str, token_ids: Sequence[int]) -> tuple[str, Sequence[CallDelta]]:
        """The same for an answer that is complete."""
        ...


class ToolParser(Protocol):
    """Knows how one family of models writes calls (``tonnage.server.engines.vllm.tool_parser``)."""

    def use(
        self, tools: Sequence[ToolDict], messages: Sequence[Mapping[str, Any]], *, parallel: bool
    ) -> ToolUse: ...


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What one request's tools come to. ``shown``: for the template. ``reader`` makes one for each answer;
    None: nothing is looked for."""

    shown: tuple[ToolDict, ...] = ()
    grammar: Grammar | None = None
    special_tokens: bool = False
    reader: Callable[[], CallReader] | None = None


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def merged(deltas: Sequence[CallDelta]) -> list[CallDelta]:
    """``deltas`` with one piece for each call."""
    pieces: dict[int, CallDelta] = {}
    for delta in deltas:
        if begun := pieces.get(delta.index):
            delta = replace(begun, arguments=begun.arguments + delta.arguments)
        pieces[delta.index] = delta
    return list(pieces.values())


def calls_of(deltas: Sequence[CallDelta]) -> list[Call]:
    """The pieces put together."""
    calls: dict[int, Call] = {}
    for delta in deltas:
        call = calls.setdefault(delta.index, Call(delta.id or new_call_id(), "", ""))
        call.name += delta.name or ""
        call.arguments += delta.arguments
    return list(calls.values())
