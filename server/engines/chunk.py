"""What an engine answers: new tokens of one sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probability (natural) of a token, and of the best ones at its place as (token id, logprob), best
    first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)  # one for each token: frozen it costs five times as much (object.__setattr__ a field)
class Chunk:
    """New tokens of one of the n sequences, not to be changed. A stop token that ended it is not among them.

    ``logprobs``: one for each of ``token_ids``, when they were asked for. ``prompt_logprobs``: in the first
    chunk, one for each prompt token, the first (which nothing predicts) None.
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0  # prompt tokens served from the prefix cache
    error: str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    embedding: tuple[float, ...] = ()  # of the prompt, in the one chunk of a request for it
    queued_seconds: float | None = None  # from submit to admission; None: this engine does not say
    refused: bool = False  # with ``error``: the request is at fault, not the engine
