"""Bodies of /v1/completions: OpenAI's fields, and those of vLLM that are honoured here.

Strict: no conversion between types, no unknown field. A field that is known but not honoured is refused by
name unless it asks for nothing (its neutral value, which some clients always send).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from tonnage.server.api.body import Fields

# Fields of OpenAI's CreateCompletionRequest and of vLLM 0.32's CompletionRequest that nothing here acts on,
# with the values that ask for nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (),
    "suffix": ("",),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "min_tokens": (0,),
    "priority": (0,),
    "prompt_logprobs": (),
    "prompt_embeds": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "logits_processors": ([],),
}

# What a field takes, for messages about unions (pydantic reports one error for each member).
EXPECTED: dict[str, str] = {
    "prompt": "a string, a list of strings, a list of token ids or a list of lists of token ids",
    "stop": "a string or a list of at most 4 strings",
}

_INT64 = 2**63

# Token ids are checked against the vocabulary later; here only against sizes that fit into any tensor.
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1, fail_fast=True)]
Texts = Annotated[list[str], Field(min_length=1, fail_fast=True)]
TokenIdLists = Annotated[list[TokenIds], Field(min_length=1, fail_fast=True)]
StopString = Annotated[str, Field(min_length=1)]


class StreamOptions(BaseModel):
    """What a stream carries beside the text."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = None


class CompletionRequest(BaseModel):
    """POST /v1/completions. Ranges as in OpenAI's API reference; top_k, min_p and ignore_eos as in vLLM."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: str
    prompt: str | Texts | TokenIds | TokenIdLists
    max_tokens: int | None = Field(None, ge=1)
    n: int | None = Field(None, ge=1, le=128)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=4)] | None = None
    seed: int | None = Field(None, ge=-_INT64, lt=_INT64)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, description="-1 or 0: all tokens")
    min_p: float | None = Field(None, ge=0, le=1)
    echo: bool | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[Annotated[int, Field(ge=0, lt=2**31)]] | None = Field(None, max_length=64)
    cache_salt: str | None = Field(None, min_length=1, max_length=1024)
    user: str | None = Field(None, max_length=1024, description="accepted, without effect")


FIELDS = Fields(
    model=CompletionRequest,
    unsupported=UNSUPPORTED,
    expected=EXPECTED,
    unsupported_inside={
        "stream_options": {"include_obfuscation": (False,), "continuous_usage_stats": (False,)}
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
    logprobs: None = None
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
