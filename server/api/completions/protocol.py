"""Bodies of /v1/completions: OpenAI's fields, and those of vLLM that are honoured here."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from tonnage.server.api.body import Fields
from tonnage.server.api.fields import COMPLETION
from tonnage.server.api.sampling import (
    MAX_TOP_LOGPROBS,
    STOP_EXPECTED,
    ResponseFormat,
    SamplingFields,
    TokenCount,
    TokenId,
    grammar_of,
)
from tonnage.server.text.grammar import Grammar

TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Texts = Annotated[list[str], Field(min_length=1, fail_fast=True)]
TokenIdLists = Annotated[list[TokenIds], Field(min_length=1, fail_fast=True)]


class CompletionRequest(SamplingFields):
    """POST /v1/completions. Ranges as in OpenAI's API reference."""

    prompt: str | Texts | TokenIds | TokenIdLists
    suffix: str | None = Field(None, description="what comes after the answer, for models that fill in")
    max_tokens: TokenCount | None = Field(None, description="0 only with echo: the prompt's own logprobs")
    n: int | None = Field(None, ge=1, le=128)
    best_of: int | None = Field(None, ge=1, le=128)
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    response_format: ResponseFormat | None = None

    def grammar(self) -> Grammar | None:
        return grammar_of(self.response_format) or super().grammar()


FIELDS = Fields(
    model=CompletionRequest,
    table=COMPLETION,
    # What a field takes, for messages about unions (pydantic reports one error for each member).
    expected={
        "prompt": "a string, a list of strings, a list of token ids or a list of lists of token ids",
        "stop": STOP_EXPECTED,
    },
)


class PromptTokensDetails(BaseModel):
    """``cached_tokens``: prompt tokens whose K/V came from the prefix cache."""

    cached_tokens: int


class Usage(BaseModel):
    """Tokens of all prompts and choices of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Choice(BaseModel):
    """One completion. ``finish_reason`` is null only in the chunks of a stream before the last."""

    index: int
    text: str
    logprobs: dict[str, list[Any]] | None = None
    finish_reason: Literal["stop", "length"] | None


class Completion(BaseModel):
    """A whole answer, or one chunk of a stream (the same shape, as in OpenAI's API)."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[Choice]
    system_fingerprint: str
    usage: Usage | None = None
