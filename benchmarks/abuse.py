"""Abuse of a server by one client, and its effect on another tenant's stream.

    python benchmarks/abuse.py --json                          hf and vLLM: about twenty minutes each
    python benchmarks/abuse.py --engine fake                   quick; no grammars, no engine process
    python benchmarks/abuse.py --engine hf --case enum deaf    selected cases
    python benchmarks/abuse.py --list

During each case, five limits hold, and afterwards the server returns to its state from before:

- Another tenant's stream never pauses for longer than one second.
- A short request of the same tenant is answered within three seconds.
- /health answers within 100 ms (99th percentile of probes every 50 ms from another process).
- All processes together use at most the plan plus 3 %.
- The API process uses at most its share of the plan, plus 3 % of the plan. The fake engine runs inside the API
  process, so its share is the memory of the process when it is ready.

Two baselines are measured first: ``alone`` without other clients, and ``neighbours`` with well-behaved ones.
``answer_s`` is the longest duration of the victim's short requests. ``others`` is the cores used by programs
outside this benchmark; on a busy machine a result says little. A server that ends or stays unfit is
restarted. The last line is JSON; the exit code is 1 if a case exceeds a limit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from typing import Any

from abuse.cases import CASES, Case, baselines
from abuse.measure import CaseResult, measure
from abuse.server_process import ENGINES, SLACK, running_server

from tonnage.server.demo.model import ensure_demo

HEAD = (
    f"{'case':<16} {'gap s':>7} {'health p99':>10} {'max ms':>8} {'answer s':>8} {'x plan':>7} {'API MiB':>8} "
    f"{'before s':>8} {'others':>6}  law"
)


def row(found: CaseResult) -> str:
    """Return the printed row of one case."""
    seen, beyond = found.seen, found.api_beyond / 2**20
    restored = "never" if found.restored_s is None else f"{found.restored_s:.1f}"
    return (
        f"{found.case.name:<16} {seen['gap_s']:7.2f} {seen['health_p99_ms']:10.1f} "
        f"{seen['health_max_ms']:8.0f} {seen['answer_s']:8.2f} {found.memory:7.3f} {beyond:+8.1f} "
        f"{restored:>8} {found.others:6.2f}  {'over: ' + ', '.join(found.broken) if found.broken else 'ok'}"
        f"  {'; '.join(f'{count} x {what}' for what, count in found.answers.items())}"
    )


async def run(engine: str, cases: list[Case], seconds: float) -> dict[str, Any]:
    """Run all ``cases`` that ``engine`` supports, on as few servers as survive them."""
    left = [*baselines(seconds), *(case for case in cases if engine in case.engines)]
    left.sort(key=lambda case: case.tls)
    rows: list[CaseResult] = []
    planned = starts = 0
    while left:
        tls = left[0].tls
        with running_server(engine, tls) as server:
            await server.read_plan()
            planned, starts = server.planned, starts + 1
            print(f"{engine}: plan {planned:,} bytes, of them the API process {server.api_planned:,}\n{HEAD}")
            new = True
            for case in tuple(left):
                if case.tls != tls:
                    break
                print(f"{engine} {case.name}: {case.what}", file=sys.stderr, flush=True)
                found = await measure(server, case)
                if found is None and new:
                    raise SystemExit(f"{engine}: a new server does not serve")
                if found is None:
                    break
                new = False
                left.pop(0)
                rows.append(found)
                print(row(found), flush=True)
                if not server.alive or found.restored_s is None:
                    break
    return {"planned_bytes": planned, "starts": starts, "cases": [found.as_dict() for found in rows]}


def main() -> int:
    """Run the selected cases; return 1 if one exceeds a limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", nargs="+", choices=ENGINES, default=["hf", "vllm"])
    parser.add_argument(
        "--case", nargs="+", choices=[case.name for case in CASES], metavar="NAME", help="run only these cases"
    )
    parser.add_argument("--baseline", type=float, default=10.0, metavar="SECONDS", help="of each baseline")
    parser.add_argument("--list", action="store_true", help="list the cases and exit")
    parser.add_argument("--json", action="store_true", help="accepted: the last line is always JSON")
    options = parser.parse_args()
    if options.list:
        for case in CASES:
            print(f"{case.name:<16} {case.point}  {case.what} ({', '.join(case.engines)})")
        return 0
    cases = [case for case in CASES if options.case is None or case.name in options.case]
    ensure_demo()
    load = os.getloadavg()
    engines = {engine: asyncio.run(run(engine, cases, options.baseline)) for engine in options.engine}
    broken = [
        f"{engine} {found['case']}"
        for engine, seen in engines.items()
        for found in seen["cases"]
        if found["broken"]
    ]
    machine = {"cores": os.cpu_count(), "load_average_before": load, "load_average_after": os.getloadavg()}
    print(json.dumps({"machine": machine, "slack": SLACK, "over": broken, "engines": engines}))
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main())
