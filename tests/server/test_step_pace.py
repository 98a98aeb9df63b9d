"""The token budget of a step while a prompt of one key would delay the stream of another."""

from __future__ import annotations

import pytest

from tonnage.server.engines.step_pace import LEAST_TOKENS, STEP_SECONDS, StepPace


def test_token_budget_of_a_step_is_not_lowered_where_prompts_are_fast() -> None:
    pace = StepPace(512)
    assert pace.budget(3) == 3 + LEAST_TOKENS
    pace.took(400, 0.02)  # a GPU
    assert pace.budget(3) == 512
    pace.took(8, 60.0)  # too few tokens to tell
    assert pace.budget(3) == 512


def test_token_budget_keeps_the_duration_of_steps_near_the_target() -> None:
    pace = StepPace(512)
    pace.took(500, 1.25)
    assert pace.budget(7) == 7 + int(STEP_SECONDS / 0.0025)
    pace.took(160, 0.2)  # the next prompts are faster
    assert pace.budget(7) == 7 + 200


def test_steps_with_few_prompt_tokens_do_not_lower_the_token_budget_on_a_gpu() -> None:
    """20 ms for each step and 0.03 ms for each prompt token."""
    pace = StepPace(8192)
    for tokens in (256, 2_000, 6_000):
        pace.took(tokens, 0.02 + 3e-5 * tokens)
    longest = pace.budget(8)
    assert longest > 7_000
    for tokens in (64, 100, 255):
        pace.took(tokens, 0.02 + 3e-5 * tokens)
    assert pace.budget(8) == longest


def test_token_budget_on_a_gpu_grows_from_the_minimum_to_full_steps_in_three_steps() -> None:
    """20 ms for each step and 0.03 ms for each prompt token."""
    pace = StepPace(8192)
    for _ in range(3):
        tokens = pace.budget(0)
        pace.took(tokens, 0.02 + 3e-5 * tokens)
    assert pace.budget(0) > 4_000


@pytest.mark.parametrize("least", [0, 256])
def test_token_budget_is_at_least_one_block_of_a_cached_recurrent_state(least: int) -> None:
    pace = StepPace(512, least)
    pace.took(512, 100.0)
    assert pace.budget(2) == 2 + max(LEAST_TOKENS, least)
