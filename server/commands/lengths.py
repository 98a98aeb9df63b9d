"""``tonnage plan MODEL --trace FILE``: how many requests like those of a trace run at once.

The plan is the one that ``tonnage plan`` makes of the same flags, by lengths alone; `tonnage replay` has the
arrivals and the prefixes too.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tonnage.planner.command import answer
from tonnage.planner.command import parser as plan_parser
from tonnage.planner.errors import DeploymentError


def parser() -> argparse.ArgumentParser:
    """The flags of ``tonnage plan`` and those of the question."""
    p = plan_parser()
    ask = p.add_argument_group("requests of a trace")
    ask.add_argument("--trace", required=True, type=Path, metavar="FILE", help="what the requests are like")
    ask.add_argument("--limit", metavar="N", help="only the first N requests of the trace")
    return p


def run(argv: list[str]) -> int:
    """As ``tonnage plan``; raises TonnageError on bad input."""
    arguments = parser().parse_args(argv)
    for name in ("sweep", "target_concurrency", "compare"):
        if getattr(arguments, name):
            why = f"is about one plan, --{name.replace('_', '-')} about many"
            raise DeploymentError(why, field="--trace", hint="leave one out")
    # imported here: --help needs none of it
    from tonnage.cache.replay.trace import read_trace
    from tonnage.server.commands.replay import positive

    trace = read_trace(arguments.trace, limit=positive(arguments.limit, "--limit"))
    lengths = [(request.prompt_tokens, request.output_tokens) for request in trace.requests]
    return answer(arguments, (trace.name, lengths))
