"""Sampling in batch, each sequence from its own random stream."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tonnage.server.engines.base import SamplingParams


def sample(
    logits: torch.Tensor, params: Sequence[SamplingParams], generators: Sequence[np.random.Generator]
) -> list[int]:
    """One token id a row of ``logits`` [L, vocabulary]; temperature 0 takes the first maximum, as generate."""
    tokens = logits.argmax(dim=-1)
    random_rows = [row for row, p in enumerate(params) if p.temperature > 0]
    if random_rows:
        rows = torch.tensor(random_rows, device=logits.device)
        chosen = [params[row] for row in random_rows]
        draws = [generators[row].random() for row in random_rows]
        tokens[rows] = _draw(logits[rows].float(), chosen, draws)
    return list(map(int, tokens.tolist()))


def _draw(logits: torch.Tensor, params: Sequence[SamplingParams], draws: Sequence[float]) -> torch.Tensor:
    """Inverse-CDF sampling after temperature, top_k, top_p and min_p, in vLLM's and transformers' order."""
    device = logits.device

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)[:, None]

    probs, order = torch.softmax(logits / column([p.temperature for p in params]), dim=-1).sort(
        dim=-1, descending=True
    )
    rank = torch.arange(probs.shape[-1], device=device)[None]
    keep = rank < column([float(p.top_k or probs.shape[-1]) for p in params])
    kept = probs * keep
    kept = kept / kept.sum(dim=-1, keepdim=True)
    before = kept.cumsum(dim=-1) - kept
    keep &= before < column([p.top_p for p in params])  # the token that crosses top_p stays
    keep &= probs >= column([p.min_p for p in params]) * probs[:, :1]
    keep[:, 0] = True
    total = (probs * keep).double().cumsum(dim=-1)
    target = torch.tensor(draws, dtype=torch.float64, device=device)[:, None] * total[:, -1:]
    picked = (total <= target).sum(dim=-1, keepdim=True).clamp(max=probs.shape[-1] - 1)
    return order.gather(-1, picked).squeeze(-1)
