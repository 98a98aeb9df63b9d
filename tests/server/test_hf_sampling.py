"""The sampler against a plain float64 implementation of the sampling parameters."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tonnage.server.engines.hf.sampling.draw import TOP, most_likely, sample
from tonnage.server.engines.hf.sequence import generator
from tonnage.server.engines.request import SamplingParams

CASES = [
    {},
    {"temperature": 0.3},
    {"top_k": 1},
    {"top_k": 5},
    {"top_p": 0.5},
    {"top_p": 1e-6},
    {"top_k": 20, "top_p": 0.7},
    {"min_p": 0.2},
    {"top_k": 30, "top_p": 0.9, "min_p": 0.01, "temperature": 1.7},
]


def allowed(logits: np.ndarray, params: SamplingParams) -> set[int]:
    """Return the token ids that top-k, top-p and min-p permit, computed one token at a time."""
    weights = np.exp((logits - logits.max()) / params.temperature)
    weights /= weights.sum()
    order = [int(token) for token in np.argsort(-weights, kind="stable")]
    order = [token for token in order if weights[token] >= params.min_p * weights[order[0]]]
    if params.top_k:
        order = [token for token in order if weights[token] >= weights[order[: params.top_k][-1]]]
    total, mass, left = sum(weights[order]), 0.0, []
    for token in order:
        if left and mass >= params.top_p * total:
            break
        mass += weights[token]
        left.append(token)
    return set(left)


@pytest.mark.parametrize("width", [4, 4 * TOP])
@pytest.mark.parametrize("top_k", [1, 2])
def test_top_k_keeps_all_tokens_that_are_as_likely_as_the_last(width: int, top_k: int) -> None:
    logits = torch.full((1, width), -30.0)
    logits[0, 1:4] = 5.0
    params, rows = SamplingParams(max_tokens=1, top_k=top_k), 60
    generators = [generator(seed, 0) for seed in range(rows)]
    assert set(sample(logits.expand(rows, -1), [params] * rows, generators)) == {1, 2, 3}
    # More tied tokens than are looked at first.
    if width > TOP:
        logits[0, :] = 5.0
        assert max(sample(logits.expand(rows, -1), [params] * rows, generators)) > TOP


@pytest.mark.parametrize("width", [6, 4 * TOP])
def test_min_p_is_applied_before_top_p_as_in_vllm(width: int) -> None:
    """top_p is a share of what min_p keeps: of 0.5 and 0.3 it needs the first alone."""
    weights = torch.full((1, width), 1e-9)
    weights[0, :6] = torch.tensor([0.5, 0.3, 0.08, 0.06, 0.04, 0.02])
    params, rows = SamplingParams(max_tokens=1, min_p=0.5, top_p=0.6), 60
    generators = [generator(seed, 0) for seed in range(rows)]
    assert set(sample(weights.log().expand(rows, -1), [params] * rows, generators)) == {0}


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("width", [50, 4 * TOP])
def test_sampler_draws_only_allowed_tokens_and_every_likely_token(case: dict, width: int) -> None:
    logits = torch.from_numpy(np.random.default_rng(2).normal(0, 4, width).astype(np.float32))
    params = SamplingParams(max_tokens=1, **case)
    rows = 400
    drawn = sample(logits.expand(rows, -1), [params] * rows, [generator(seed, 0) for seed in range(rows)])
    left = allowed(logits.double().numpy(), params)
    assert set(drawn) <= left
    weights = torch.softmax(logits.double() / params.temperature, -1).numpy()
    mass = sum(weights[token] for token in left)
    for token in left:  # 400 draws: a token with 5 % of the mass is missed with probability 1e-9
        if weights[token] / mass > 0.05:
            share = drawn.count(token) / rows
            assert abs(share - weights[token] / mass) < 0.12


def test_sampled_token_is_independent_of_batch() -> None:
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(0, 3, (40, 3000)).astype(np.float32))
    params = [SamplingParams(max_tokens=1, **CASES[row % len(CASES)]) for row in range(40)]
    together = sample(logits, params, [generator(row, 0) for row in range(40)])
    alone = [sample(logits[row : row + 1], [params[row]], [generator(row, 0)])[0] for row in range(40)]
    assert together == alone


def test_temperature_zero_selects_the_first_of_equally_likely_tokens() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [5.0, 5.0, 0.0]])
    params = [SamplingParams(max_tokens=1, temperature=0.0)] * 2
    assert sample(logits, params, [generator(None, 0)] * 2) == [1, 0]


def test_very_small_temperature_samples_like_greedy() -> None:
    """Dividing logits by 1e-40 gives infinities, and their differences are NaN."""
    logits = torch.tensor([[1.0, 30.0, 29.0], [-5.0, -50.0, -6.0]])
    for temperature in (1e-6, 1e-40):
        params = [SamplingParams(max_tokens=1, temperature=temperature, top_k=top_k) for top_k in (0, 2)]
        assert sample(logits, params, [generator(1, 0)] * 2) == [1, 0]


def test_random_numbers_of_the_sampler_depend_on_seed_and_sequence_index() -> None:
    first = generator(7, 0).random(4).tolist()
    assert generator(7, 0).random(4).tolist() == first
    assert generator(7, 1).random(4).tolist() != first
    assert generator(8, 0).random(4).tolist() != first
    # A long seed is none of a short seed's sequences.
    assert generator(7 + (3 << 32), 0).random(4).tolist() != generator(7, 3).random(4).tolist()
    assert generator(None, 0).random() != generator(None, 0).random()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [1, 30, 513, 5000])
def test_most_likely_token_equals_argmax_and_non_finite_logits_are_flagged(
    dtype: torch.dtype, width: int
) -> None:
    draw = torch.Generator().manual_seed(width)
    rows = torch.randn(40, width, generator=draw).to(dtype)  # in bfloat16 with ties
    rows[10:15] = -rows[10:15].abs()
    rows[15:20] = torch.where(rows[15:20] > 0, 0.0, -0.0).to(dtype)  # all equal: the first
    want = rows.argmax(-1).tolist()
    assert most_likely(rows) == (want, [True] * 40)
    for value, good in ((float("nan"), False), (float("inf"), False), (float("-inf"), width > 1)):
        other = rows.clone()
        other[7, width // 2] = value
        assert most_likely(other)[1] == [True] * 7 + [good] + [True] * 32
    rows[3] = float("-inf")
    assert most_likely(rows)[1] == [True] * 3 + [False] + [True] * 36
