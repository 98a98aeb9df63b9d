"""Repeated observation of one server: token rates, detected restarts and headroom."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tonnage.cache.admission import AdmissionRequest, reserved_blocks
from tonnage.planner.deployment import Deployment
from tonnage.planner.errors import DeploymentError, TonnageError
from tonnage.planner.flags import flags_of
from tonnage.server.engines.stats import PoolStats
from tonnage.server.observe.metrics.headroom import Headroom, Trend, headroom
from tonnage.server.observe.metrics.usage import RequestMix
from tonnage.server.watch.client import Client, WatchError
from tonnage.server.watch.planned import plan_of
from tonnage.server.watch.records import Counters, PlanSummary, Reading, Replica, ServerFacts
from tonnage.server.watch.samples import Samples
from tonnage.server.watch.servers import Server, recognise, servers

# Token rates and the average size of requests are computed over this many seconds. `Trend`, which estimates
# when the KV pool is full, covers the same time.
_WINDOW_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Observation:
    """The facts, plan and state of a watched server at one moment.

    Attributes:
        url: the server's URL.
        at: time of the observation, in seconds since the epoch.
        facts: facts that stay the same until the server restarts.
        planned: the plan for the server, None without one.
        reading: the server's requests, KV pools and counters.
        measured: measured bytes of one replica, by memory component.
        headroom: the requests and tokens that still fit, None when unknown.
        full_in: estimated seconds until the KV pool is full, None when unknown.
        change: increase of the counters since the previous observation; None at the first one and after a
            restart.
        seconds: seconds since the previous observation.
        restarts: number of restarts of the server seen so far.
        notes: notes for the user.
    """

    url: str
    at: float
    facts: ServerFacts
    planned: PlanSummary | None
    reading: Reading
    measured: Mapping[str, int]
    headroom: Headroom | None = None
    full_in: float | None = None
    change: Counters | None = None
    seconds: float = 0.0
    restarts: int = 0
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class _Run:
    """One run of the watched server, from its start to its restart, with its plan and recent readings."""

    server: Server
    facts: ServerFacts
    planned: PlanSummary | None
    notes: tuple[str, ...]
    looks: deque[tuple[float, Reading]] = field(default_factory=deque)
    trend: Trend = field(default_factory=Trend)


class Watcher:
    """An observer of one running inference server.

    Args:
        client: the HTTP client for the server.
        given: fields of the Deployment that the user sets, because the server does not report them.
        model: the server's model as a path or hub id on this machine; None uses what the server reports.
        kv_unified: whether llama.cpp's slots share one KV cache; None when the user does not say.
    """

    def __init__(
        self, client: Client, given: Mapping[str, Any], model: str | None, *, kv_unified: bool | None = None
    ) -> None:
        self._client, self._given, self._model = client, given, model
        self._servers = servers(kv_unified)
        self._kv_unified = kv_unified
        self._run: _Run | None = None
        self._restarts = 0
        # whether the last observation failed; the next answer may then come from another server
        self._lost = False

    def observe(self) -> Observation:
        """Read the watched server once and return the observation.

        Raises:
            WatchError: the server cannot be read now.
            TonnageError: no plan could be made at the first observation.
        """
        try:
            return self._observe()
        except WatchError:
            self._lost = True
            raise

    def _observe(self) -> Observation:
        page = self._client.get("/metrics")
        samples = Samples(page.text if page.status == 200 else "")
        server = recognise(self._client, samples, self._servers)
        run = self._run
        if run is None:
            run = self._run = self._begin(server, samples)
        elif server is not run.server or (self._lost and server.facts(self._client, samples) != run.facts):
            run = self._again(server, samples)
        reading = server.read(self._client, samples, page, run.facts)
        if run.looks and _restarted(run.looks[-1][1], reading):
            run = self._again(server, samples)
            reading = server.read(self._client, samples, page, run.facts)
        self._lost = False
        return self._watched(run, reading)

    def _begin(self, server: Server, samples: Samples) -> _Run:
        facts = server.facts(self._client, samples)
        own = server.planned(self._client, samples)
        if own is not None:
            return _Run(server, facts, own, (*facts.notes, *self._unused_flags(facts)))
        if self._kv_unified is not None and facts.title != "llama.cpp":
            raise DeploymentError(
                f"applies only to llama.cpp; the server is {facts.title}",
                field="--kv-unified",
                hint="leave this option out",
            )
        planned, notes = plan_of(facts, self._given, self._model)
        return _Run(server, facts, planned, notes)

    def _again(self, server: Server, samples: Samples) -> _Run:
        """Start a new run after a restart of the server; if no plan can be made, continue without a plan."""
        try:
            run = self._begin(server, samples)
        except WatchError:  # The server is down again; `_begin` is called again at the next observation.
            raise
        except TonnageError as error:
            facts = server.facts(self._client, samples)
            run = _Run(server, facts, None, (f"without a plan: {error}",))
        self._run = run
        self._restarts += 1
        return run

    def _unused_flags(self, facts: ServerFacts) -> tuple[str, ...]:
        """Return a note on flags of the user that have no effect, because the server reports its own plan."""
        given = ["--model"] if self._model is not None else []
        given += [flags_of(Deployment)[name].option for name in self._given]
        if self._kv_unified is not None:
            given.append("--kv-unified")
        if not given:
            return ()
        where = facts.title if facts.title == "Tonnage" else f"{facts.title} with Tonnage in it"
        return (
            f"{', '.join(given)} {'is' if len(given) == 1 else 'are'} not used: {where} reports its own plan",
        )

    def _watched(self, run: _Run, reading: Reading) -> Observation:
        now = time.monotonic()
        before = run.looks[-1] if run.looks else None
        if reading.tier is not None:
            reading = replace(reading, tier=reading.tier.after(None if before is None else before[1].tier))
        run.looks.append((now, reading))
        while now - run.looks[0][0] > _WINDOW_SECONDS:
            run.looks.popleft()
        room = reading.headroom or _headroom(run, reading)
        full_in = None
        if room is not None and (usable := reading.blocks("usable")):
            run.trend.observe(now, usable - room.blocks)
            full_in = run.trend.seconds_to(room.blocks)
        return Observation(
            url=self._client.url,
            at=time.time(),
            facts=run.facts,
            planned=run.planned,
            reading=reading,
            measured=_measured(run.planned, reading),
            headroom=room,
            full_in=full_in,
            change=None if before is None else reading.counters.since(before[1].counters),
            seconds=0.0 if before is None else now - before[0],
            restarts=self._restarts,
            notes=run.notes,
        )


def _restarted(before: Reading, now: Reading) -> bool:
    return before.started != now.started or now.counters.since(before.counters) is None


def _measured(planned: PlanSummary | None, reading: Reading) -> Mapping[str, int]:
    """Return a watched server's measured bytes by memory component, for one replica.

    If the server does not measure the KV pool, its bytes are its blocks times the bytes of a block.
    """
    blocks = reading.blocks("num_blocks")
    if planned is None or blocks is None or "kv_pool" in reading.measured:
        return reading.measured
    return {**reading.measured, "kv_pool": blocks // planned.replicas * planned.bytes_per_block}


def _headroom(run: _Run, reading: Reading) -> Headroom | None:
    """Return a watched server's headroom (further requests and tokens), summed over all replicas.

    `prompt_tokens`, the largest prompt that still fits, is not a sum but the value of the emptiest replica. The
    engine reserves no blocks for tokens that running requests will still generate, so these requests may soon
    take free blocks. Returns None without a plan, or if the headroom of a replica is unknown.
    """
    if run.planned is None or run.planned.limits is None:
        return None
    tokens = _typical(run, reading)
    parts = [_room(run.planned, replica, tokens) for replica in reading.replicas]
    known = [part for part in parts if part is not None]
    if not known or len(known) < len(parts):
        return None
    return Headroom(
        sum(part.blocks for part in known),
        sum(part.requests for part in known),
        max(part.prompt_tokens for part in known),
    )


def _room(planned: PlanSummary, replica: Replica, typical: tuple[float, float] | None) -> Headroom | None:
    pool, limits = replica.pool, planned.limits
    if pool is None or pool.used is None or replica.running is None or limits is None:
        return None
    if replica.seats is not None:
        limits = replace(limits, max_num_seqs=replica.seats)
    limits = replace(limits, usable_blocks=pool.usable)
    mix = RequestMix()
    if typical is not None:
        completion = min(max(1, round(typical[1])), max(1, limits.max_model_len - 1))
        prompt = min(max(1, round(typical[0])), max(1, limits.max_model_len - completion))
        mix.observe(reserved_blocks(AdmissionRequest(prompt, completion), limits), 1)
    stats = PoolStats(pool.num_blocks, pool.usable, pool.used, 0, pool.usable - pool.used, reserved=pool.used)
    return headroom(stats, replica.running, mix, limits, default_max_tokens=1)


def _typical(run: _Run, reading: Reading) -> tuple[float, float] | None:
    """Return the average prompt and output tokens of requests that finished in the last two minutes.

    If no request has finished in that time, the averages are over all finished requests. If none has finished
    since the start, they are over the current requests.
    """
    recent = reading.counters.since(run.looks[0][1].counters)
    for counters in (recent, reading.counters):
        if counters is None or not counters.finished:
            continue
        if counters.finished_prompt is not None and counters.finished_generation is not None:
            return (
                counters.finished_prompt / counters.finished,
                counters.finished_generation / counters.finished,
            )
    return reading.typical
