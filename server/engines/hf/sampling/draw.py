"""Sampling of tokens in a batch, with a random number generator per sequence.

The token of a row depends only on the row's logits, parameters and random number, not on other rows of the
batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tonnage.server.engines.hf.kernels.small import peaks
from tonnage.server.engines.request import SamplingParams

ROWS = 16  # number of rows drawn at a time: copies [rows, vocabulary] stay small compared with the activations
GREEDY_BELOW = 1e-5  # lower temperatures sample greedily, as in vLLM (sampling_params.py: _SAMPLING_EPS)
TOP = 1024  # number of likeliest tokens to try; sorting the whole vocabulary takes 3 ms per row (49,152 tokens)


def most_likely(logits: torch.Tensor) -> tuple[list[int], list[bool]]:
    """Return the first maximum of each row of ``logits`` [L, vocabulary], and whether the row is valid.

    A valid row has no NaN and a finite maximum. transformers' generate chooses the same token at temperature 0.
    bfloat16 logits on a CPU are read only once.
    """
    if logits.dtype == torch.bfloat16 and logits.device.type == "cpu":
        first, good = peaks(logits)
        return first.tolist(), good.tolist()
    finite = logits.amax(dim=-1).isfinite()  # NaN in a row makes the row's maximum NaN
    return logits.argmax(dim=-1).tolist(), finite.tolist()


def is_greedy(params: SamplingParams) -> bool:
    """Return whether a request's temperature is so low (below `GREEDY_BELOW`) that it samples greedily."""
    return params.temperature < GREEDY_BELOW


def sample(
    logits: torch.Tensor, params: Sequence[SamplingParams], generators: Sequence[np.random.Generator]
) -> list[int]:
    """Draw one token per row of ``logits`` [L, vocabulary]; at temperature 0 it is the likeliest.

    ``params[i]`` and ``generators[i]`` belong to row i. Temperatures below `GREEDY_BELOW` count as 0: other
    tokens have probability 0 in float32, and logits divided by the temperature would overflow.
    """
    tokens, _ = most_likely(logits)
    random = [row for row, p in enumerate(params) if not is_greedy(p)]
    plain = [row for row in random if not _truncates(params[row])]
    narrow = [row for row in random if _truncates(params[row])]
    for rows, draw in ((plain, _draw), (narrow, _draw_truncated)):
        for at in range(0, len(rows), ROWS):
            some = rows[at : at + ROWS]
            chosen = [params[row] for row in some]
            draws = _column([generators[row].random() for row in some], logits, torch.float64)
            heat = _column([p.temperature for p in chosen], logits)
            probabilities = torch.softmax(logits[some].float() / heat, dim=-1)
            for row, token in zip(some, draw(probabilities, chosen, draws), strict=True):
                tokens[row] = token
    return tokens


def _truncates(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0


def _column(values: list[float], like: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=like.device)[:, None]


def _draw(probabilities: torch.Tensor, _: Sequence[SamplingParams], draws: torch.Tensor) -> list[int]:
    """Draw a token per row of ``probabilities`` by inverse CDF.

    ``probabilities`` is [rows, vocabulary], and ``draws`` [rows, 1] has uniform random numbers.
    """
    return _invert(probabilities, draws).tolist()


def _invert(weights: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Return the first column of each row whose cumulative weight exceeds draw x total weight, [rows].

    The weight of the returned column is never 0.
    """
    total = weights.cumsum(dim=-1, dtype=torch.float64)
    picked = torch.searchsorted(total, draws * total[:, -1:], right=True)
    last = (weights > 0).cumsum(dim=-1).argmax(dim=-1, keepdim=True)
    return torch.minimum(picked, last).squeeze(-1)


def _draw_truncated(
    probabilities: torch.Tensor, params: Sequence[SamplingParams], draws: torch.Tensor
) -> list[int]:
    """Draw a token per row after truncation by min_p, then top_k, then top_p.

    The order is vLLM's (v1/sample/sampler.py, 0.32.0). transformers truncates by min_p last.
    """
    width = probabilities.shape[-1]
    values, order = probabilities.topk(min(TOP, width), dim=-1)
    tokens = []
    for row, wish in enumerate(params):
        top, ids = values[row], order[row]
        if len(top) < width and not _holds_kept(top, wish):
            top, ids = probabilities[row].sort(descending=True)
        tokens.append(int(ids[_invert(_kept(top, wish)[None], draws[row : row + 1])[0]]))
    return tokens


def _holds_kept(top: torch.Tensor, params: SamplingParams) -> bool:
    """Return whether ``top``, the likeliest tokens of a row, includes every token that truncation keeps."""
    last = float(top[-1])
    if params.min_p > 0 and last < params.min_p * float(top[0]):
        return True
    if params.top_k > 0:
        return params.top_k < len(top) and last < float(top[params.top_k - 1])
    # top_p refers to the total probability of the tokens that min_p keeps. That total is known only if ``top``
    # has all of these tokens.
    return params.min_p == 0 and float(top.sum()) >= params.top_p


def _kept(top: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Return ``top`` (probabilities in descending order) with the tokens that truncation excludes set to 0.

    top_k keeps all tokens that are as likely as the last of the k, as vLLM and transformers do.
    """
    kept = top.clone()
    if params.min_p > 0:
        kept[top < params.min_p * top[0]] = 0
    if 0 < params.top_k < len(top):
        kept[top < top[params.top_k - 1]] = 0
    if params.top_p < 1:
        total = kept.sum() if params.top_k or params.min_p > 0 else kept.new_tensor(1.0)
        before = kept.cumsum(dim=-1) - kept
        kept[before >= params.top_p * total] = 0  # the token that makes the sum reach top_p is kept
    kept[0] = top[0]
    return kept
