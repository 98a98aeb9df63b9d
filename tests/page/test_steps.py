"""Tests of back and forward, of links with unknown flags, and of errors during further input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from browsing import Sight, commanded

from tonnage.planner.page.build import model_files

VLLM = "&engine=vllm&engine-version=0.33.0"


def test_browser_back_undoes_a_choice_but_not_single_slider_steps(sight: Sight) -> None:
    sight.open().settle()
    page = sight.page
    page.select_option("#flag-gpu", "l40s-48g")
    sight.settle()
    page.select_option("#known", "Qwen/Qwen3-4B")
    sight.planned("Qwen/Qwen3-4B")
    for _ in range(3):
        page.locator("#flag-max-model-len").press("ArrowRight")
        sight.settle()
    page.click("#tab-train")
    sight.settle()
    assert "parameters are trained" in page.inner_text("#result")
    page.go_back()
    sight.planned("Qwen/Qwen3-4B")
    assert sight.plan()["deployment"]["max_model_len"] == 2048  # the last position of the slider
    assert page.get_attribute("#tab-plan", "aria-pressed") == "true"
    page.go_back()
    sight.planned("Qwen/Qwen3-8B")
    assert page.input_value("#flag-gpu") == sight.plan()["deployment"]["gpu"] == "l40s-48g"
    page.go_back()
    sight.wait("() => JSON.parse(window.tonnage.out).deployment.gpu === 'h100-80g'")
    page.go_forward()
    sight.wait("() => JSON.parse(window.tonnage.out).deployment.gpu === 'l40s-48g'")
    sight.settle()
    page.click("#keep")
    sight.settle()
    page.click("[aria-label='Take plan 2 away']")
    sight.settle()
    page.go_back()
    sight.wait("() => window.tonnage.settled() && document.querySelector('#beside table') !== null")


def test_error_on_the_page_stays_visible_while_a_slider_moves(sight: Sight) -> None:
    sight.open().settle()
    sight.page.set_input_files("#file", {"name": "notes.txt", "mimeType": "", "buffer": b"hello"})
    sight.refused("None of these")
    sight.page.locator("#flag-max-model-len").press("ArrowRight")
    sight.wait("() => JSON.parse(window.tonnage.out).deployment.max_model_len === 512")
    sight.settle()
    assert "None of these" in sight.page.inner_text("#status")
    sight.page.select_option("#known", "Qwen/Qwen3-4B")  # until another is chosen
    sight.planned("Qwen/Qwen3-4B")


def test_unknown_model_name_clears_previous_plan(sight: Sight) -> None:
    sight.open().settle()
    sight.page.fill("#model", "someone/Own-4B")
    sight.page.locator("#model").blur()
    sight.refused("someone/Own-4B is not in the list")
    sight.page.locator("#flag-max-model-len").press("ArrowRight")
    sight.refused("someone/Own-4B is not in the list")
    assert sight.page.inner_text("#result") == ""
    assert "model=someone%2FOwn-4B" in sight.page.url


def test_pasted_config_with_infinity_is_accepted(sight: Sight, tmp_path: Path) -> None:
    """Python writes Infinity into JSON, which JavaScript's JSON does not accept."""
    text = json.dumps(
        json.loads(model_files()["Qwen/Qwen3-4B/config.json"]) | {"time_step_limit": [0.0, float("inf")]}
    )
    assert "Infinity" in text
    sight.open()
    sight.page.click("summary")
    sight.page.fill("#paste", text)
    sight.page.locator("#paste").blur()
    own = sight.planned("own/qwen3-")
    (tmp_path / own).mkdir(parents=True)
    (tmp_path / own / "config.json").write_text(text)
    asked = sight.page.evaluate("() => window.tonnage.argv()")
    assert sight.page.evaluate("() => window.tonnage.out") == commanded("plan", asked, tmp_path)[1]


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("?model=Qwen/Qwen3-8B&gpu=h100-80g&tensor_parallel=3", "did you mean --tensor-parallel-size?"),
        ("?model=Qwen/Qwen3-8B&gpu=nonesuch", "'nonesuch' is not in the catalogue"),
        ("?model=Qwen/Qwen3-8B&gpu=h100-80g" + VLLM.replace("0.33.0", "latest"), "'latest' is not a version"),
        ("?model=--help", "The page shows single plans only"),
        ("?model=Qwen/Qwen3-8B&gpu=h100-80g&csv=true" + VLLM, ""),
    ],
)
def test_page_link_with_invalid_flags_shows_an_error(sight: Sight, query: str, words: str) -> None:
    sight.open(query)
    if words:
        sight.refused(words)
    assert "Traceback" not in sight.page.inner_text("#answer")
    assert sight.page.inner_text("#result") == ""


def test_link_to_the_page_keeps_a_boolean_flag_and_drops_a_flag_for_an_output_file(sight: Sight) -> None:
    sight.open(f"?model=Qwen/Qwen3-8B&gpu=h100-80g{VLLM}&enforce-eager=true&html=/tmp/x.html").settle()
    assert sight.plan()["deployment"]["enforce_eager"] is True
    line = sight.page.inner_text("#asked code")
    assert line.endswith("--enforce-eager")
    sight.open(f"?model=Qwen/Qwen3-8B&gpu=h100-80g{VLLM.replace('0.33.0', '9.9.9')}").settle()
    assert "newer than what is known here" in sight.page.inner_text("#result")  # as the command notes
    assert "changed a plan" in sight.page.inner_text("#flag-engine-version-help")


def test_phone_shows_the_verdict_of_the_plan_at_the_lower_edge_of_the_screen(sight: Sight) -> None:
    """On a phone the result is far below the model's name and the hub button."""
    page = sight.page
    page.set_viewport_size({"width": 390, "height": 844})
    sight.open().settle()
    at_glance = (
        "() => (({ hidden, textContent }) => hidden ? '' : textContent)(document.getElementById('glance'))"
    )
    sight.wait(f"() => ({at_glance})().startsWith('Fits: ')")
    page.fill("#model", "someone/Own-4B")
    page.locator("#model").blur()
    sight.refused("is not in the list")
    sight.wait(f"() => ({at_glance})().startsWith('someone/Own-4B is not in the list')")
    page.click("#glance")
    sight.wait("() => document.getElementById('glance').hidden")
    page.evaluate("() => scrollTo(0, 0)")
    page.select_option("#known", "Qwen/Qwen3-4B")
    sight.planned("Qwen/Qwen3-4B")
    sight.wait(f"() => ({at_glance})().startsWith('Fits: ')")
