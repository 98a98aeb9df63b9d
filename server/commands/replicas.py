"""``tonnage plan MODEL --replicas auto --rate 20 --trace FILE``: how many replicas serve a request rate.

Each replica has the plan that ``tonnage plan`` makes without these options. The trace is replayed at the given
rate (requests per second) through the server's admission and block manager. The number of replicas grows until
99 % of the requests wait at most --wait-target.
"""

from __future__ import annotations

import json
import sys

from tonnage.planner.command import deployment_from, parser
from tonnage.planner.errors import DeploymentError, DoesNotFit

ENOUGH, NOT_ENOUGH = 0, 1

# Options of `tonnage plan` that cannot be combined with --replicas.
_OTHERS = (
    "sweep", "target_concurrency", "compare", "request", "explain", "serve_line", "emit", "markdown", "csv",
    "html",
)  # fmt: skip


def run(argv: list[str]) -> int:
    """Print the number of replicas that the request rate needs; return 0, or 1 when no number is enough.

    Raises:
        TonnageError: the input is invalid.
    """
    arguments = parser().parse_args(argv)
    for name in ("trace", "rate"):
        if getattr(arguments, name) is None:
            raise DeploymentError("--replicas auto needs this option", field=f"--{name}", hint="add it")
    for name in _OTHERS:
        if getattr(arguments, name):
            raise DeploymentError(
                "cannot be combined with --replicas", field="--" + name.replace("_", "-"), hint="leave one out"
            )  # fmt: skip
    if arguments.replicas != "auto":
        raise DeploymentError(f"{arguments.replicas!r} is not supported", field="--replicas", hint="use auto")
    if not 0 < arguments.rate < float("inf"):
        raise DeploymentError(
            f"{arguments.rate} is not a positive finite number", field="--rate", hint="give requests per second"
        )
    # imported here, because --help does not need these modules
    from tonnage.cache.replay.search import search_engines
    from tonnage.planner.planning.build import make_plan
    from tonnage.planner.units import parse_seconds
    from tonnage.server.commands.replay import WAIT_TARGET, setup_of
    from tonnage.server.commands.trace import trace_of

    plan = make_plan(arguments.model, deployment_from(arguments))
    if not plan.fits:
        raise DoesNotFit("; ".join(plan.reasons), field="model")
    trace = trace_of(arguments)
    span = trace.requests[-1].arrival - trace.requests[0].arrival if trace.requests else 0.0
    if len(trace.requests) < 2 or span <= 0:
        raise DeploymentError(
            f"{trace.name} has {len(trace.requests)} requests within {span:g} s, too few for a request rate",
            field="--trace",
            hint="give a longer trace",
        )
    own_rate = (len(trace.requests) - 1) / span
    arguments.scale = arguments.rate / own_rate
    arguments.policy, arguments.length_quantile, arguments.watermark = "guaranteed", None, None
    arguments.max_tokens = None
    asked = arguments.wait_target or WAIT_TARGET
    target = parse_seconds(asked, "--wait-target")

    def tried(replicas: int, wait: float) -> None:
        print(f"{_counted(replicas, 'replica')}: 99 % wait at most {wait:.3f} s", file=sys.stderr, flush=True)

    found = search_engines(trace, setup_of(arguments, plan, trace), target, progress=tried)
    if arguments.json:
        print(
            json.dumps(
                {
                    "replicas": found.engines,
                    "plan_id": plan.plan_id,
                    "devices_per_replica": len(plan.ranks),
                    "rate": arguments.rate,
                    "trace_rate": own_rate,
                    "wait_target_seconds": target,
                    "waits_p99": found.waits,
                }
            )
        )
    elif found.engines is None:
        print(f"no number of replicas meets a 99 % wait of {asked}; tried {sorted(found.waits)}")
    else:
        print(
            f"{_counted(found.engines, 'replica')} of plan {plan.plan_id} "
            f"({_counted(len(plan.ranks), 'device')} each) for {arguments.rate:g} requests a second like "
            f"{trace.name}: 99 % wait at most {found.waits[found.engines]:.3f} s. Times follow from the "
            "device's peak figures: no engine is faster, most are slower."
        )
    return NOT_ENOUGH if found.engines is None else ENOUGH


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
