"""Tool calls as values, and the interface of the parsers that find them in generated text."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from tonnage.server.text.grammar import Grammar

# A function in the format of chat templates: {"type": "function", "function": {name, description, parameters}}.
ToolDict = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of call number ``index``; only the first piece has its ``id`` and ``name``."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


@dataclass(slots=True)
class Call:
    """A complete call; ``arguments`` is JSON as the model wrote it."""

    id: str
    name: str
    arguments: str


class CallReader(Protocol):
    """Parser of the calls in one answer; each method returns the text outside of calls, and the calls."""

    def push(self, text: str, token_ids: Sequence[int], *, finished: bool) -> tuple[str, Sequence[CallDelta]]:
        """Parse more of the answer; ``finished`` marks its end."""

    def whole(self, text: str, token_ids: Sequence[int]) -> tuple[str, Sequence[CallDelta]]:
        """Parse a complete answer."""


class ToolParser(Protocol):
    """Support for the call format of one model family (``tonnage.server.engines.vllm.tool_parser``)."""

    def use(
        self, tools: Sequence[ToolDict], messages: Sequence[Mapping[str, Any]], *, parallel: bool
    ) -> ToolUse:
        """Return how a request with these tools is generated and parsed."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """A request's use of tools in its prompt, generation and parsing.

    Attributes:
        shown: The tools that the chat template shows.
        grammar: The grammar of the answer, or None.
        special_tokens: Whether the parser needs special tokens in the text.
        reader: Factory of a parser per answer; None when no calls are expected.
    """

    shown: tuple[ToolDict, ...] = ()
    grammar: Grammar | None = None
    special_tokens: bool = False
    reader: Callable[[], CallReader] | None = None


def new_call_id() -> str:
    """Return a new random id of a call."""
    return f"call_{uuid.uuid4().hex[:24]}"


def merged(deltas: Sequence[CallDelta]) -> list[CallDelta]:
    """Join ``deltas`` into one piece per call."""
    pieces: dict[int, CallDelta] = {}
    for delta in deltas:
        if begun := pieces.get(delta.index):
            delta = replace(begun, arguments=begun.arguments + delta.arguments)
        pieces[delta.index] = delta
    return list(pieces.values())


def calls_of(deltas: Sequence[CallDelta]) -> list[Call]:
    """Join ``deltas`` into complete calls."""
    calls: dict[int, Call] = {}
    for delta in deltas:
        call = calls.setdefault(delta.index, Call(delta.id or new_call_id(), "", ""))
        call.name += delta.name or ""
        call.arguments += delta.arguments
    return list(calls.values())
