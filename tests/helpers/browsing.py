"""A page of a real browser, watched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PATIENCE = 240.0
DEVICES = [("desktop", 1280, 1000), ("phone", 390, 844)]
_COMMAND = "import sys; from tonnage.server.cli import main; sys.exit(main())"


def commanded(command: str, argv: list[str], folder: Path) -> tuple[int, str, str]:
    """Run ``tonnage`` in ``folder``; return its exit code, standard output and standard error.

    The variable TONNAGE_PYTHON, set by ``make page-check``, names a Python with all packages, because a replay
    needs more than the page does.
    """
    python = os.environ.get("TONNAGE_PYTHON", sys.executable)
    done = subprocess.run([python, "-c", _COMMAND, command, *argv], cwd=folder, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


class Sight:
    """A page of the browser. Its policy allows no eval, so nothing here waits by one."""

    def __init__(self, page: Any, url: str) -> None:
        self.page, self.url = page, url
        page.set_default_timeout(1000 * PATIENCE)
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
            assert time.monotonic() < deadline, (self.said, self.page.inner_text("#answer"))
            time.sleep(0.05)

    def settle(self) -> Sight:
        """Wait for what comes after the answer, too: other GPUs, plans beside."""
        self.wait("() => window.tonnage?.settled() && document.querySelector('#gpus table') !== null")
        return self

    def refused(self, words: str) -> None:
        """Wait for an error message with the given words."""
        said = "document.getElementById('status')"
        self.wait(f"() => {said}.className === 'no' && {said}.textContent.includes({words!r})")

    def plan(self) -> dict[str, Any]:
        """Return the plan on the page, as the JSON of the command."""
        found: dict[str, Any] = json.loads(self.page.evaluate("() => window.tonnage.out"))
        return found

    def planned(self, *parts: str) -> str:
        """Wait for the plan of a model whose name contains all ``parts``; return the model's name."""
        for part in parts:
            self.wait(
                f"() => window.tonnage.settled() && document.getElementById('model').value.includes({part!r})"
            )
        assert self.page.inner_text("#status") == ""
        found: str = self.page.input_value("#model")
        assert self.plan()["model"]["id"] == found
        return found

    def ask(self, command: str, argv: list[str]) -> dict[str, Any]:
        found: dict[str, Any] = self.page.evaluate(
            "([command, argv]) => window.tonnage.tell('ask', { command, argv })", [command, argv]
        )
        return found

    def picture(self, name: str, whole: bool = False) -> None:
        """Save a screenshot in the folder TONNAGE_PICTURES, if it is set.

        ``whole`` selects the whole page instead of its visible part.
        """
        if folder := os.environ.get("TONNAGE_PICTURES"):
            self.page.screenshot(path=f"{folder}/{name}.png", full_page=whole)


def serious(page: Any, axe: str) -> str:
    """Return the serious and critical findings of axe-core on the page as JSON, empty without any.

    ``axe`` is the source code of axe-core.
    """
    page.add_script_tag(content=axe)
    found = page.evaluate("() => axe.run()")["violations"]
    bad = [one for one in found if one["impact"] in ("serious", "critical")]
    return json.dumps(bad, indent=1)[:4000] if bad else ""
