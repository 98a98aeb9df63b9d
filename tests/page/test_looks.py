"""Tests of the page and of --html files on a phone, in dark mode, on paper, and with axe-core."""

from __future__ import annotations

import re
import shutil
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path
from typing import Any
from unicodedata import normalize

import pytest
from browsing import DEVICES, Sight, commanded, serious
from pypdf import PdfReader

from tonnage import __version__

PAPER = {"format": "A4", "margin": dict.fromkeys(("top", "bottom", "left", "right"), "1cm")}


def printed(page: Any) -> tuple[int, str]:
    """Return the number of printed A4 sheets, and their text."""
    pages = PdfReader(BytesIO(page.pdf(**PAPER))).pages
    text = normalize("NFKC", " ".join(sheet.extract_text() for sheet in pages))  # ligatures apart
    return len(pages), " ".join(text.split())


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("device", "width", "height"), DEVICES)
def test_planner_page_is_accessible_on_every_device_and_in_every_colour_scheme(
    browser: Any, site: str, axe: str, device: str, width: int, height: int, scheme: str
) -> None:
    """There is no serious axe-core finding and no horizontal scrolling.

    Pictures are saved on request.
    """
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme=scheme,
        bypass_csp=True,  # axe is injected by this test
    )
    page = context.new_page()
    sight = Sight(page, site).open().settle()
    sight.picture(f"{device}-{scheme}")
    page.click("button.weights")
    page.click("#keep")
    page.select_option("#flag-gpu", "l40s-48g")
    sight.settle()
    assert not (found := serious(page, axe)), found
    assert page.evaluate("() => document.documentElement.scrollWidth") <= width
    seen = page.locator("#glance")
    page.locator("#gpus").scroll_into_view_if_needed()
    sight.wait("() => !document.getElementById('glance').hidden")  # the verdict, out of sight
    assert "176,896 tokens" in seen.inner_text()
    if device == "phone":
        sight.picture(f"{device}-{scheme}-answer", whole=False)
    page.evaluate("() => scrollTo(0, document.querySelector('.verdict').offsetTop - 50)")
    sight.wait("() => document.getElementById('glance').hidden")
    page.click("#tab-train")
    sight.settle()
    assert not (found := serious(page, axe)), found
    assert page.evaluate("() => document.documentElement.scrollWidth") <= width
    context.close()


def test_planner_page_is_usable_by_keyboard_alone(sight: Sight) -> None:
    """The keyboard leads from the address line to a term, its formula and another GPU."""
    page = sight.open().settle().page
    press = page.keyboard.press
    focused = "(({ activeElement: at }) => at.id || at.className || at.textContent)(document)"

    def tab_to(name: str) -> None:
        for _ in range(60):
            press("Tab")
            if page.evaluate(focused) == name:
                return
        raise AssertionError(f"{name} is not reached: {page.evaluate(focused)}")

    press("Tab")
    assert page.evaluate("() => document.activeElement.textContent") == "Skip to the answer"
    press("Enter")
    assert page.evaluate("() => document.activeElement.id") == "answer"
    assert page.evaluate("() => window.tonnage.settled()")  # no new plan was computed,
    assert page.evaluate("() => location.hash") == ""  # the address still shows the same plan
    tab_to("weights")
    press("Enter")
    assert page.evaluate("() => document.activeElement.textContent") == "Weights: terms and formulas"
    tab_to("keep")
    page.locator("#flag-gpu").focus()
    press("ArrowDown")
    sight.settle()
    assert page.evaluate(focused) == "flag-gpu"  # drawing keeps the focus
    assert sight.plan()["deployment"]["gpu"] != "h100-80g"
    assert page.inner_text("#terms h2") == "Weights: terms and formulas"  # the opened component stays open
    page.locator("#gpus").get_by_role("button", name="a100-80g", exact=True).focus()
    press("Enter")
    sight.settle()
    assert sight.plan()["deployment"]["gpu"] == "a100-80g"
    assert page.evaluate(focused) == "answer"  # the pressed element was removed; the focus stays near it


def test_planner_page_prints_on_one_sheet_of_paper(browser: Any, site: str) -> None:
    page = browser.new_page()
    sight = Sight(page, site).open("?model=Qwen/Qwen3-32B&gpu=l40s-48g&engine=vllm&engine-version=0.33.0")
    for gpu in ("h100-80g", "a100-80g", "h200-141g"):  # the maximum number of kept plans
        sight.settle()
        page.click("#keep")
        page.select_option("#flag-gpu", gpu)
    sight.settle()
    sheets, text = printed(page)
    assert sheets == 1
    plan = sight.plan()
    for words in (
        "Fits.", "Qwen/Qwen3-32B", "vllm 0.33.0 on h200-141g", f"{plan['kv_cache']['tokens']:,}",
        f"{plan['ranks'][0]['weights_bytes']:,}", "vllm serve Qwen/Qwen3-32B", "tonnage plan Qwen/Qwen3-32B",
        "Side by side", "On other GPUs", f"{datetime.now(UTC):%Y-%m-%d}, Tonnage {__version__}, {site}?model=",
    ):  # fmt: skip
        assert words in text, (words, text)
    assert "Copy" not in text
    assert "Memory the engine may use" not in text  # no controls on paper
    page.emulate_media(media="print")
    page.set_viewport_size({"width": 720, "height": 1040})
    sight.picture("print")
    page.close()


TRACE = Path(__file__).parents[1] / "data" / "traces" / "azure_conversation_300.csv"
VLLM = ["--engine", "vllm", "--engine-version", "0.33.0"]
# name -> command, what is on the page beside its command line, and a column to sort by
HTML = {
    "plan": ("plan", ["Qwen/Qwen3-8B", "--gpu", "h100-80g", *VLLM, "--request", "2000+300"],
             ["Fits.", "401,312", "9.80", "h100-80g", "vllm 0.33.0"], "size"),
    "sweep": ("plan", ["Qwen/Qwen3-8B", *VLLM, "--sweep", "--top", "12"],
              ["fit", "tokens", "sequences", "USD/h", "vllm 0.33.0", "a40-48g"], "tokens"),
    "compare": ("plan", ["Qwen/Qwen3-8B", "--gpu", "h100-80g", *VLLM[:2], "--compare", "0.19.0", "0.33.0"],
                ["0.19.0", "0.33.0", "401,312", "tokens", "concurrency", "h100-80g"], ""),
    "train": ("train", ["Qwen/Qwen3-8B", "--gpu", "h100-80g", "--method", "lora"],
              ["Fits", "sequences a step", "2,048 tokens", "h100-80g", "frozen weights"], "size"),
    "replay": ("replay", [TRACE.name, "--model", "Qwen/Qwen3-8B", "--gpu", "h100-80g"],
               ["tokens", "h100-80g", "guaranteed"], ""),
}  # fmt: skip


@pytest.mark.parametrize("name", HTML)
def test_html_report_is_accessible_and_printable(browser: Any, axe: str, models: Path, name: str) -> None:
    command, argv, words, column = HTML[name]
    path = models / f"{name}.html"  # a relative path beside the models
    shutil.copy(TRACE, models)
    code, _, said = commanded(command, [*argv, "--html", path.name], models)
    assert code == 0, said
    for device, width, height in DEVICES:
        for scheme in ("light", "dark"):
            context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
            page = context.new_page()
            asked: list[str] = []
            page.on("request", lambda request, asked=asked: asked.append(request.url))
            sight = Sight(page, path.as_uri())
            page.goto(sight.url)
            assert not (found := serious(page, axe)), (device, scheme, found)
            assert page.evaluate("() => document.documentElement.scrollWidth") <= width
            if (device, scheme) in (("desktop", "light"), ("phone", "dark")):
                sight.picture(f"html-{name}-{device}", whole=device == "phone")
            assert len(asked) == 1
            assert not sight.said
            context.close()
    page = browser.new_page()
    page.goto(path.as_uri())
    text = page.inner_text("body")
    for expected in (*words, f"tonnage {command} ", f"Tonnage {__version__}", f"{datetime.now(UTC):%Y-%m-%d}"):
        assert expected in text, (expected, text[:3000])
    if column:
        head = page.locator("thead th", has_text=re.compile(f"^{column}")).first
        at = head.evaluate("cell => cell.cellIndex")
        cells = (
            "([at]) => [...document.querySelector('tbody').rows].map(row => row.cells[at]?.textContent ?? '')"
        )
        for direction in ("ascending", "descending"):
            before = page.evaluate(cells, [at])
            head.locator("button").click()
            assert head.get_attribute("aria-sort") == direction
            after = page.evaluate(cells, [at])
            assert sorted(after) == sorted(before)
            assert after != before
    sheets, text = printed(page)
    for expected in words:
        assert expected.replace(" ", "") in text.replace(" ", ""), (expected, text[:3000])
    assert sheets <= {"plan": 1, "compare": 2, "train": 2, "sweep": 3, "replay": 3}[name]
    page.close()


def test_html_report_of_a_sweep_sorts_and_filters_thousands_of_rows(
    browser: Any, axe: str, models: Path
) -> None:
    """The page shows 100 rows, but sorts and searches all rows.

    All rows are shown on request, or without scripts.
    """
    code, _, said = commanded("plan", ["Qwen/Qwen3-8B", *VLLM, "--sweep", "--html", "all.html"], models)
    assert code == 0, said
    context = browser.new_context(viewport={"width": 390, "height": 844})
    page = context.new_page()
    sight = Sight(page, (models / "all.html").as_uri())
    page.goto(sight.url)
    rows = page.locator("tbody tr")
    told = page.locator(".find [role=status]")
    found = re.fullmatch(r"The first 100 of ([\d,]+) rows", told.inner_text())
    assert found is not None
    total = int(found[1].replace(",", ""))
    assert total > 2000
    assert rows.count() == 100
    assert not (serious_ones := serious(page, axe)), serious_ones
    sight.picture("html-sweep-long")
    cells = "[...document.querySelectorAll('tbody td:nth-child(5)')]"
    sizes = f"() => {cells}.map((cell) => Number(cell.textContent.replaceAll(',', '')))"
    head = page.locator("thead th", has_text="tokens")
    head.locator("button").click()
    least = page.evaluate(sizes)
    head.locator("button").click()
    most = page.evaluate(sizes)
    assert len(least) == len(most) == 100
    assert least == sorted(least)
    assert most == sorted(most, reverse=True)
    assert least[-1] < most[-1]  # of all rows, not only of the rows shown before
    page.get_by_label("Rows with the words").fill("H100-80g fp8")
    fewer = rows.count()
    assert 0 < fewer < 100
    assert all("h100-80g" in text and "fp8" in text for text in rows.all_inner_texts())
    assert told.inner_text() == f"{fewer} rows with these words"
    page.get_by_label("Rows with the words").fill("")
    page.get_by_role("button", name="Show all").click()
    assert rows.count() == total
    page.get_by_role("button", name="Show the first 100").click()
    assert rows.count() == 100
    assert page.evaluate(sizes) == most  # as it was sorted
    assert not sight.said
    context.close()
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(sight.url)
    assert page.locator("tbody tr >> nth=-1").is_visible()
    context.close()
