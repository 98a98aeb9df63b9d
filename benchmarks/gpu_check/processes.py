"""The parent's side of the check: it runs the steps in child processes, with a time limit for each."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .rows import FAILED, OFF, SKIPPED, Row

# Seconds of each step, of 8 minutes; a step without an entry has OTHER_LIMIT. On two busy cores, where nothing
# was compiled before, first-step took 118 s.
LIMITS = {"device": 40, "first-step": 240, "attention": 150, "vllm": 500}
OTHER_LIMIT = 90
# Seconds that a process may take before its first step: torch alone took 25 s to import on two busy cores.
START_LIMIT = 120
# Steps that measure the memory of a whole GPU, so no earlier step may have used it in the same process.
FRESH = ("memory", "out-of-memory", "vllm")


@dataclass(slots=True)
class Outcome:
    """The result of one step.

    Attributes:
        status: `ok`, `off` (a row is outside its plan), `failed` or `skipped`.
        seconds: duration of the step.
        rows: measured figures.
        why: reason of a failed or skipped step.
    """

    status: str
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)
    why: str = ""


class Check:
    """A run of the check: child processes in turn, until every step has an outcome.

    Args:
        command: command that runs the steps whose names are appended to it.
        names: names of the steps in order.
        deadline: time (`time.monotonic`) after which no step begins.
        fresh: whether the steps of `FRESH` need a process of their own.
        tell: function that is called with the step and a row, or the step's outcome, as soon as it is known.
    """

    def __init__(
        self,
        command: list[str],
        names: list[str],
        deadline: float,
        *,
        fresh: bool,
        tell: Callable[[str, Row | Outcome], None],
    ) -> None:
        self._command, self._left, self._deadline = command, list(names), deadline
        self._fresh, self._tell = fresh, tell
        self.outcomes: dict[str, Outcome] = {}

    def run(self) -> dict[str, Outcome]:
        """Run all steps and return the outcome of each."""
        while self._left:
            if time.monotonic() >= self._deadline:
                self._end(self._left[0], Outcome(SKIPPED, why="the time of --minutes is used up"))
                continue
            self._run_child(self._next_names())
        return self.outcomes

    def _next_names(self) -> list[str]:
        """Return the steps that the next process runs."""
        if not self._fresh:
            return list(self._left)
        if self._left[0] in FRESH:
            return self._left[:1]
        end = next((at for at, name in enumerate(self._left) if name in FRESH), len(self._left))
        return self._left[:end]

    def _run_child(self, names: list[str]) -> None:
        """Run steps in one process, until all have ended, one has failed, or one is over its limit."""
        process = subprocess.Popen([*self._command, *names], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        messages: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=_read, args=(process.stdout, messages), daemon=True).start()
        try:
            for name in names:
                if time.monotonic() >= self._deadline or not self._follow(name, messages, process):
                    return
        finally:
            process.kill()
            process.wait()

    def _follow(
        self, name: str, messages: queue.Queue[dict[str, Any] | None], process: subprocess.Popen[str]
    ) -> bool:
        """Collect the rows of one step; return whether the process can go on with the next.

        The step's limit counts from the message with which the step begins. Until then the process imports
        packages, for which START_LIMIT holds.
        """
        begin, limit = time.monotonic(), START_LIMIT
        outcome = Outcome("ok")
        why = None
        while why is None:
            try:
                message = messages.get(timeout=max(0.1, begin + limit - time.monotonic()))
            except queue.Empty:
                why = f"no end after {limit} s"
                break
            if message is None:
                why = f"the process ended with status {process.wait()}"
            elif "begin" in message:
                begin, limit = time.monotonic(), LIMITS.get(name, OTHER_LIMIT)
            elif "row" in message:
                outcome.rows.append(row := Row(**message["row"]))
                self._tell(name, row)
            elif "failed" in message:
                why = message["failed"]
            elif "end" in message:
                break
        verdicts = {row.verdict for row in outcome.rows}
        outcome.status = FAILED if why or FAILED in verdicts else OFF if OFF in verdicts else "ok"
        outcome.seconds, outcome.why = round(time.monotonic() - begin, 2), why or ""
        self._end(name, outcome)
        return why is None

    def _end(self, name: str, outcome: Outcome) -> None:
        self._left.remove(name)
        self.outcomes[name] = outcome
        self._tell(name, outcome)


def _read(stream: Any, messages: queue.Queue[dict[str, Any] | None]) -> None:
    """Put each message of a child into the queue, and None at its end; other output goes to standard error."""
    for line in stream:
        try:
            messages.put(json.loads(line))
        except ValueError:
            sys.stderr.write(line)
    messages.put(None)
