"""Bodies of /v1/chat/completions: OpenAI's fields and the honoured extensions of vLLM."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, TypeAdapter

from tonnage.server.api.body import Fields
from tonnage.server.api.completions.protocol import Usage
from tonnage.server.api.fields import CHAT
from tonnage.server.api.json_body import MAX_ITEMS
from tonnage.server.api.sampling import (
    MAX_TOP_LOGPROBS,
    STOP_EXPECTED,
    AtLeastOne,
    ResponseFormat,
    StrictModel,
    grammar_of,
)
from tonnage.server.api.token_output import PromptScores, TokenOutputFields, is_none
from tonnage.server.text.grammar import Grammar

# OpenAI's rule for names of functions.
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class TextPart(StrictModel):
    """A text part of a message's content; a text model takes no other part except a refusal."""

    type: Literal["text"]
    text: str


class RefusalPart(StrictModel):
    """A part of an assistant's message that holds the text of a refusal."""

    type: Literal["refusal"]
    refusal: str


def _drop(_: Any) -> None:
    """Return None in place of a validated value, so that a waiting request does not keep it in memory."""


# Type of a field that clients copy from an earlier response into their next request. The server accepts it,
# gives it no effect, never sends it, and keeps no value of it.
Unread = Field(None, exclude=True)
Dropped = AfterValidator(_drop)


class FunctionCall(StrictModel):
    """The name and arguments of a tool call; the arguments are a string of JSON."""

    name: str
    arguments: str
    parsed_arguments: Annotated[Any, Dropped] = Unread  # the openai client's parse() adds this field


class ToolCall(StrictModel):
    """A tool call that the assistant made earlier in the conversation."""

    id: str
    type: Literal["function"]
    function: FunctionCall
    # clients that built the message from the deltas of a stream send this field, too
    index: int | None = Unread


class Message(StrictModel):
    """One message of a conversation, of any role.

    Only an assistant's message with tool calls or a refusal may leave out ``content``. A client may send
    back an earlier answer with further fields that are null. ``reasoning`` is vLLM's field for the assistant's
    reasoning, and ``reasoning_content`` the older name.
    """

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: (
        str
        | Annotated[list[TextPart | RefusalPart], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)]
        | None
    ) = None
    name: str | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    audio: None = Unread
    function_call: None = Unread
    annotations: Annotated[Annotated[list[Any], Field(max_length=MAX_ITEMS)] | None, Dropped] = Unread
    parsed: Annotated[Any, Dropped] = Unread  # the openai client's parse() adds this field
    # litellm's client adds this field
    provider_specific_fields: Annotated[dict[str, Any] | None, Dropped] = Unread
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_ITEMS, fail_fast=True)] | None = None
    tool_call_id: str | None = None

    def text(self) -> str:
        """Return the content as one text, or the assistant's refusal when there is no content."""
        if isinstance(self.content, list):
            return "".join(p.text if isinstance(p, TextPart) else p.refusal for p in self.content)
        return (self.refusal or "") if self.content is None else self.content

    @property
    def declines(self) -> bool:
        """Return whether a part of the message's content is a refusal."""
        return isinstance(self.content, list) and any(isinstance(p, RefusalPart) for p in self.content)


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)]


class FunctionDefinition(StrictModel):
    """A function that a tool describes: its name, description and the JSON schema of its parameters."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(StrictModel):
    """A function that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(StrictModel):
    """The name of a function, inside a ``tool_choice``."""

    name: FunctionName


class NamedTool(StrictModel):
    """A value of ``tool_choice`` that forces the model to call one named function."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(StrictModel):
    """The tools of a request that the model may call, and whether it must call one of them."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1, max_length=128, fail_fast=True)


class AllowedToolsChoice(StrictModel):
    """A value of ``tool_choice`` that restricts the request to some of its tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedToolsChoice


# OpenAI's and vLLM's values of the reasoning effort.
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def effort_arguments(effort: str | None) -> dict[str, Any]:
    """Return the arguments of a chat template that stand for a reasoning effort, as in vLLM 0.32.

    Templates read ``reasoning_effort``, or ``enable_thinking``, or neither.
    """
    return {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"}


class ChatRequest(TokenOutputFields):
    """Body of POST /v1/chat/completions, with the ranges of values from OpenAI's API reference."""

    messages: Messages
    max_tokens: AtLeastOne | None = Field(None, description="deprecated by OpenAI: max_completion_tokens")
    max_completion_tokens: AtLeastOne | None = None
    n: int | None = Field(None, ge=1, le=128)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    response_format: ResponseFormat | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = Field(None, max_length=128, fail_fast=True)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    include_reasoning: bool | None = None

    def template_arguments(self) -> dict[str, Any]:
        """Return the variables that the request passes to the chat template."""
        return effort_arguments(self.reasoning_effort) | (self.chat_template_kwargs or {})

    def grammar(self) -> Grammar | None:
        """Return the grammar (JSON schema, regex, choices ...) that the answer must match, or None."""
        return grammar_of(self.response_format) or super().grammar()


CONTENT_EXPECTED = "a string or a list of text parts (the model takes no images, sounds or files)"

CHOICE_EXPECTED = (
    'none, auto, required, {"type": "function", "function": {"name": ...}} or {"type": "allowed_tools", '
    '"allowed_tools": {"mode": ..., "tools": [...]}}'
)

FIELDS = Fields(
    model=ChatRequest,
    table=CHAT,
    expected={"stop": STOP_EXPECTED, "content": CONTENT_EXPECTED, "tool_choice": CHOICE_EXPECTED},
    items={"messages": TypeAdapter(Message)},
)


class TopLogprob(BaseModel):
    """One of the most likely tokens at a position, with its log probability."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A generated token with its log probability and the alternatives at its position."""

    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(BaseModel):
    """Log probabilities of the tokens of one choice."""

    content: list[TokenLogprob]
    refusal: None = None


class AssistantMessage(BaseModel):
    """An assistant's message of text, without tool calls.

    Its content is null when the answer was cut off before its text began.
    """

    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | None = Field(default=None, exclude_if=is_none)
    refusal: None = None
    annotations: list[Any] = []


class ToolCallMessage(AssistantMessage):
    """An assistant's message that calls tools.

    Messages without calls use AssistantMessage, because OpenAI leaves out their ``tool_calls`` instead of
    sending null.
    """

    tool_calls: list[ToolCall]


class ChatChoice(BaseModel):
    """One of the ``n`` answers that a chat completion contains."""

    index: int
    message: ToolCallMessage | AssistantMessage
    logprobs: ChoiceLogprobs | None = None
    finish_reason: Literal["stop", "length", "tool_calls"]
    token_ids: list[int] | None = Field(default=None, exclude_if=is_none)


class ChatCompletion(BaseModel):
    """A complete (not streamed) chat completion, as one JSON object."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    system_fingerprint: str
    usage: Usage
    prompt_token_ids: list[int] | None = Field(default=None, exclude_if=is_none)
    prompt_logprobs: PromptScores | None = Field(default=None, exclude_if=is_none)
