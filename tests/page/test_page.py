"""Tests of the page in headless Chromium: figures equal to the command's, links to plans, and speed."""

from __future__ import annotations

import json
import os
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from browsing import Sight, commanded

from tonnage.planner.page.browser import choices
from tonnage.planner.page.build import build, model_files
from tonnage.planner.page.command import server

NAMES = sorted(name.removesuffix("/config.json") for name in model_files())
GPUS = ("h100-80g", "a100-40g", "l40s-48g", "t4-16g", "b200-180g", "mi300x-192g")


def deployments() -> list[list[str]]:
    """Return one command line per model, with varying GPUs, ranks, lengths, formats, engines and versions."""
    found = []
    for at, name in enumerate(NAMES):
        engine, version = (("vllm", "0.33.0"), ("vllm", "0.19.0"), ("sglang", "0.5.23"))[at % 3]
        argv = [name, "--gpu", GPUS[at % len(GPUS)], "--engine", engine, "--engine-version", version]
        argv += ["--tensor-parallel-size", str(2 ** (at % 4)), "--max-model-len", str(2048 * (1 + at % 5))]
        argv += ["--request", "1000+200"] if at % 4 == 0 else []
        argv += ["--kv-cache-dtype", "fp8"] if at % 5 == 0 else []
        found.append(argv)
    return found


def test_plan_on_the_page_equals_the_commands_output(sight: Sight, models: Path) -> None:
    sight.open()
    assert len(NAMES) >= 30
    fits = 0
    for argv in deployments():
        asked = [*argv, "--explain", "--json"]
        found = sight.ask("plan", asked)
        assert (found["code"], found["out"], found["err"]) == commanded("plan", asked, models), argv
        fits += found["code"] == 0
    assert 0 < fits < len(NAMES)  # some plans fit and some do not
    for argv in (
        ["Qwen/Qwen3-8B", "--gpu", "a100-80g", "--method", "lora"],
        ["Qwen/Qwen3-8B", "--method", "no"],
    ):
        asked = [*argv, "--explain", "--json"]
        found = sight.ask("train", asked)
        assert (found["code"], found["out"], found["err"]) == commanded("train", asked, models), argv


def test_link_to_the_page_with_parameters_reproduces_the_plan(sight: Sight, models: Path) -> None:
    sight.open("?model=Qwen/Qwen3-32B&gpu=a100-80g&engine=vllm&engine-version=0.33.0&max-model-len=8192")
    asked = sight.page.evaluate("() => window.tonnage.argv()")
    assert sight.page.evaluate("() => window.tonnage.out") == commanded("plan", asked, models)[1]
    assert sight.page.input_value("#flag-gpu") == "a100-80g"
    slider = sight.page.locator("#flag-max-model-len")
    slider.focus()
    sight.page.keyboard.press("ArrowRight")  # from 8,192 to 16,384 tokens
    sight.wait("() => JSON.parse(window.tonnage.out).deployment.max_model_len === 16384")
    assert "max-model-len=16384" in sight.page.url


def test_every_control_of_the_page_sets_its_plan_flag(sight: Sight) -> None:
    sight.open()
    for flag, value in (
        ("engine-version", "0.19.0"),
        ("quantization", "fp8"),
        ("kv-cache-dtype", "fp8"),
        ("gpu", "h200-141g"),
    ):
        sight.page.select_option(f"#flag-{flag}", value)
        sight.wait(f"() => JSON.parse(window.tonnage.out).deployment['{flag.replace('-', '_')}'] === '{value}'")
        assert f"{flag}={value}" in sight.page.url
    for flag, key, found in (
        ("tensor-parallel-size", "ArrowRight", 2),
        ("pipeline-parallel-size", "ArrowRight", 2),
        ("max-num-seqs", "End", 2048),
        ("gpu-memory-utilization", "End", 1),
    ):
        sight.page.locator(f"#flag-{flag}").press(key)
        sight.wait(f"() => JSON.parse(window.tonnage.out).deployment['{flag.replace('-', '_')}'] === {found}")
    sight.page.fill("#flag-request", "2000+300")
    sight.wait("() => JSON.parse(window.tonnage.out).requests?.[0]?.output_tokens === 300")
    assert "Requests of 2,000+300 at once" in sight.page.inner_text(".figures")
    sight.page.select_option(
        "#flag-engine-version", "any other release ..."
    )  # a release that changed nothing planned
    sight.page.fill("#flag-engine-version + input", "0.31.0")
    sight.wait("() => JSON.parse(window.tonnage.out).deployment.engine_version === '0.31.0'")
    sight.page.select_option("#flag-engine", "llama.cpp")
    sight.wait("() => JSON.parse(window.tonnage.out || '{}').deployment?.engine === 'llama.cpp'")
    assert "engine-version" not in sight.page.url
    sight.page.select_option("#known", "Qwen/Qwen3-0.6B")
    sight.planned("Qwen/Qwen3-0.6B")


def test_page_shows_formulas_and_other_gpus_and_compares_kept_plans(sight: Sight) -> None:
    sight.open().settle()
    sight.page.click("button.kv_pool")
    assert "kv_cache.bytes_per_block" in sight.page.inner_text("#terms")
    sight.picture("terms")
    for gpu in ("l40s-48g", "a100-80g", "h200-141g"):
        sight.page.click("#keep")
        sight.page.select_option("#flag-gpu", gpu)
        sight.settle()
    assert sight.page.is_disabled("#keep")  # four are compared
    heads = sight.page.locator("#beside thead th").all_inner_texts()
    shown = [head.split("\n")[:2] for head in heads[1:]]
    assert shown == [["This one", "gpu h200-141g"], ["Plan 2", "gpu h100-80g"], ["Plan 3", "gpu l40s-48g"],
                     ["Plan 4", "gpu a100-80g"]]  # fmt: skip
    assert sight.page.url.count("beside=") == 3
    sight.page.evaluate("() => document.getElementById('keep').scrollIntoView()")
    sight.picture("beside")
    sight.page.click("[aria-label='Take plan 3 away']")
    sight.settle()
    assert sight.page.locator("#beside thead th").count() == 4
    sight.open("?" + sight.page.url.partition("?")[2]).settle()  # the link has them
    assert sight.page.locator("#beside thead th").count() == 4
    first = "() => document.querySelector('#gpus tbody tr').textContent"
    cheapest = sight.page.evaluate(first)
    sight.page.click("#gpus th:nth-child(3) button")
    assert sight.page.evaluate(first) != cheapest
    assert sight.page.get_attribute("#gpus th:nth-child(3)", "aria-sort") == "descending"
    sight.page.click("#gpus tbody button.term >> nth=0")
    sight.settle()
    assert sight.plan()["deployment"]["gpu"] == sight.page.input_value("#flag-gpu") != "h200-141g"


def test_click_on_advice_applies_it_to_the_plan(sight: Sight) -> None:
    sight.open(
        "?model=meta-llama/Llama-3.1-70B-Instruct&gpu=a100-80g&engine=vllm&engine-version=0.33.0"
    ).settle()
    assert not sight.plan()["fits"]
    assert "the GPU ends here" in sight.page.inner_text(".over")
    sight.picture("does-not-fit")
    sight.page.click("#result li button >> nth=0")
    sight.settle()
    assert sight.plan()["fits"]
    assert sight.page.input_value("#flag-tensor-parallel-size") == "2"  # the third of its steps: 4 GPUs


def test_training_tab_shows_formulas_and_gpus_and_compares_kept_plans(sight: Sight) -> None:
    sight.open()
    sight.page.click("#tab-train")
    sight.settle()
    assert "parameters are trained" in sight.page.inner_text("#result")
    sight.picture("train")
    sight.page.click("#result .bar button.activation")
    terms = sight.page.inner_text("#terms")
    assert next(one for one in sight.plan()["lines"] if one["name"] == "activations")["formula"] in terms
    sight.page.click("#keep")
    sight.page.select_option("#flag-method", "full")
    sight.settle()
    assert sight.page.locator("#beside thead th").all_inner_texts()[1].split("\n") == [
        "This one",
        "method full",
    ]
    assert "USD/h" in sight.page.inner_text("#gpus thead")
    assert sight.page.inner_text("#asked code").startswith("tonnage train Qwen/Qwen3-8B --gpu h100-80g")
    sight.page.click("#tab-plan")
    sight.settle()
    assert sight.page.locator("#beside table").count() == 0  # kept training plans are no serving plans


def test_planner_page_contacts_no_other_host_and_plans_offline(browser: Any, site: str) -> None:
    """The page loads from its host alone, and plans without any host after that."""
    context = browser.new_context()
    page = context.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    sight = Sight(page, site).open().settle()
    context.set_offline(True)
    page.select_option("#flag-gpu", "l40s-48g")
    sight.wait("() => JSON.parse(window.tonnage.out).deployment.gpu === 'l40s-48g'")
    assert len(asked) > 5
    assert all(url.startswith((site, "data:", "blob:")) for url in asked)
    assert not sight.said
    context.close()


def test_built_planner_page_opens_offline_after_its_first_load(browser: Any, tmp_path: Path) -> None:
    build(tmp_path / "page", os.environ.get("TONNAGE_PYODIDE"), kept=True)
    context = browser.new_context()
    with server(tmp_path / "page", "127.0.0.1", 0) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        sight = Sight(context.new_page(), f"http://127.0.0.1:{serving.server_address[1]}/")
        sight.open("?model=Qwen/Qwen3-8B&gpu=l4-24g").settle()
        before = sight.page.evaluate("() => window.tonnage.out")
        sight.page.evaluate("() => navigator.serviceWorker.ready")  # the service worker has cached every file
        serving.shutdown()
    sight.open("?model=Qwen/Qwen3-8B&gpu=l4-24g").settle()
    assert sight.page.evaluate("() => window.tonnage.out") == before
    sight.open("?model=Qwen/Qwen3-32B&gpu=a100-80g").settle()
    assert "Qwen3-32B" in sight.page.evaluate("() => window.tonnage.out")
    context.close()


def test_copied_command_is_one_quoted_line_without_the_hub_token(browser: Any, site: str) -> None:
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
    sight = Sight(context.new_page(), site)
    sight.open(
        "?model=Qwen/Qwen3-VL-8B-Instruct&gpu=h100-80g&limit-mm-per-prompt=%7B%22image%22:2%7D&hf-token=$(id)"
    ).settle()
    line = sight.page.inner_text("#asked code")
    assert "'{\"image\":2}'" in line
    assert "$(id)" not in sight.page.content()
    assert "hf-token" not in line
    button = "[aria-label='Copy vllm serve']"
    sight.page.evaluate(  # the button shows "Copied" for two seconds
        "(button) => new MutationObserver(([one]) => { window.told ??= one.target.textContent; })"
        ".observe(document.querySelector(button), { childList: true })", button
    )  # fmt: skip
    sight.page.click(button)
    sight.wait("() => window.told === 'Copied'")
    copied = sight.page.evaluate("() => navigator.clipboard.readText()")
    assert copied.startswith("vllm serve Qwen/Qwen3-VL-8B-Instruct ")
    assert copied in sight.page.locator("#line pre").all_inner_texts()
    context.close()


def test_page_load_and_plan_times_are_measured_and_printed_without_a_limit(
    browser: Any, site: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Times are printed, not checked, because a machine may be busy; each slider step is a plan."""
    loads, answers, planned = [], [], []
    for _ in range(3):
        page = browser.new_page()
        start = time.perf_counter()
        sight = Sight(page, site).open()
        loads.append(time.perf_counter() - start)
        if len(loads) == 3:
            sight.settle()
            for step in range(20):
                before = page.evaluate("() => window.tonnage.answers")
                page.locator("#flag-max-model-len").press("ArrowRight" if step % 10 < 5 else "ArrowLeft")
                sight.wait(f"() => window.tonnage.answers > {before}")
                answers.append(page.evaluate("() => window.tonnage.milliseconds"))
                planned.append(sight.plan()["deployment"]["max_model_len"])
        page.close()
    with capsys.disabled():
        print(json.dumps({
            "loaded_s": round(statistics.median(loads), 2),
            "slider_ms_median": round(statistics.median(answers), 1),
            "slider_ms_worst": round(max(answers), 1),
        }))  # fmt: skip
    up = [512, 1024, 2048, 4096, 8192]
    assert planned == 2 * [*up, *up[-2::-1], 40960]  # and down again, to the model's own length
    assert min(answers) > 0


def test_models_and_gpus_listed_on_the_page_equal_the_planners_catalogue(sight: Sight) -> None:
    sight.open()
    offered = json.loads(choices())
    shown = sight.page.evaluate("() => [...document.querySelectorAll('#flag-gpu option')].map(o => o.value)")
    assert [name for name in shown if name] == [gpu["name"] for gpu in offered["gpus"]]
    known = sight.page.evaluate(
        "() => [...document.querySelectorAll('#known optgroup option')].map(o => o.value)"
    )
    assert known == NAMES
