"""Bodies of /v1/chat/completions: OpenAI's fields, and those of vLLM that are honoured here."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from tonnage.server.api.body import Fields
from tonnage.server.api.completions.protocol import Usage
from tonnage.server.api.document import MAX_ITEMS
from tonnage.server.api.fields import CHAT
from tonnage.server.api.sampling import (
    MAX_TOP_LOGPROBS,
    STOP_EXPECTED,
    STRICT,
    AtLeastOne,
    ResponseFormat,
    SamplingFields,
    grammar_of,
)
from tonnage.server.text.grammar import Grammar

# OpenAI's rule for names of functions.
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class TextPart(BaseModel):
    """The one kind of content part a text model takes."""

    model_config = STRICT

    type: Literal["text"]
    text: str


class RefusalPart(BaseModel):
    """What an assistant declined with, among the parts of its message."""

    model_config = STRICT

    type: Literal["refusal"]
    refusal: str


# What only a client's types know of an answer, and its next request brings back: without effect here, and in
# nothing that the server writes.
Unread = Field(None, exclude=True)


class FunctionCall(BaseModel):
    model_config = STRICT

    name: str
    arguments: str
    parsed_arguments: Any = Unread  # openai: of parse()


class ToolCall(BaseModel):
    """A call the assistant made earlier in the conversation."""

    model_config = STRICT

    id: str
    type: Literal["function"]
    function: FunctionCall
    index: int | None = Unread  # of a message put together from the deltas of a stream


class Message(BaseModel):
    """One message of any role. ``content`` may only be left out by an assistant: it called tools, or declined.

    An answer may come back as it is in a client's types, with nulls for all that the server did not say.
    ``reasoning``: what an assistant thought, by vLLM's name; ``reasoning_content`` by the name before that.
    """

    model_config = STRICT

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
    annotations: Annotated[list[Any], Field(max_length=MAX_ITEMS)] | None = Unread
    parsed: Any = Unread  # openai: of parse()
    provider_specific_fields: dict[str, Any] | None = Unread  # litellm
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_ITEMS, fail_fast=True)] | None = None
    tool_call_id: str | None = None

    def text(self) -> str:
        """The content as one text, or what the assistant declined with."""
        if isinstance(self.content, list):
            return "".join(p.text if isinstance(p, TextPart) else p.refusal for p in self.content)
        return (self.refusal or "") if self.content is None else self.content

    @property
    def declines(self) -> bool:
        """Whether a part of the content is a refusal."""
        return isinstance(self.content, list) and any(isinstance(p, RefusalPart) for p in self.content)


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)]


class FunctionDefinition(BaseModel):
    """``parameters``: a JSON schema; left out, the function takes none."""

    model_config = STRICT

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    """A function the model may call."""

    model_config = STRICT

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(BaseModel):
    model_config = STRICT

    name: FunctionName


class NamedTool(BaseModel):
    """The one function that must be called."""

    model_config = STRICT

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class ChatRequest(SamplingFields):
    """POST /v1/chat/completions. Ranges as in OpenAI's API reference."""

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

    def grammar(self) -> Grammar | None:
        return grammar_of(self.response_format) or super().grammar()


CONTENT_EXPECTED = "a string or a list of text parts (the model takes no images, sounds or files)"

CHOICE_EXPECTED = 'none, auto, required or {"type": "function", "function": {"name": ...}}'

FIELDS = Fields(
    model=ChatRequest,
    table=CHAT,
    expected={"stop": STOP_EXPECTED, "content": CONTENT_EXPECTED, "tool_choice": CHOICE_EXPECTED},
)


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(BaseModel):
    content: list[TokenLogprob]
    refusal: None = None


class AssistantMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None
    annotations: list[Any] = []


class ToolCallMessage(BaseModel):
    """An assistant's message that calls tools; ``tool_calls`` is absent, not null, in one that does not."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    annotations: list[Any] = []
    tool_calls: list[ToolCall]


class ChatChoice(BaseModel):
    index: int
    message: ToolCallMessage | AssistantMessage
    logprobs: ChoiceLogprobs | None = None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(BaseModel):
    """A whole answer."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    system_fingerprint: str
    usage: Usage
