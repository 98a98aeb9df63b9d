"""``tonnage plan MODEL --trace FILE``: how many requests like those of a trace run at once.

The plan is the one that ``tonnage plan`` makes of the same flags, by lengths alone; `tonnage replay` has the
arrivals and the prefixes too.
"""

from __future__ import annotations

from pathlib import Path

from tonnage.planner.command import answer, parser
from tonnage.planner.errors import DeploymentError
from tonnage.planner.units import parse_count


def run(argv: list[str]) -> int:
    """As ``tonnage plan``; raises TonnageError on bad input."""
    arguments = parser().parse_args(argv)
    for name in ("sweep", "target_concurrency", "compare"):
        if getattr(arguments, name):
            why = f"is about one plan, --{name.replace('_', '-')} about many"
            raise DeploymentError(why, field="--trace", hint="leave one out")
    # imported here: --help needs none of it
    from tonnage.cache.replay.columns import parse_columns
    from tonnage.cache.replay.trace import read_trace

    columns = None if arguments.columns is None else parse_columns(arguments.columns)
    limit = None if arguments.limit is None else parse_count(arguments.limit, "--limit")
    trace = read_trace(Path(arguments.trace), limit=limit, columns=columns)
    lengths = [(request.prompt_tokens, request.output_tokens) for request in trace.requests]
    return answer(arguments, (trace.name, lengths))
