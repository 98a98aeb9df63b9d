"""Data types of tool calls and reasoning, and the interface of the parsers that find them in generated text."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

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


class Parsed(NamedTuple):
    """The result of parsing a piece of an answer: text, pieces of tool calls, and the reasoning before them."""

    text: str = ""
    calls: Sequence[CallDelta] = ()
    reasoning: str = ""


class AnswerReader(Protocol):
    """Interface of a parser that separates the tool calls and the reasoning in one answer from its text.

    ``reasoning_tokens`` is the number of tokens of the reasoning; it is known at the end of the answer.
    """

    reasoning_tokens: int

    def push(self, text: str, token_ids: Sequence[int], *, finished: bool) -> Parsed:
        """Parse the next part of an answer's text; ``finished`` says whether it is the last part."""

    def whole(self, text: str, token_ids: Sequence[int]) -> Parsed:
        """Parse an answer's complete text into text, tool calls and reasoning."""


class OutputParser(Protocol):
    """Interface of a parser for the tool calls and the reasoning of one model family.

    ``tonnage.server.engines.vllm.output_parser`` implements it with vLLM's parsers. ``reads_tools`` says
    whether the parser finds tool calls, and ``reads_reasoning`` whether it finds reasoning.
    """

    reads_tools: bool
    reads_reasoning: bool

    def use(
        self,
        tools: Sequence[ToolDict],
        messages: Sequence[Mapping[str, Any]],
        *,
        parallel: bool,
        grammar: Grammar | None,
        template_arguments: Mapping[str, Any],
    ) -> ToolUse:
        """Return how the ``tools`` of a request affect its prompt, its grammar and its answer's parsing."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The settings by which a request uses tools in its prompt, its generation and the parsing of its answer.

    Attributes:
        shown: The tools that the chat template shows to the model.
        grammar: The grammar that the answer must match, or None.
        special_tokens: Whether the parser needs special tokens in the text.
        reader: Function that takes the token ids of a prompt and creates the parser of one answer to it; None
            when neither calls nor reasoning are expected.
        reasons: Whether the answer may begin with reasoning, which is counted in the usage.
    """

    shown: tuple[ToolDict, ...] = ()
    grammar: Grammar | None = None
    special_tokens: bool = False
    reader: Callable[[Sequence[int]], AnswerReader] | None = None
    reasons: bool = False


def new_call_id() -> str:
    """Return a new random id for a tool call."""
    return f"call_{uuid.uuid4().hex[:24]}"


def merged(deltas: Sequence[CallDelta]) -> list[CallDelta]:
    """Return ``deltas``, pieces of tool calls, with the pieces of each call joined into one."""
    pieces: dict[int, CallDelta] = {}
    for delta in deltas:
        if begun := pieces.get(delta.index):
            delta = replace(begun, arguments=begun.arguments + delta.arguments)
        pieces[delta.index] = delta
    return list(pieces.values())


def calls_of(deltas: Sequence[CallDelta]) -> list[Call]:
    """Return the complete calls that the pieces ``deltas`` make up."""
    return [Call(call.id or new_call_id(), call.name or "", call.arguments) for call in merged(deltas)]
