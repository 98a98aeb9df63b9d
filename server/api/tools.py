"""Tools and reasoning of a request: what the chat template shows, and how calls are forced and parsed.

A required call (``tool_choice`` required, or a function by name) is forced with any model, by a grammar made
from the functions' JSON schemas. With ``tool_choice`` auto the model decides, and the model's tool parser finds
its calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tonnage.server.api.sampling import SamplingFields
from tonnage.server.engines.request import SamplingParams
from tonnage.server.errors import invalid_value, unsupported_parameter
from tonnage.server.requests.submission import Submission
from tonnage.server.state import ServerState
from tonnage.server.text.chat_template import SHIPPED
from tonnage.server.text.grammar import Grammar
from tonnage.server.text.tool_calls import CallDelta, Parsed, ToolDict, ToolUse, new_call_id

# Maximum number of tools in a request as it arrives. Tools without effect are then removed, and at most 128
# functions may remain, which is OpenAI's limit. Codex, which declares more tools without effect than other
# clients, sends about ten.
MAX_TOOLS = 1024
# JSON schema of the arguments of a function without parameters: only ``{}`` matches it
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
# keywords of a JSON schema that may allow properties which ``properties`` does not name
_OPEN_KEYWORDS = frozenset({
    "$ref", "allOf", "anyOf", "oneOf", "not", "if", "patternProperties", "additionalProperties",
    "unevaluatedProperties", "propertyNames", "minProperties", "dependentSchemas", "required", "enum", "const",
})  # fmt: skip


def tool_use(
    state: ServerState,
    tools: Sequence[ToolDict],
    choice: str | None,
    *,
    function: str | None = None,
    parallel: bool = True,
    messages: Sequence[Mapping[str, Any]] = (),
    grammar: Grammar | None = None,
    template_arguments: Mapping[str, Any] | None = None,
) -> ToolUse:
    """Return how a request's tools affect its prompt, its grammar and the parsing of its answer.

    Args:
        state: The app's state.
        tools: The functions, as the dicts that chat templates expect.
        choice: ``tool_choice``: none, auto or required.
        function: The name of the function that must be called, or None.
        parallel: Whether the model may call several functions in one answer.
        messages: The conversation so far, which some tool parsers need.
        grammar: A format that the request requires for answers without a call (``response_format``), or None.
            A forced call takes precedence over it.
        template_arguments: Arguments of the chat template, which some parsers of reasoning need.

    Raises:
        ApiError: The server, model or engine does not support the combination, or fields contradict each other.
    """
    if not tools:
        if function is not None or choice == "required":
            raise invalid_value("tool_choice is only allowed with tools", "tool_choice")
        return _without_tools(state, grammar, template_arguments)
    names = [tool["function"]["name"] for tool in tools]
    if len(set(names)) < len(names):
        raise invalid_value("two tools have the same name; give each a name of its own", "tools")
    if function is not None and function not in names:
        raise invalid_value(f"tool_choice: {function} is not among the tools", "tool_choice")
    if choice == "none":
        return _without_tools(state, grammar, template_arguments)
    if state.chat_template is None or not state.chat_template.knows_tools:
        raise unsupported_parameter(
            "tools is not supported: the model's chat template does not show tools; leave it out, or start the "
            f"server with --chat-template FILE (shipped: {', '.join(SHIPPED)})",
            "tools",
        )
    if function is not None or choice == "required":
        return _forced(state, tools, function, parallel)
    parser = state.output_parser
    if parser is None or not parser.reads_tools:
        raise unsupported_parameter(
            "tools with tool_choice auto is not supported: this server has no tool parser for the model; start "
            "it with --enable-auto-tool-choice --tool-call-parser NAME, or send tool_choice required, none or "
            "a function",
            "tools",
        )
    use = parser.use(
        tools,
        messages,
        parallel=parallel,
        grammar=grammar,
        template_arguments=template_arguments or {},
    )
    if use.grammar is not None and "grammar" not in state.honours:
        raise unsupported_parameter(
            "tools with strict functions, or parallel_tool_calls false, is not supported by this server's "
            "engine: it cannot constrain an answer to a grammar",
            "tools",
        )
    return use


def _without_tools(
    state: ServerState, grammar: Grammar | None, template_arguments: Mapping[str, Any] | None
) -> ToolUse:
    """Return the `ToolUse` of a request without tools; an answer that matches a grammar has no reasoning."""
    parser = state.output_parser
    if parser is None or not parser.reads_reasoning or grammar is not None:
        return ToolUse(grammar=grammar)
    return parser.use((), (), parallel=True, grammar=None, template_arguments=template_arguments or {})


def drop_tools(document: dict[str, Any], kinds: tuple[str, ...]) -> list[str]:
    """Remove from a request body the tools that clients offer by default and that the model can do without.

    Args:
        document: The body.
        kinds: The beginnings of the types of these tools.

    Returns:
        The places and types of the removed tools, for the header ``x-ignored-fields``.

    Raises:
        ApiError: The body has too many tools.
    """
    tools = document.get("tools")
    if not isinstance(tools, list):
        return []
    if len(tools) > MAX_TOOLS:
        raise invalid_value(f"tools has {len(tools)} items; at most {MAX_TOOLS} are allowed", "tools")
    types = [str(tool.get("type")) if isinstance(tool, dict) else "" for tool in tools]
    # only types that match _TYPE are removed, because the types become part of a response header
    dropped = {at: kind for at, kind in enumerate(types) if kind.startswith(kinds) and _TYPE.fullmatch(kind)}
    if dropped:
        document["tools"] = [tool for at, tool in enumerate(tools) if at not in dropped]
    return [f"tools.{at} ({kind})" for at, kind in dropped.items()]


def allowed_tools(tools: Sequence[ToolDict], names: Sequence[str]) -> list[ToolDict]:
    """Return the tools with these names (``tool_choice`` of type allowed_tools); the model sees no others.

    Raises:
        ApiError: A name is not among the tools.
    """
    known = {tool["function"]["name"] for tool in tools}
    for name in names:
        if name not in known:
            raise invalid_value(f"tool_choice: {name} is not among the tools", "tool_choice")
    return [tool for tool in tools if tool["function"]["name"] in names]


def submission_with_tools(
    request: SamplingFields,
    prompt: tuple[int, ...],
    params: SamplingParams,
    use: ToolUse,
    lora: str,
    n: int = 1,
    field: str = "messages",
) -> Submission:
    """Return the submission of a chat request to the engine, with the grammar that enforces tool calls.

    ``field`` is the field of the request's body that has the conversation.
    """
    return Submission(
        (prompt,),
        replace(params, grammar=use.grammar),
        n,
        request.stop_strings(),
        request.cache_salt or "",
        request.priority,
        use.special_tokens or request.skip_special_tokens is False,
        use.reader is not None,
        lora,
        field,
        bool(request.include_stop_str_in_output),
    )


def _forced(
    state: ServerState,
    tools: Sequence[ToolDict],
    function: str | None,
    parallel: bool,
) -> ToolUse:
    if "grammar" not in state.honours:
        raise unsupported_parameter(
            "tool_choice required, or a function by name, is not supported by this server's engine: it cannot "
            "constrain an answer to a grammar",
            "tool_choice",
        )
    schema = (
        _array_schema(tools, parallel)
        if function is None
        else next(_parameters(tool) for tool in tools if tool["function"]["name"] == function)
    )
    return ToolUse(
        tuple(tools), Grammar("json_schema", json.dumps(schema)), reader=lambda prompt: ForcedReader(function)
    )


def _parameters(tool: ToolDict) -> dict[str, Any]:
    """Return the JSON schema of a tool's arguments; a schema that names no property allows only ``{}``."""
    parameters = dict(tool["function"].get("parameters") or {})
    if not parameters.get("properties") and not _OPEN_KEYWORDS & parameters.keys():
        return parameters | _NO_PARAMETERS if parameters.get("type", "object") == "object" else parameters
    return parameters


def _array_schema(tools: Sequence[ToolDict], parallel: bool) -> dict[str, Any]:
    """Return the JSON schema of a list of calls ``{name, parameters}`` to any of ``tools``.

    The functions' ``$defs`` move to the root of the schema, where their references point.
    """
    shared: dict[str, dict[str, Any]] = {"$defs": {}, "definitions": {}}
    items = []
    for tool in tools:
        parameters = _parameters(tool)
        for where, known in shared.items():
            for name, schema in (parameters.pop(where, None) or {}).items():
                if known.setdefault(name, schema) != schema:
                    raise invalid_value(
                        f"tools: {where} has two different schemas named {name[:60]!r}; rename one of them",
                        "tools",
                    )
        items.append(
            {
                "type": "object",
                "properties": {"name": {"const": tool["function"]["name"]}, "parameters": parameters},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    array = {"type": "array", "minItems": 1, "items": {"anyOf": items}}
    return array | ({} if parallel else {"maxItems": 1}) | {name: defs for name, defs in shared.items() if defs}


_TYPE = re.compile(r"[a-z0-9_]{1,60}")
_HEAD = re.compile(r'[\s}]*[\[,]\s*\{\s*"name"\s*:\s*"([a-zA-Z0-9_-]+)"\s*,\s*"parameters"\s*:')


class ForcedReader:
    """Incremental parser of the text of a tool call that a grammar enforces.

    The text is either the arguments of ``function`` or, if it is None, an array of {name, parameters}.
    Arguments are passed on as written, even from a call that was cut off.
    """

    reasoning_tokens = 0

    def __init__(self, function: str | None) -> None:
        self._function = function
        self._rest = ""  # received text that is not parsed yet
        self._calls = 0
        self._value: _JsonValue | None = None  # reader of the current call's arguments, None between calls

    def whole(self, text: str, token_ids: Sequence[int]) -> Parsed:
        """Parse the complete text of an answer; return its tool calls. The result has no other text."""
        return self.push(text, token_ids, finished=True)

    def push(self, text: str, token_ids: Sequence[int], *, finished: bool) -> Parsed:
        """Parse the next text of an answer; return new pieces of tool calls. The result has no other text."""
        self._rest += text
        deltas: list[CallDelta] = []
        while (value := self._value or self._next_value(text, deltas)) is not None:
            piece, self._rest = value.push(self._rest)
            if piece:
                deltas.append(CallDelta(self._calls - 1, piece))
            self._value = None if value.ended else value
            if not value.ended:
                break
        return Parsed("", deltas)

    def _next_value(self, text: str, deltas: list[CallDelta]) -> _JsonValue | None:
        """Return a reader of the next call's arguments, and append the call's name to ``deltas``.

        ``text`` is the newest piece of the answer. Returns None if no call's arguments begin in it; in an array
        of calls they begin after a colon.
        """
        if self._function is not None:
            name = self._function
            if self._calls or not self._rest.strip():
                return None
        else:
            head = _HEAD.match(self._rest) if ":" in text else None
            if head is None:
                return None
            name, self._rest = head[1], self._rest[head.end() :]
        deltas.append(CallDelta(self._calls, id=new_call_id(), name=name))
        self._calls += 1
        return _JsonValue()


class _JsonValue:
    """Reader of a valid JSON value whose text arrives in pieces; it visits each character once."""

    def __init__(self) -> None:
        self.ended = False
        self._depth = 0  # number of open objects and lists
        self._begun = self._quoted = self._escaped = False

    def push(self, text: str) -> tuple[str, str]:
        """Split ``text``, the next piece of the answer, at the end of the JSON value.

        Returns:
            The text of the value, without blanks before the value; the text after the value.
        """
        if not self._begun:
            text = text.lstrip()
        for at, character in enumerate(text):
            self._begun = True
            if self._quoted:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._quoted = False
            elif character == '"':
                self._quoted = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]" and self._depth:
                self._depth -= 1
            elif not self._depth and (character in "},]" or character.isspace()):
                self.ended = True  # the value is a number or a word, and ends before this character
                return text[:at], text[at:]
            else:
                continue
            if not self._depth and not self._quoted:
                self.ended = True
                return text[: at + 1], text[at + 1 :]
        return text, ""
