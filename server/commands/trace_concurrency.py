"""``tonnage plan MODEL --trace FILE``: how many requests with the lengths in a trace can run at once.

The option ``--trace`` adds this number to the output of ``tonnage plan``; it does not change the plan. Only the
lengths in the trace are used, while `tonnage replay` also uses arrival times and common prefixes.
"""

from __future__ import annotations

from tonnage.planner.command import answer, parser
from tonnage.planner.errors import DeploymentError
from tonnage.server.commands.trace import trace_of


def run(argv: list[str]) -> int:
    """Print the plan with the number of requests that run at once; return the exit code of `tonnage plan`.

    Raises:
        TonnageError: the input is invalid.
    """
    arguments = parser().parse_args(argv)
    for name in ("sweep", "target_concurrency", "compare"):
        if getattr(arguments, name):
            why = f"needs a single plan; --{name.replace('_', '-')} gives a table of plans"
            raise DeploymentError(why, field="--trace", hint="leave one out")
    trace = trace_of(arguments)
    lengths = [(request.prompt_tokens, request.output_tokens) for request in trace.requests]
    return answer(arguments, (trace.name, lengths))
