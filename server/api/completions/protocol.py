"""Bodies of /v1/completions: OpenAI's fields and the honoured extensions of vLLM."""

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
    """Body of POST /v1/completions; the ranges are of OpenAI's API reference."""

    prompt: str | Texts | TokenIds | TokenIdLists
    suffix: str | None = Field(None, description="text after the completion, for fill-in-the-middle models")
    max_tokens: TokenCount | None = Field(None, description="0 only with echo: the prompt's own logprobs")
    n: int | None = Field(None, ge=1, le=128)
    best_of: int | None = Field(None, ge=1, le=128)
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    response_format: ResponseFormat | None = None

    def grammar(self) -> Grammar | None:
        """Return the grammar that the answer must match, or None."""
        return grammar_of(self.response_format) or super().grammar()


FIELDS = Fields(
    model=CompletionRequest,
    table=COMPLETION,
    # Descriptions of union fields for error messages, because pydantic reports one error per member.
    expected={
        "prompt": "a string, a list of strings, a list of token ids or a list of lists of token ids",
        "stop": STOP_EXPECTED,
    },
)


class PromptTokensDetails(BaseModel):
    """Details of the prompt tokens; ``cached_tokens`` had their keys and values in the prefix cache."""

    cached_tokens: int


class Usage(BaseModel):
    """Token counts over all prompts and choices of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Choice(BaseModel):
    """One completion; ``finish_reason`` is null only in a stream's chunks before the last."""

    index: int
    text: str
    logprobs: dict[str, list[Any]] | None = None
    finish_reason: Literal["stop", "length"] | None


class Completion(BaseModel):
    """A whole answer or one chunk of a stream, which have the same form in OpenAI's API."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[Choice]
    system_fingerprint: str
    usage: Usage | None = None
