"""The page in headless Chromium: its figures are the command's, it is quick, usable and accessible."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from browsing import Sight

from tonnage.planner.page.browser import choices
from tonnage.planner.page.build import model_files

INDEX = "model.safetensors.index.json"
OPEN = {"access-control-allow-origin": "*"}
COMMAND = "import sys; from tonnage.server.cli import main; sys.exit(main())"
NAMES = sorted(name.removesuffix("/config.json") for name in model_files())
GPUS = ("h100-80g", "a100-40g", "l40s-48g", "t4-16g", "b200-180g", "mi300x-192g")


def deployments() -> list[list[str]]:
    """For each model one: GPUs, ranks, lengths, formats, engines and versions in turn."""
    found = []
    for at, name in enumerate(NAMES):
        engine, version = (("vllm", "0.33.0"), ("vllm", "0.19.0"), ("sglang", "0.5.23"))[at % 3]
        argv = [name, "--gpu", GPUS[at % len(GPUS)], "--engine", engine, "--engine-version", version]
        argv += ["--tensor-parallel-size", str(2 ** (at % 4)), "--max-model-len", str(2048 * (1 + at % 5))]
        argv += ["--request", "1000+200"] if at % 4 == 0 else []
        argv += ["--kv-cache-dtype", "fp8"] if at % 5 == 0 else []
        found.append(argv)
    return found


def commanded(command: str, argv: list[str], models: Path) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, command, *argv], cwd=models, capture_output=True, text=True
    )
    return done.returncode, done.stdout, done.stderr


def test_page_and_command_are_equal_to_the_byte(sight: Sight, models: Path) -> None:
    sight.open()
    assert len(NAMES) >= 30
    fits = 0
    for argv in deployments():
        asked = [*argv, "--explain", "--json"]
        found = sight.ask("plan", asked)
        assert (found["code"], found["out"], found["err"]) == commanded("plan", asked, models), argv
        fits += found["code"] == 0
    assert 0 < fits < len(NAMES)  # both answers were among them
    for argv in (
        ["Qwen/Qwen3-8B", "--gpu", "a100-80g", "--method", "lora"],
        ["Qwen/Qwen3-8B", "--method", "no"],
    ):
        found = sight.ask("train", [*argv, "--json"])
        assert (found["code"], found["out"], found["err"]) == commanded("train", [*argv, "--json"], models), (
            argv
        )


def test_a_link_is_a_plan(sight: Sight, models: Path) -> None:
    sight.open("?model=Qwen/Qwen3-32B&gpu=a100-80g&engine=vllm&engine-version=0.33.0&max-model-len=8192")
    asked = sight.page.evaluate("() => window.tonnage.argv()")
    assert sight.page.evaluate("() => window.tonnage.out") == commanded("plan", asked, models)[1]
    assert sight.page.input_value("#flag-gpu") == "a100-80g"
    slider = sight.page.locator("#flag-max-model-len")
    slider.focus()
    sight.page.keyboard.press("ArrowRight")  # from 8,192 to 16,384 tokens
    sight.wait("() => JSON.parse(window.tonnage.out).deployment.max_model_len === 16384")
    assert "max-model-len=16384" in sight.page.url


def test_own_configs_components_and_kept_plans(sight: Sight) -> None:
    sight.open().settle()
    sight.page.click("button.kv_pool")
    assert "kv_cache.bytes_per_block" in sight.page.inner_text("#terms")
    sight.picture("terms")
    sight.page.click("#keep")
    sight.page.select_option("#flag-gpu", "l40s-48g")
    sight.wait("() => document.querySelectorAll('#beside th[scope=row]').length > 3")
    assert "beside=" in sight.page.url
    sight.page.locator("#beside").scroll_into_view_if_needed()
    sight.picture("beside")
    sight.page.click("summary")
    config = json.loads(model_files()["Qwen/Qwen3-4B/config.json"])
    sight.page.fill("#paste", json.dumps(config))
    sight.page.locator("#paste").blur()
    sight.wait("() => window.tonnage.out.includes('\"own/model\"')")
    sight.page.fill("#paste", '{"model_type": "nobody"}')
    sight.page.locator("#paste").blur()
    sight.wait("() => document.getElementById('status').className === 'no'")
    assert "nobody" in sight.page.inner_text("#status")
    sight.picture("refused")
    sight.page.set_input_files("#file", {"name": "config.json", "mimeType": "application/json",
                                         "buffer": json.dumps(config).encode()})  # fmt: skip
    sight.wait("() => document.getElementById('status').className === ''")
    total = json.dumps({"metadata": {"total_size": 2}, "weight_map": {}}).encode()  # of other weights
    index = {"name": INDEX, "mimeType": "application/json", "buffer": total}
    sight.page.set_input_files("#file", index)
    sight.wait("() => document.getElementById('status').className === 'no'")
    assert "An index names files" in sight.page.inner_text("#status")
    both = [{"name": name, "mimeType": "", "buffer": content} for name, content in (
        ("config.json", json.dumps(config).encode()), ("tokenizer_config.json", b"{}"), (INDEX, total),
    )]  # fmt: skip
    sight.page.set_input_files("#file", both)  # a folder: what is planned is its config.json
    sight.wait("() => document.getElementById('status').className === ''")
    assert sight.page.input_value("#model") == "own/model"
    gguf = {"name": "a.gguf", "mimeType": "", "buffer": b"GGUF" + bytes(20)}
    sight.page.set_input_files("#file", gguf)
    sight.wait("() => document.getElementById('status').textContent.includes('a.gguf')")


def test_a_config_of_the_hub(sight: Sight) -> None:
    """Asked for by a button alone; of the files it looks for only the config is there."""
    asked = []

    def hub(route: Any) -> None:
        asked.append(route.request.url)
        name = route.request.url.rpartition("/")[2]
        if name == "config.json" and "gated" not in route.request.url:
            route.fulfill(body=model_files()["Qwen/Qwen3-4B/config.json"], headers=OPEN)
        else:
            route.fulfill(status=401 if name == "config.json" else 404, headers=OPEN)

    sight.page.route("https://huggingface.co/**", hub)
    sight.open()
    for name, words in (("someone/Own-4B@v2", ""), ("someone/gated", "401")):
        sight.page.fill("#model", name)
        sight.page.locator("#model").blur()
        sight.page.click("#hub")
        if words:
            sight.wait("() => document.getElementById('status').className === 'no'")
            assert words in sight.page.inner_text("#status")
        else:
            sight.wait(f"() => window.tonnage.out.includes('\"{name}\"')")
    assert all(url.startswith("https://huggingface.co/someone/") for url in asked)
    assert "https://huggingface.co/someone/Own-4B/resolve/v2/config.json" in asked
    sight.page.goto(
        sight.url + "?model=someone/Own-4B"
    )  # a link: not there, and not asked for unless one says so
    sight.wait("() => document.getElementById('status').className === 'no'")
    assert sight.page.is_visible("#hub")
    sight.said = [words for words in sight.said if "the server responded" not in words]  # the browser's words


def test_nothing_else_is_asked_for(browser: Any, site: str) -> None:
    """The page loads from its host alone, and plans without any host once it is there."""
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


def test_what_is_copied_is_a_command_and_no_more(sight: Sight) -> None:
    sight.open(
        "?model=Qwen/Qwen3-VL-8B-Instruct&gpu=h100-80g&limit-mm-per-prompt=%7B%22image%22:2%7D&hf-token=$(id)"
    ).settle()
    line = sight.page.inner_text("#line code")
    assert "'{\"image\":2}'" in line
    assert "$(id)" not in sight.page.content()
    assert "hf-token" not in line


def test_how_long_it_takes(browser: Any, site: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Printed, not judged: a machine may be busy."""
    loads, answers = [], []
    for _ in range(3):
        page = browser.new_page()
        start = time.perf_counter()
        Sight(page, site).open()
        loads.append(time.perf_counter() - start)
        if len(loads) == 3:
            sight = Sight(page, site)
            for step in range(20):
                before = page.evaluate("() => window.tonnage.answers")
                page.locator("#flag-max-model-len").focus()
                page.keyboard.press("ArrowRight" if step % 10 < 5 else "ArrowLeft")
                sight.wait(f"() => window.tonnage.answers > {before}")
                answers.append(page.evaluate("() => window.tonnage.milliseconds"))
        page.close()
    with capsys.disabled():
        print(json.dumps({
            "loaded_s": round(statistics.median(loads), 2),
            "slider_ms_median": round(statistics.median(answers), 1),
            "slider_ms_worst": round(max(answers), 1),
        }))  # fmt: skip
    assert len(answers) == 20


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("device", "width", "height"), [("desktop", 1280, 1000), ("phone", 390, 844)])
def test_devices_and_schemes(
    browser: Any, site: str, axe: str, device: str, width: int, height: int, scheme: str
) -> None:
    """No axe-core finding that is serious, no scrolling sideways; pictures where they are asked for."""
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme=scheme,
        bypass_csp=True,  # axe is a script of ours here
    )
    page = context.new_page()
    sight = Sight(page, site).open().settle()
    sight.picture(f"{device}-{scheme}")
    page.add_script_tag(content=axe)
    found = page.evaluate("() => axe.run()")["violations"]
    assert not [one for one in found if one["impact"] in ("serious", "critical")], json.dumps(found, indent=1)[
        :4000
    ]
    assert page.evaluate("() => document.documentElement.scrollWidth") <= width
    if device == "desktop" and scheme == "light":
        page.click("#tab-train")
        sight.wait("() => document.querySelector('#result h2')?.textContent === 'Command'")
        sight.picture("train")
        sight.open(
            "?model=meta-llama/Llama-3.1-70B-Instruct&gpu=a100-80g&engine=vllm&engine-version=0.33.0"
        ).settle()
        sight.picture("does-not-fit")
    context.close()


def test_printed_on_one_page(browser: Any, site: str, tmp_path: Path) -> None:
    page = browser.new_page()
    sight = Sight(page, site).open().settle()
    page.emulate_media(media="print")
    sight.picture("print")
    assert page.pdf(path=tmp_path / "plan.pdf", format="A4", margin={"top": "1cm", "bottom": "1cm"})
    assert (tmp_path / "plan.pdf").read_bytes().count(b"/Type /Page\n") == 1
    page.close()


def test_lists_are_the_planner_s(sight: Sight) -> None:
    sight.open()
    offered = json.loads(choices())
    shown = sight.page.evaluate("() => [...document.querySelectorAll('#flag-gpu option')].map(o => o.value)")
    assert [name for name in shown if name] == [gpu["name"] for gpu in offered["gpus"]]
