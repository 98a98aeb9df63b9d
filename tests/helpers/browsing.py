"""A page of a real browser, watched."""

from __future__ import annotations

import os
import time
from typing import Any

PATIENCE = 90.0


class Sight:
    """A page of the browser. Its policy allows no eval, so nothing here waits by one."""

    def __init__(self, page: Any, url: str) -> None:
        self.page, self.url = page, url
        self.said: list[str] = []
        page.on("pageerror", lambda error: self.said.append(str(error)))
        page.on("console", lambda line: line.type == "error" and self.said.append(line.text))

    def open(self, query: str = "") -> Sight:
        self.page.goto(self.url + query)
        self.wait("() => document.getElementById('answer').getAttribute('aria-busy') === 'false'")
        assert self.page.evaluate("() => window.tonnage.out !== undefined"), self.page.inner_text("#answer")
        return self

    def wait(self, condition: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not self.page.evaluate(condition):
            assert time.monotonic() < deadline, self.page.inner_text("#answer")
            time.sleep(0.05)

    def settle(self) -> Sight:
        """Wait for what comes after the answer, too: other GPUs, plans beside."""
        self.wait(
            "() => window.tonnage?.settled !== undefined && document.querySelector('#gpus table') !== null"
        )
        return self

    def ask(self, command: str, argv: list[str]) -> dict[str, Any]:
        found: dict[str, Any] = self.page.evaluate(
            "([command, argv]) => window.tonnage.tell('ask', { command, argv })", [command, argv]
        )
        return found

    def picture(self, name: str) -> None:
        """Kept where TONNAGE_PICTURES says, if it says a folder."""
        if folder := os.environ.get("TONNAGE_PICTURES"):
            self.page.screenshot(path=f"{folder}/{name}.png")
