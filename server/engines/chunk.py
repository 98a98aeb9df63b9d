"""The output of an engine: chunks of new tokens of one sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]

# The result of a pooling request: an embedding [size], the scores of the labels [labels], or the scores of the
# labels for each token [tokens, labels].
Pooled = tuple[float, ...] | tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The natural log probability of one token, and the likeliest alternatives at its position.

    ``top`` holds pairs (token id, log probability), with the likeliest token first. ``rank`` is the number of
    tokens that are at least as likely, so the likeliest token has rank 1.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int | None = None


# This class is not frozen: one object is created per token, and creating a frozen one takes five times as long.
@dataclass(slots=True)
class Chunk:
    """New tokens of one of the n sequences of a request; treat it as immutable.

    ``token_ids`` excludes the stop token that ended the sequence. ``logprobs`` has one entry per token if the
    request asked for log probabilities. ``prompt_logprobs`` is set only in the first chunk, with one entry per
    prompt token. Its first entry is None, because no token precedes the first prompt token.
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0  # number of prompt tokens found in the prefix cache
    error: str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    pooled: Pooled = ()  # result of a pooling request, which has only one chunk
    queued_seconds: float | None = None  # seconds from submission to admission; None if not reported
    refused: bool = False  # whether the request, not the engine, caused ``error``
