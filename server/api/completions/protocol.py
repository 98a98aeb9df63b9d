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
    TokenCount,
    TokenId,
    grammar_of,
)
from tonnage.server.api.token_output import PromptScores, TokenOutputFields, is_none
from tonnage.server.text.grammar import Grammar

TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Texts = Annotated[list[str], Field(min_length=1, fail_fast=True)]
TokenIdLists = Annotated[list[TokenIds], Field(min_length=1, fail_fast=True)]


class CompletionRequest(TokenOutputFields):
    """Body of POST /v1/completions, with the ranges of values from OpenAI's API reference."""

    prompt: str | Texts | TokenIds | TokenIdLists
    suffix: str | None = Field(None, description="text after the completion, for fill-in-the-middle models")
    max_tokens: TokenCount | None = Field(None, description="0 only with echo: the prompt's own logprobs")
    n: int | None = Field(None, ge=1, le=128)
    best_of: int | None = Field(None, ge=1, le=128)
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    response_format: ResponseFormat | None = None

    def grammar(self) -> Grammar | None:
        """Return the grammar (JSON schema, regex, choices ...) that the answer must match, or None."""
        return grammar_of(self.response_format) or super().grammar()


FIELDS = Fields(
    model=CompletionRequest,
    table=COMPLETION,
    # pydantic reports one error for each type of a union. Error messages use these descriptions of the whole
    # field instead.
    expected={
        "prompt": "a string, a list of strings, a list of token ids or a list of lists of token ids",
        "stop": STOP_EXPECTED,
    },
)


class PromptTokensDetails(BaseModel):
    """Details of a request's prompt tokens; ``cached_tokens`` of them were found in the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    """Details of a request's completion tokens; ``reasoning_tokens`` of them are reasoning."""

    reasoning_tokens: int


class Usage(BaseModel):
    """Token counts over all prompts and choices of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = Field(default=None, exclude_if=is_none)


class Choice(BaseModel):
    """One completion of a prompt; in a stream, ``finish_reason`` is null until the choice's last chunk."""

    index: int
    text: str
    logprobs: dict[str, list[Any]] | None = None
    finish_reason: Literal["stop", "length"] | None
    token_ids: list[int] | None = Field(default=None, exclude_if=is_none)
    prompt_token_ids: list[int] | None = Field(default=None, exclude_if=is_none)
    prompt_logprobs: PromptScores | None = Field(default=None, exclude_if=is_none)


class Completion(BaseModel):
    """A complete answer or one chunk of a streamed answer, which have the same form in OpenAI's API."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[Choice]
    system_fingerprint: str
    usage: Usage | None = None
