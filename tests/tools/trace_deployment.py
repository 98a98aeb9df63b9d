"""Trace which files a `Deployment` passes while one plan is made.

    python tests/tools/trace_deployment.py [--resolved] [MODEL] [FLAG=VALUE ...]

The defaults are ``demo gpu=h100-80g max_model_len=8192``; flags are fields of `Deployment`. The profiler
(``sys.setprofile``) looks at the arguments of each call of a planner function. A file is *passed* if one of its
functions receives a `Deployment`. It is *entered again* if the calls reach it from another file a second time.
With ``--resolved``, a `Resolved` counts too, because it contains the `Deployment` with all values chosen.

The program prints the files in the order in which they are first reached, and one final JSON object:

- ``files``: number of files passed
- ``calls``: number of calls that received the `Deployment`
- ``returns``: number of times that a file was entered again
- ``returned``: number of calls that returned a `Deployment`

The plan is made twice, and only the second plan is traced, so that imports and caches do not count.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

from tonnage.planner.api import plan
from tonnage.planner.deployment import Deployment
from tonnage.planner.flags import flags_of
from tonnage.planner.plans import Resolved

ROOT = Path(__file__).resolve().parents[2]
PLANNER = ROOT / "planner"


class Trace:
    """The calls of planner functions that receive an object of one of ``kinds``.

    Attributes:
        calls: number of such calls by file, in the order in which the files are first reached.
        entered: number of times that the calls reached each file from another file.
        returned: number of calls that returned a `Deployment`, by file.
    """

    def __init__(self, kinds: tuple[type, ...]) -> None:
        self._kinds = kinds
        self._last = ""
        self.calls: Counter[str] = Counter()
        self.entered: Counter[str] = Counter()
        self.returned: Counter[str] = Counter()

    def __call__(self, frame: FrameType, event: str, value: Any) -> None:
        """Count one event of the profiler; ``value`` is the result of the call that returns."""
        path = Path(frame.f_code.co_filename)
        if event not in ("call", "return") or not path.is_relative_to(PLANNER):
            return
        name = str(path.relative_to(PLANNER))
        if event == "return":
            self.returned[name] += isinstance(value, Deployment)
            return
        code = frame.f_code
        count = code.co_argcount + code.co_kwonlyargcount
        if any(isinstance(frame.f_locals.get(each), self._kinds) for each in code.co_varnames[:count]):
            self.calls[name] += 1
            self.entered[name] += name != self._last
            self._last = name


def traced(model: str, fields: dict[str, Any], kinds: tuple[type, ...]) -> Trace:
    """Return the trace of one plan of ``model`` under ``fields``, the second in this process."""
    plan(model, **fields)
    trace = Trace(kinds)
    sys.setprofile(trace)
    try:
        plan(model, **fields)
    finally:
        sys.setprofile(None)
    return trace


def main() -> None:
    """Trace one plan and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument(
        "flags", nargs="*", default=["gpu=h100-80g", "max_model_len=8192"], metavar="FLAG=VALUE"
    )
    parser.add_argument("--resolved", action="store_true", help="count a Resolved like a Deployment")
    given = parser.parse_args()
    known = flags_of(Deployment)
    pairs = (text.partition("=") for text in given.flags)
    fields = {name: known[name].read(value) for name, _, value in pairs}
    trace = traced(given.model, fields, (Deployment, Resolved) if given.resolved else (Deployment,))
    for name, calls in trace.calls.items():
        print(f"{calls:5} calls {trace.entered[name] - 1:4} entered again  {name}")
    found = {
        "files": len(trace.calls),
        "calls": trace.calls.total(),
        "returns": trace.entered.total() - len(trace.calls),
        "returned": trace.returned.total(),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
