"""What one client can do to the others: every known abuse, with a victim's stream beside it, and the law.

    python benchmarks/abuse.py --json                          hf and vLLM: about twenty minutes each
    python benchmarks/abuse.py --engine fake                   quick; no grammars, no engine process
    python benchmarks/abuse.py --engine hf --case enum deaf    some cases
    python benchmarks/abuse.py --list

The law: while any case runs another tenant's stream never stands still longer than a second, /health answers
within 100 ms (99th percentile of probes every 50 ms from another process), all processes together hold at
most the plan and 3 %, the API process at most its share of the plan and the same 3 %, and afterwards all is as
before. The fake engine lives in the API process: what that holds when it is ready stands for its share.

Nobody (``alone``) and well-behaved ``neighbours`` are measured first. ``answer_s`` is the longest that a short
request of the victim's took, ``others`` the cores that neither the server nor this benchmark used meanwhile:
on a machine that is busy a case says little. A server that an abuse ends or leaves unfit is started again. The
last line is JSON; the exit code is 1 when a case breaks the law.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from typing import Any

from abuse.cases import CASES, Case, baselines
from abuse.measure import Found, measure
from abuse.served import ENGINES, SLACK, served

from tonnage.server.demo.model import ensure_demo

HEAD = (
    f"{'case':<16} {'gap s':>7} {'health p99':>10} {'max ms':>8} {'answer s':>8} {'x plan':>7} {'API MiB':>8} "
    f"{'before s':>8} {'others':>6}  law"
)


def row(found: Found) -> str:
    seen, beyond = found.seen, found.api_beyond / 2**20
    restored = "never" if found.restored_s is None else f"{found.restored_s:.1f}"
    return (
        f"{found.case.name:<16} {seen['gap_s']:7.2f} {seen['health_p99_ms']:10.1f} "
        f"{seen['health_max_ms']:8.0f} {seen['answer_s']:8.2f} {found.memory:7.3f} {beyond:+8.1f} "
        f"{restored:>8} {found.others:6.2f}  {'over: ' + ', '.join(found.broken) if found.broken else 'ok'}"
        f"  {'; '.join(f'{count} x {what}' for what, count in found.answers.items())}"
    )


async def run(engine: str, cases: list[Case], seconds: float) -> dict[str, Any]:
    """All ``cases`` that ``engine`` knows, on as few servers as they leave alive."""
    left = [*baselines(seconds), *(case for case in cases if engine in case.engines)]
    rows: list[Found] = []
    planned = starts = 0
    while left:
        with served(engine) as server:
            await server.read_plan()
            planned, starts = server.planned, starts + 1
            print(f"{engine}: plan {planned:,} bytes, of them the API process {server.api_planned:,}\n{HEAD}")
            new = True
            for case in tuple(left):
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", nargs="+", choices=ENGINES, default=["hf", "vllm"])
    parser.add_argument(
        "--case", nargs="+", choices=[case.name for case in CASES], metavar="NAME", help="only these"
    )
    parser.add_argument("--baseline", type=float, default=10.0, metavar="SECONDS", help="of each of the two")
    parser.add_argument("--list", action="store_true", help="the cases, and nothing else")
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
