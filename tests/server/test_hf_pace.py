"""The token budget of the hf engine while a prompt of one key would delay the stream of another."""

from __future__ import annotations

import pytest

from tonnage.server.engines.hf.pace import LEAST_TOKENS, STEP_SECONDS, StepPace


def test_budget_is_the_whole_step_until_a_prompt_was_slow() -> None:
    pace = StepPace(512)
    assert pace.budget(3) == 512
    pace.took(400, 0.02)  # a GPU
    assert pace.budget(3) == 512
    pace.took(8, 60.0)  # too few tokens to tell
    assert pace.budget(3) == 512


def test_budget_keeps_a_step_near_the_aim() -> None:
    pace = StepPace(512)
    pace.took(500, 1.25)
    assert pace.budget(7) == 7 + int(STEP_SECONDS / 0.0025)
    pace.took(160, 0.2)  # the next prompts are faster
    assert pace.budget(7) == 7 + 320


@pytest.mark.parametrize("least", [0, 256])
def test_budget_has_room_for_a_block_of_a_cached_state(least: int) -> None:
    pace = StepPace(512, least)
    pace.took(512, 100.0)
    assert pace.budget(2) == 2 + max(LEAST_TOKENS, least)
