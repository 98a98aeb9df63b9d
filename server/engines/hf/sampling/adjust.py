"""Adjustments of logits that a request asks for before sampling, and log probabilities.

The order is that of vLLM's sampler (v1/sample/sampler.py, 0.32.0): grammar,
allowed_token_ids, bad_words, min_tokens, logit_bias, penalties.
Temperature and truncation follow in ``draw``. Log probabilities come from the unadjusted logits.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Protocol

import numpy as np
import torch

from tonnage.server.engines.chunk import TokenLogprobs
from tonnage.server.engines.request import SamplingParams


class Matcher(Protocol):
    """The position of one sequence's output in its grammar, which determines the permitted next tokens."""

    def mask(self, logits: torch.Tensor) -> None:
        """Set the logits of tokens that the grammar does not permit next to -inf, in place.

        ``logits`` is [vocabulary].
        """

    def accept(self, token: int) -> bool:
        """Advance by one output token; return whether the output is complete and no token may follow."""


class Drawing(Protocol):
    """A sequence that draws its next token, with the attributes that `adjust` reads."""

    tokens: list[int]
    matcher: Matcher | None

    @property
    def params(self) -> SamplingParams:
        """The sampling parameters of the sequence's request."""

    @property
    def generated(self) -> int:
        """The number of output tokens of the sequence so far."""


def needs_adjusting(drawing: Drawing) -> bool:
    """Return whether the sequence's grammar or sampling parameters change its logits."""
    params = drawing.params
    return (
        drawing.matcher is not None
        or drawing.generated < params.min_tokens
        or bool(params.logit_bias or params.allowed_token_ids or params.bad_token_ids)
        or params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )


def adjust(logits: torch.Tensor, drawings: Rows[Drawing]) -> torch.Tensor:
    """Return ``logits`` [L, vocabulary] with each row adjusted for its sequence.

    ``drawings[i]`` is the sequence of row i. The result is ``logits`` itself if no row changes.
    """
    asking = [row for row, drawing in enumerate(drawings) if needs_adjusting(drawing)]
    if not asking:
        return logits
    logits = logits.clone()
    for row in asking:
        _adjust_row(logits[row], drawings[row])
    return logits


def _adjust_row(logits: torch.Tensor, drawing: Drawing) -> None:
    params = drawing.params
    if drawing.matcher is not None:
        drawing.matcher.mask(logits)
    if params.allowed_token_ids:
        given = np.fromiter(params.allowed_token_ids, np.int64, len(params.allowed_token_ids))
        allowed = torch.from_numpy(given).to(logits.device)
        kept = logits[allowed]
        logits.fill_(float("-inf"))
        logits[allowed] = kept
    for *begin, last in params.bad_token_ids:
        if len(begin) <= drawing.generated and (not begin or drawing.tokens[-len(begin) :] == begin):
            logits[last] = float("-inf")
    if drawing.generated < params.min_tokens and params.stop_token_ids:
        logits[list(params.stop_token_ids)] = float("-inf")
    if params.logit_bias:
        ids, added = zip(*params.logit_bias, strict=True)
        logits[list(ids)] += torch.tensor(added, dtype=logits.dtype, device=logits.device)
    if params.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.unique(drawing.tokens)).to(logits.device)
        values = logits[seen]
        logits[seen] = torch.where(
            values > 0, values / params.repetition_penalty, values * params.repetition_penalty
        )
    if (params.presence_penalty or params.frequency_penalty) and drawing.generated:
        output = np.asarray(drawing.tokens[len(drawing.tokens) - drawing.generated :])
        unique, counts = np.unique(output, return_counts=True)
        cost = params.frequency_penalty * counts + params.presence_penalty
        logits[torch.from_numpy(unique).to(logits.device)] -= torch.from_numpy(cost).to(logits)


def logprobs(logits: torch.Tensor, tokens: Rows[int], best: Rows[int]) -> list[TokenLogprobs]:
    """Return the log probability of ``tokens[i]`` and of the ``best[i]`` likeliest tokens, for each row i.

    ``logits`` is [L, vocabulary]. Rows are computed one at a time, so that the copies are small compared with
    the planned activations.
    """
    answers = []
    for row, token, count in zip(logits, tokens, best, strict=True):
        values = torch.log_softmax(row.float(), dim=-1)
        top = values.topk(count) if count else None
        pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True) if top is not None else ()
        rank = int((values >= values[token]).sum())
        answers.append(TokenLogprobs(int(token), float(values[token]), tuple(pairs), rank))
    return answers
