"""Bodies of /v1/responses: text, function calls and reasoning. The server stores no response."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, Field, TypeAdapter

from tonnage.server.api.body import Fields
from tonnage.server.api.chat.protocol import Dropped, Effort, FunctionName, RefusalPart, effort_arguments
from tonnage.server.api.fields import RESPONSES
from tonnage.server.api.json_body import MAX_ITEMS
from tonnage.server.api.sampling import STOP_EXPECTED, AtLeastOne, SamplingFields, StrictModel
from tonnage.server.api.tools import drop_tools
from tonnage.server.text.grammar import Grammar


class InputText(StrictModel):
    """A text part of the content of an input message."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    parsed: Annotated[Any, Dropped] = None  # the openai client's parse() adds this field


InputTexts = Annotated[list[InputText], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)]


MessageParts = Annotated[
    list[InputText | RefusalPart], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)
]


class InputMessage(StrictModel):
    """A message of the conversation; an output message of an earlier response may be sent back unchanged."""

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: str | MessageParts
    id: str | None = None
    status: Literal["completed", "incomplete", "in_progress"] | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class FunctionCallItem(StrictModel):
    """A function call of an earlier response, sent back unchanged."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    # the openai client's parse() adds this field
    parsed_arguments: Annotated[Any, Dropped] = None

    # the openai client 3 sends ``async`` as ``async_``
    async_: None = Field(None, validation_alias=AliasChoices("async", "async_"))
    caller: None = None
    namespace: None = None
    id: str | None = None
    status: Literal["completed", "incomplete", "in_progress"] | None = None


class FunctionCallOutput(StrictModel):
    """The result of a function call, which the client sends back to the model."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | InputTexts
    id: str | None = None
    status: Literal["completed", "incomplete", "in_progress"] | None = None


class ReasoningText(StrictModel):
    """A text part of the assistant's reasoning."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


ReasoningTexts = Annotated[list[ReasoningText], Field(max_length=MAX_ITEMS, fail_fast=True)]


class ReasoningItem(StrictModel):
    """The assistant's reasoning before its next message or call; only ``content`` has an effect.

    The ``summary`` is meant for users. ``encrypted_content`` must be null, because only the server that
    encrypted it could read it.
    """

    type: Literal["reasoning"]
    summary: ReasoningTexts
    content: ReasoningTexts | None = None
    encrypted_content: None = None
    id: str | None = None
    status: Literal["completed", "incomplete", "in_progress"] | None = None


class FunctionTool(StrictModel):
    """A function that the model may call; ``parameters`` is a JSON schema or absent."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def for_template(self) -> dict[str, Any]:
        """Return the tool in the format of chat completions, which chat templates expect."""
        return {"type": "function", "function": self.model_dump(exclude={"type"}, exclude_none=True)}


class NamedFunctionTool(StrictModel):
    """A value of ``tool_choice`` that forces the model to call one named function."""

    type: Literal["function"]
    name: FunctionName


class AllowedFunctionTools(StrictModel):
    """A value of ``tool_choice`` that restricts the request to some of its tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedFunctionTool] = Field(min_length=1, max_length=128, fail_fast=True)


class TextFormat(StrictModel):
    """The format of the answer's text: free text, a JSON object, or a JSON schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(StrictModel):
    """OpenAI's ``text`` options; ``verbosity`` has no effect."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(StrictModel):
    """OpenAI's ``reasoning`` options; only ``effort`` has an effect, in chat templates that read it."""

    effort: Effort | None = None
    summary: Annotated[str | None, Dropped] = None
    generate_summary: Annotated[str | None, Dropped] = None


# Values of ``include`` that have no effect, because this server never returns the items that they extend.
_INCLUDED_NOWHERE = frozenset({
    "reasoning.encrypted_content", "web_search_call.action.sources", "web_search_call.results",
    "file_search_call.results", "code_interpreter_call.outputs", "computer_call_output.output.image_url",
    "message.input_image.image_url",
})  # fmt: skip


def _drop_defaults(document: dict[str, Any]) -> list[str]:
    """Remove fields that clients such as Codex send by default and that have no effect; return their names."""
    ignored = drop_tools(document, ("custom", "namespace", "web_search"))
    include = document.get("include")
    if isinstance(include, list):
        kept = [value for value in include if not isinstance(value, str) or value not in _INCLUDED_NOWHERE]
        if len(kept) < len(include):
            document["include"] = kept
            ignored.append("include")
    return ignored


# OpenAI's limits of the characters in a metadata key and value (API reference, "metadata")
MetadataName = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]
InputItem = InputMessage | FunctionCallItem | FunctionCallOutput | ReasoningItem


class ResponseRequest(SamplingFields):
    """Body of POST /v1/responses."""

    input: str | Annotated[list[InputItem], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: AtLeastOne | None = None
    metadata: dict[MetadataName, MetadataValue] | None = Field(None, max_length=16)
    text: TextOptions | None = None
    tools: list[FunctionTool] | None = Field(None, max_length=128, fail_fast=True)
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionTool | AllowedFunctionTools | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning: ReasoningOptions | None = None
    include_reasoning: bool | None = None

    def items(self) -> int:
        """Return the number of items in the conversation."""
        return 1 if isinstance(self.input, str) else len(self.input)

    def template_arguments(self) -> dict[str, Any]:
        """Return the variables that the request passes to the chat template."""
        effort = self.reasoning.effort if self.reasoning else None
        return effort_arguments(effort) | (self.chat_template_kwargs or {})

    def grammar(self) -> Grammar | None:
        """Return the grammar (JSON schema, regex, choices ...) that the answer must match, or None."""
        form = self.text.format if self.text else None
        if form is None or form.type == "text":
            return super().grammar()
        if form.type == "json_object":
            return Grammar("json_object")
        return Grammar("json_schema", json.dumps(form.schema_ or {}))


FIELDS = Fields(
    model=ResponseRequest,
    table=RESPONSES,
    expected={
        "input": "a string or a list of messages with text, function calls, their outputs and reasoning "
        "(the model takes no images, sounds or files)",
        "tool_choice": 'none, auto, required, {"type": "function", "name": ...} or {"type": "allowed_tools", '
        '"mode": ..., "tools": [...]}',
        "stop": STOP_EXPECTED,
    },
    drop=_drop_defaults,
    items={"input": TypeAdapter(InputItem)},
)


class ResponseBody(BaseModel):
    """OpenAI's response object for the OpenAPI document; the server builds its responses as dicts."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None = None
