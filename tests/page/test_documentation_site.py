"""Tests of the documentation as ``make docs`` writes it, opened from its folder.

It requests no other host, and it is readable and searchable on a phone, in dark mode and by keyboard.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browsing import PATIENCE, serious

SITE = Path(__file__).resolve().parents[2] / "build" / "docs" / "site"
PAGES = [str(page.relative_to(SITE)) for page in sorted(SITE.rglob("*.html"))]


@pytest.fixture(scope="module")
def phone(browser: Any) -> Iterator[Any]:
    context = browser.new_context(viewport={"width": 390, "height": 844}, color_scheme="dark")
    yield context
    context.close()


def opened(context: Any, name: str) -> tuple[Any, list[str]]:
    """Return the page, and the list of its requests to other hosts and of its console messages."""
    page, strange = context.new_page(), []
    page.on("request", lambda ask: ask.url.startswith("file:") or strange.append(ask.url))
    page.on("pageerror", lambda error: strange.append(str(error)))
    page.goto((SITE / name).as_uri())
    return page, strange


def test_documentation_site_is_built() -> None:
    assert len(PAGES) > 15, "make docs builds it"


@pytest.mark.parametrize("name", PAGES)
def test_documentation_page_is_accessible_on_phone_in_dark_mode(phone: Any, axe: str, name: str) -> None:
    page, strange = opened(phone, name)
    assert not (found := serious(page, axe)), found
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 390
    assert not strange
    page.close()


def test_documentation_page_is_accessible_in_light_mode(browser: Any, axe: str) -> None:
    context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme="light")
    page, strange = opened(context, "accuracy.html")
    assert not (found := serious(page, axe)), found
    assert not strange
    context.close()


def test_documentation_search_works_from_local_folder(browser: Any) -> None:
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page, strange = opened(context, "index.html")
    page.keyboard.press("/")
    page.keyboard.type("sliding window", delay=20)
    page.get_by_role("link", name="How each number comes about").first.wait_for(timeout=1000 * PATIENCE)
    assert not strange
    context.close()
