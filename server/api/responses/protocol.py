"""Bodies of /v1/responses: text in, text out, nothing stored."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from tonnage.server.api.body import Fields
from tonnage.server.api.fields import RESPONSES
from tonnage.server.api.sampling import STOP_EXPECTED, STRICT, SamplingFields
from tonnage.server.engines.base import Grammar


class InputText(BaseModel):
    model_config = STRICT

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class InputMessage(BaseModel):
    """A message of the conversation; an output message of an earlier response may be sent back as it came."""

    model_config = STRICT

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[InputText], Field(min_length=1)]
    id: str | None = None
    status: Literal["completed", "incomplete", "in_progress"] | None = None


class TextFormat(BaseModel):
    model_config = STRICT

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(BaseModel):
    model_config = STRICT

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponseRequest(SamplingFields):
    """POST /v1/responses."""

    input: str | Annotated[list[InputMessage], Field(min_length=1, max_length=10_000)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    metadata: dict[str, str] | None = Field(None, max_length=16)
    text: TextOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def grammar(self) -> Grammar | None:
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
        "input": "a string or a list of messages with text (the model takes no images, sounds, files or tools)",
        "stop": STOP_EXPECTED,
    },
)


class ResponseBody(BaseModel):
    """OpenAI's response object; built as a dict, because null and absent are different things in it."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None = None
