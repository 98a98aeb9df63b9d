"""Bodies of Anthropic's /v1/messages and /v1/messages/count_tokens (API version 2023-06-01).

Sources: the types of the ``anthropic`` package 2.14, and vLLM 0.32's entrypoints/anthropic.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, TypeAdapter

from tonnage.server.api.body import Fields
from tonnage.server.api.chat.protocol import Dropped
from tonnage.server.api.fields import COUNT_TOKENS, MESSAGES
from tonnage.server.api.json_body import MAX_ITEMS
from tonnage.server.api.sampling import AtLeastOne, EngineBody, StopStringList, StrictModel, short_stop
from tonnage.server.api.tools import drop_tools

# Anthropic's rule for names of tools.
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]
# Type of the field cache_control, which marks prefixes for Anthropic's prompt cache. The server's prefix cache
# needs no such marks, so the field has no effect.
CacheControl = Annotated[dict[str, Any] | None, Dropped]


class TextBlock(StrictModel):
    """A text block of a message, a system prompt or a tool result."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl = None
    citations: Annotated[Any, Dropped] = None


class ThinkingBlock(StrictModel):
    """The assistant's reasoning in an earlier answer; the server does not check ``signature``."""

    type: Literal["thinking"]
    thinking: str
    signature: Annotated[str | None, Dropped] = None


class RedactedThinkingBlock(StrictModel):
    """Encrypted reasoning, which only the server that encrypted it can read; it has no effect."""

    type: Literal["redacted_thinking"]
    data: Annotated[str, Dropped]


class ToolUseBlock(StrictModel):
    """A tool call of the assistant in an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl = None
    caller: Annotated[Any, Dropped] = None
    toolset_name: Annotated[str | None, Dropped] = None


class ToolResultBlock(StrictModel):
    """The result of a tool call, which the client sends back to the model; ``is_error`` has no effect."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[list[TextBlock], Field(max_length=MAX_ITEMS, fail_fast=True)] | None = None
    is_error: bool | None = None
    cache_control: CacheControl = None
    toolset_name: Annotated[str | None, Dropped] = None


Block = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock,
    Field(discriminator="type"),
]


class AnthropicMessage(StrictModel):
    """One turn of the conversation; if the last turn is the assistant's, the answer continues it."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Field(max_length=MAX_ITEMS, fail_fast=True)]


class AnthropicTool(StrictModel):
    """A function that the model may call, declared by the client; Anthropic's predefined tools are rejected."""

    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: CacheControl = None
    allowed_callers: Annotated[Any, Dropped] = None
    defer_loading: Annotated[bool | None, Dropped] = None
    eager_input_streaming: Annotated[bool | None, Dropped] = None
    input_examples: Annotated[Any, Dropped] = None


class AnthropicToolChoice(StrictModel):
    """Anthropic's ``tool_choice``: whether the model decides to call a tool, must call one, or must not."""

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None


class JsonFormat(StrictModel):
    """The JSON schema that the answer must match."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(StrictModel):
    """Anthropic's ``output_config``: the answer's format, and the effort, which some chat templates use."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class Thinking(StrictModel):
    """Anthropic's ``thinking``: ``type`` sets ``enable_thinking`` of chat templates, the rest has no effect."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int | None, Dropped] = None
    display: Annotated[str | None, Dropped] = None


class CountTokensRequest(StrictModel):
    """Body of POST /v1/messages/count_tokens: the part of a request that makes up its prompt."""

    model: str
    messages: Annotated[list[AnthropicMessage], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)]
    system: str | Annotated[list[TextBlock], Field(max_length=MAX_ITEMS, fail_fast=True)] | None = None
    tools: list[AnthropicTool] | None = Field(None, max_length=128, fail_fast=True)
    tool_choice: AnthropicToolChoice | None = None
    output_config: OutputConfig | None = None
    thinking: Thinking | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(CountTokensRequest, EngineBody):
    """Body of POST /v1/messages."""

    max_tokens: AtLeastOne
    stream: bool | None = None
    stop_sequences: Annotated[StopStringList | None, AfterValidator(short_stop)] = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_k: int | None = Field(None, ge=0, lt=2**31)
    top_p: float | None = Field(None, gt=0, le=1)


# Types of tools that Anthropic's servers run. The model is not told of them, and so it does not call them.
_SERVER_TOOLS = ("web_search_", "web_fetch_", "code_execution_", "tool_search_tool_")


def _server_tools(document: dict[str, Any]) -> list[str]:
    return drop_tools(document, _SERVER_TOOLS)


_EXPECTED = {
    "content": "a string or a list of blocks of type text, tool_use, tool_result or thinking (the model takes "
    "no images and documents)",
    "system": "a string or a list of text blocks",
}

_ITEMS = {"messages": TypeAdapter(AnthropicMessage)}

FIELDS = Fields(MessagesRequest, MESSAGES, _EXPECTED, _server_tools, _ITEMS)
COUNT_FIELDS = Fields(CountTokensRequest, COUNT_TOKENS, _EXPECTED, _server_tools, _ITEMS)


class AnthropicUsage(BaseModel):
    """Anthropic's token counts; ``input_tokens`` are those that were not found in the prefix cache."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens_details: dict[str, int] | None = None


class AnthropicAnswer(BaseModel):
    """Anthropic's message object for the OpenAPI document; the server builds its answers as dicts."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: AnthropicUsage


class InputTokens(BaseModel):
    """Answer of /v1/messages/count_tokens."""

    input_tokens: int
