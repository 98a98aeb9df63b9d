"""The output of an engine: chunks of new tokens of one sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The natural log probability of one token, and the likeliest alternatives at the same position.

    ``top`` holds pairs (token id, log probability), the likeliest first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)  # one per token: a frozen dataclass takes five times as long to create
class Chunk:
    """New tokens of one of the n sequences of a request; treat as immutable.

    ``token_ids`` excludes the stop token that ended the sequence. ``logprobs`` has one entry per token if the
    request asked for them. ``prompt_logprobs`` is set in the first chunk only, with one entry per prompt token;
    the first entry is None, because no token precedes it.
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0  # prompt tokens served from the prefix cache
    error: str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    embedding: tuple[float, ...] = ()  # of the prompt, in the single chunk of an embedding request
    queued_seconds: float | None = None  # from submission to admission; None: the engine does not report it
    refused: bool = False  # with ``error``: the request is invalid, the engine is not at fault
