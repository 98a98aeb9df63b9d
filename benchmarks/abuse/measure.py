"""Measurement of one case on one server: the victim's view, memory, recovery, and exceeded limits."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from abuse.attacks import Answers
from abuse.cases import Case
from abuse.server_process import SLACK, VICTIM, AttackedServer, ServerSnapshot
from tonnage.server.engines.process_memory import process_tree

# Limits: no single request, connection or file may take more than its share of time or memory from others.
GAP_SECONDS, HEALTH_MS, ANSWER_SECONDS = 1.0, 100.0, 3.0
SETTLE_SECONDS = 60.0  # time limit for the server to return to its state from before
WATCH_START_SECONDS = 60.0
AFTER_SECONDS = 1.0  # further measurement after the attack has ended


@dataclass(frozen=True, slots=True)
class CaseResult:
    """The result of one case.

    Attributes:
        case: The case.
        seen: Output of watch.py.
        answers: Number of each answer that the attacker received.
        seconds: Duration of the attack.
        memory: Memory of all processes as a multiple of the plan.
        api_beyond: Bytes of the API process beyond its planned share.
        restored_s: Seconds from the end of the attack until the server was as before, including one second of
            further
            measurement. None means not within a minute.
        load: Load average of the machine.
        others: Cores used by programs outside this benchmark.
        broken: Exceeded limits, in words.
    """

    case: Case
    seen: dict[str, Any]
    answers: dict[str, int]
    seconds: float
    memory: float
    api_beyond: int
    restored_s: float | None
    load: float
    others: float
    broken: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the result as a JSON object."""
        return {
            "case": self.case.name,
            "point": self.case.point,
            **self.seen,
            "memory_over_planned": round(self.memory, 4),
            "api_beyond_plan_bytes": self.api_beyond,
            "restored_s": self.restored_s,
            "abuser": self.answers,
            "seconds": round(self.seconds, 1),
            "load_average": round(self.load, 2),
            "others_cores": round(self.others, 2),
            "broken": self.broken,
        }


@contextlib.asynccontextmanager
async def watching(server: AttackedServer) -> AsyncIterator[asyncio.subprocess.Process | None]:
    """Run watch.py with the victim's stream; yield its process, or None if it does not start."""
    script = str(Path(__file__).with_name("watch.py"))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, script, str(server.address.port), VICTIM, str(server.pid)),
        *filter(None, [server.address.certificate]),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        try:
            await asyncio.wait_for(process.stdout.readline(), WATCH_START_SECONDS)
        except TimeoutError:
            yield None
        else:
            yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def settled(server: AttackedServer, before: ServerSnapshot) -> bool:
    """Return whether the server returns to its state ``before`` within a minute.

    Memory may exceed its earlier value by 3 % of the plan.
    """
    until = time.monotonic() + SETTLE_SECONDS
    most, state = before.bytes + SLACK * server.planned, None
    while time.monotonic() < until and server.alive:
        state = await server.state()
        if (
            state is not None
            and not state.unfinished
            and state.blocks <= before.blocks
            and state.bytes <= most
            and state.files <= before.files + 2  # the connections of this query
        ):
            return True
        await asyncio.sleep(0.1)
    print(f"not as before: {before}, then {state}", file=sys.stderr)
    return False


async def measure(server: AttackedServer, case: Case) -> CaseResult | None:
    """Run one case and return its result, or None if the server was unfit before the start."""
    before = await server.state()
    if before is None:
        return None
    async with watching(server) as watch:
        if watch is None:
            return None
        since, busy, own = time.monotonic(), *processor_seconds()
        answers = await run_attack(server, case)
        ended = time.monotonic()
        await asyncio.sleep(AFTER_SECONDS)
        busy_then, own_then = processor_seconds()
        others = max(0.0, (busy_then - busy) - (own_then - own)) / (time.monotonic() - since)
        out, _ = await watch.communicate(b"")
    seen = json.loads(out)
    quiet = await settled(server, before)
    restored = round(time.monotonic() - ended, 1) if quiet else None
    memory = seen["all_bytes"] / server.planned
    beyond = seen["api_bytes"] - server.api_planned
    found = CaseResult(
        case=case,
        seen=seen,
        answers=dict(answers.most_common()),
        seconds=ended - since,
        memory=memory,
        api_beyond=beyond,
        restored_s=restored,
        load=os.getloadavg()[0],
        others=others,
        broken=(),
    )
    return with_exceeded_limits(found, server)


def processor_seconds() -> tuple[float, float]:
    """Return the processor seconds of the whole machine, and of this process tree with the server.

    A process that ends in between counts as another program.
    """
    times = psutil.cpu_times()
    own = 0.0
    for member in process_tree(os.getpid()):
        with contextlib.suppress(psutil.NoSuchProcess):
            spent = psutil.Process(member).cpu_times()
            own += spent.user + spent.system
    return sum(times) - times.idle - times.iowait, own


async def run_attack(server: AttackedServer, case: Case) -> Answers:
    """Run the attack within its time limit and return the attacker's answers."""
    try:
        async with asyncio.timeout(case.seconds):
            return await case.run(server)
    except TimeoutError:
        return Answers({f"no answer within {case.seconds:.0f} s": 1})


def with_exceeded_limits(found: CaseResult, server: AttackedServer) -> CaseResult:
    """Return a copy of the result ``found`` with the names of the limits that it exceeds."""
    seen, broken = found.seen, []
    if found.case.by_client:
        if seen["gap_s"] > GAP_SECONDS or not seen["went_on"]:
            broken.append("the victim's stream stood still")
        if seen["lost"]:
            broken.append("the victim's stream was lost")
        if any(not said.startswith("200") for said in seen["answers"]):
            broken.append("the victim was refused")
        if seen["answer_s"] > ANSWER_SECONDS:
            broken.append("the victim's short request waited")
    if seen["health_p99_ms"] > HEALTH_MS:
        broken.append("/health")
    if found.memory > 1 + SLACK:
        broken.append("memory")
    if found.api_beyond > SLACK * server.planned:
        broken.append("memory of the API")
    if not server.alive:
        broken.append("the server ended")
    elif found.restored_s is None:
        broken.append("not as before")
    return dataclasses.replace(found, broken=tuple(broken))
