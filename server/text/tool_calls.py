"""Data types of tool calls, and the interface of the parsers that find calls in generated text."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from tonnage.server.text.grammar import Grammar

# A function tool as the dict that chat templates expect: {"type": "function", "function": {name, description,
# parameters}}.
ToolDict = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of an answer's tool call; ``index`` is the number of the call in the answer.

    Only the first piece of a call has its ``id`` and ``name``.
    """

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


@dataclass(slots=True)
class Call:
    """A complete tool call; ``arguments`` is the JSON text that the model wrote."""

    id: str
    name: str
    arguments: str


class CallReader(Protocol):
    """Interface of a parser that separates the tool calls in one answer from the rest of its text.

    Each method returns the text outside of calls, and the calls.
    """

    def push(self, text: str, token_ids: Sequence[int], *, finished: bool) -> tuple[str, Sequence[CallDelta]]:
        """Parse the next part of the answer; ``finished`` says whether it is the last."""

    def whole(self, text: str, token_ids: Sequence[int]) -> tuple[str, Sequence[CallDelta]]:
        """Parse the complete text of an answer."""


class ToolParser(Protocol):
    """Interface to the tool-call format of one model family.

    ``tonnage.server.engines.vllm.tool_parser`` implements it with vLLM's parsers.
    """

    def use(
        self, tools: Sequence[ToolDict], messages: Sequence[Mapping[str, Any]], *, parallel: bool
    ) -> ToolUse:
        """Return how a request with these tools is prompted, generated and parsed."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How a request uses tools in its prompt, its generation and the parsing of its answer.

    Attributes:
        shown: The tools that the chat template shows to the model.
        grammar: The grammar that the answer must match, or None.
        special_tokens: Whether the parser needs special tokens in the text.
        reader: Function that creates the parser of one answer; None when no calls are expected.
    """

    shown: tuple[ToolDict, ...] = ()
    grammar: Grammar | None = None
    special_tokens: bool = False
    reader: Callable[[], CallReader] | None = None


def new_call_id() -> str:
    """Return a new random id for a tool call."""
    return f"call_{uuid.uuid4().hex[:24]}"


def merged(deltas: Sequence[CallDelta]) -> list[CallDelta]:
    """Return ``deltas`` with all pieces of a call joined into one piece per call."""
    pieces: dict[int, CallDelta] = {}
    for delta in deltas:
        if begun := pieces.get(delta.index):
            delta = replace(begun, arguments=begun.arguments + delta.arguments)
        pieces[delta.index] = delta
    return list(pieces.values())


def calls_of(deltas: Sequence[CallDelta]) -> list[Call]:
    """Return the complete calls that the pieces ``deltas`` make up."""
    calls: dict[int, Call] = {}
    for delta in deltas:
        call = calls.setdefault(delta.index, Call(delta.id or new_call_id(), "", ""))
        call.name += delta.name or ""
        call.arguments += delta.arguments
    return list(calls.values())
