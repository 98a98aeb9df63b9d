"""``tonnage replay``: run a request trace through the server's admission and block manager, without a GPU."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from tonnage.cache.admission import AdmissionMode, Policy
from tonnage.planner.bars import redraws
from tonnage.planner.deployment import Deployment
from tonnage.planner.devices.catalogue import find_gpu
from tonnage.planner.errors import DeploymentError, DoesNotFit, TonnageError
from tonnage.planner.flags import given
from tonnage.planner.markup import save
from tonnage.planner.planning.build import make_plan
from tonnage.planner.planning.deployment import deployment_of
from tonnage.planner.plans import Plan
from tonnage.planner.units import parse_seconds
from tonnage.server.commands.replay_tiers import (
    OWN_SPEED,
    curve_dict,
    curve_rows,
    rank_token_bytes,
    setup_of_tiers,
    speed_of,
    token_bytes_of,
)
from tonnage.server.commands.trace import positive, trace_of
from tonnage.server.engines.capacity import limits_of
from tonnage.server.parsers import replay as parser

if TYPE_CHECKING:
    from tonnage.cache.replay.result import Replay
    from tonnage.cache.replay.simulator import Setup
    from tonnage.cache.replay.step_time import StepTime
    from tonnage.cache.replay.tiers import TierSetup
    from tonnage.cache.replay.trace import Trace

DONE, TARGET_MISSED = 0, 1

WAIT_TARGET = "1s"


def run(argv: list[str]) -> int:
    """Replay a request trace and print the result; return 0, or 1 when --search-gpus finds no number of GPUs.

    Raises:
        TonnageError: the input is invalid.
    """
    arguments = parser().parse_args(argv)
    if arguments.wait_target is not None and not arguments.search_gpus:
        raise DeploymentError(
            "has an effect only with --search-gpus; add that flag, or leave this one out", field="--wait-target"
        )
    asked = arguments.wait_target or WAIT_TARGET
    target = parse_seconds(asked, "--wait-target")
    if not 0 < arguments.scale < float("inf"):
        raise DeploymentError(
            f"{arguments.scale} is not a positive finite factor", field="--scale", hint="for example 10"
        )
    # Imported here, because --help does not need these modules.
    from tonnage.cache.replay.page import page
    from tonnage.cache.replay.radix_tiers import hicache_hit_rate
    from tonnage.cache.replay.search import search_engines
    from tonnage.cache.replay.simulator import Simulator
    from tonnage.cache.replay.tier_curve import chunk_uses, optimum, tier_curve
    from tonnage.cache.replay.tier_verdict import TierVerdict
    from tonnage.cache.replay.tiers import chunk_tokens_of

    trace = trace_of(arguments, skip_bad_lines=arguments.skip_bad_lines)
    plan = _plan(arguments)
    setup = setup_of(arguments, plan, trace)
    tiers = setup_of_tiers(arguments, plan)
    if tiers is not None and arguments.search_gpus:
        raise DeploymentError("cannot be combined with --search-gpus", field="--tiers", hint="leave one out")
    curve, chunk_bytes = None, 0
    if tiers is not None or arguments.tier_curve:
        chunk_bytes = token_bytes_of(plan) * chunk_tokens_of(trace)
        uses = chunk_uses(trace)
        curve = tier_curve(uses)
    begin = time.monotonic()
    gpus: int | None = 1
    waits: dict[int, float] = {}
    if arguments.search_gpus:
        ranks = plan.deployment.tensor_parallel_size
        found = search_engines(trace, setup, target, progress=_said(arguments.json, ranks))
        gpus = None if found.engines is None else found.engines * ranks
        waits = {engines * ranks: wait for engines, wait in found.waits.items()}
        assert found.result is not None
        result = found.result
    elif tiers is not None:
        without, result = _without_and_with(trace, setup, tiers)
    else:
        with _progress(len(trace.requests)) as progress:
            result = Simulator(trace, setup, progress).run()
    verdict = None
    if tiers is not None and curve is not None:
        verdict = TierVerdict(
            without, result, tiers, setup.step_time, curve, chunk_bytes,
            optimum(uses, (_pool_bytes(setup, tiers) + tiers.host_bytes + tiers.disk_bytes) // chunk_bytes),
        )  # fmt: skip
    took = time.monotonic() - begin
    rows = _rows(result, setup, trace, took)
    hicache = None
    if curve is not None and arguments.tier_curve:
        if tiers is not None and not tiers.disk_bytes:
            sizes_in_chunks = _pool_bytes(setup, tiers) // chunk_bytes, tiers.host_bytes // chunk_bytes
            hicache = hicache_hit_rate(trace, *sizes_in_chunks)
        rows[-1:-1] = curve_rows(curve, chunk_bytes, hicache)
    if verdict is not None:
        rows[-1:-1] = verdict.rows()
    if arguments.search_gpus:
        answer = "none found" if gpus is None else str(gpus)
        rows.insert(0, (f"GPUs for a 99 % wait of {asked}", answer))
    if arguments.html:
        facts = (("trace", trace.name), *plan.facts())
        sizes = None if curve is None else curve.plot(chunk_bytes)
        title = f"{trace.name} on {plan.model.id}"
        save(arguments.html, page(result, title, rows, arguments.words, facts, sizes))
    if arguments.json:
        record = result.to_dict() | {"skipped_lines": trace.skipped, "plan_id": plan.plan_id}
        if arguments.search_gpus:
            record |= {"gpus": gpus, "wait_target_seconds": target, "waits_p99": waits}
        if verdict is not None:
            record["tiers"] = verdict.to_dict()
        if curve is not None and arguments.tier_curve:
            record["tier_curve"] = curve_dict(curve, chunk_bytes, hicache)
        print(json.dumps(record))
    else:
        width = max(len(name) for name, _ in rows)
        print("\n".join(f"{name:<{width}}  {value}" for name, value in rows))
    return DONE if gpus is not None else TARGET_MISSED


def _without_and_with(trace: Trace, setup: Setup, tiers: TierSetup) -> tuple[Replay, Replay]:
    """Replay a trace without and with the KV tiers, in two concurrent processes; return both replays."""
    from tonnage.cache.replay.simulator import Simulator  # imported here, because --help does not need it

    # A forked process shares the trace, which may have a million requests.
    fork, (receiver, sender) = get_context("fork"), Pipe(duplex=False)
    child = fork.Process(target=_send_replay, args=(sender, trace, setup), daemon=True)
    child.start()
    sender.close()
    with _progress(len(trace.requests)) as progress:
        result = Simulator(trace, replace(setup, tiers=tiers), progress).run()
    try:
        without: Replay | Exception = receiver.recv()
    except EOFError:
        raise TonnageError(
            "the process that replays the trace without tiers has ended", hint="free memory and try again"
        ) from None
    if isinstance(without, Exception):
        raise without
    return without, result


def _send_replay(sender: Connection, trace: Trace, setup: Setup) -> None:
    """Replay a trace, and send the replay, or the error that ended it, through ``sender``."""
    from tonnage.cache.replay.simulator import Simulator  # imported here, because --help does not need it

    try:
        sender.send(Simulator(trace, setup).run())
    except TonnageError as error:
        sender.send(error)


def _pool_bytes(setup: Setup, tiers: TierSetup) -> int:
    return (setup.num_blocks - 1) * setup.layout.block_size * tiers.token_bytes


def _plan(arguments: argparse.Namespace) -> Plan:
    plan = make_plan(arguments.model, deployment_of(given(arguments, Deployment)))
    if not plan.fits:
        named = (getattr(arguments, name, None) for name in ("gpu", "device", "device_memory"))
        here = not any(value is not None for value in named)
        hint = "planned for this machine's CPU, as no GPU was named: --gpu h100-80g names one" if here else None
        raise DoesNotFit("; ".join(plan.reasons), field="--model", hint=hint)
    return plan


def setup_of(arguments: argparse.Namespace, plan: Plan, trace: Trace) -> Setup:
    """Return the configuration of the replay's simulator for a plan and a trace."""
    # imported here, because it imports numba, which --help does not need
    from tonnage.cache.replay.simulator import Setup

    limits, most = limits_of(plan), positive(arguments.max_tokens, "--max-tokens")
    return Setup(
        layout=limits.layout,
        num_blocks=plan.kv_cache.num_blocks,
        max_num_seqs=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
        budget=limits.max_num_batched_tokens,
        max_tokens=trace.longest_output if most is None else most,
        policy=Policy(AdmissionMode(arguments.policy), arguments.length_quantile, arguments.watermark),
        step_time=_step_time(arguments, plan),
        scale=arguments.scale,
        # without --enable-prefix-caching, make_plan has set this field to the engine's default
        enable_prefix_caching=bool(plan.deployment.enable_prefix_caching),
    )


def _step_time(arguments: argparse.Namespace, plan: Plan) -> StepTime:
    # imported here, because it imports numba, which --help does not need
    from tonnage.cache.replay.step_time import StepTime

    bandwidth = speed_of(arguments.memory_bandwidth, 1e9, "--memory-bandwidth", OWN_SPEED)
    flops = speed_of(arguments.flops, 1e12, "--flops", OWN_SPEED)
    if arguments.gpu is not None:
        device = find_gpu(arguments.gpu)
        bandwidth = device.bandwidth if bandwidth is None else bandwidth
        flops = device.flops if flops is None else flops
    if bandwidth is None or flops is None:
        raise DeploymentError(
            "the speed of the device is not known",
            field="--memory-bandwidth",
            hint="give --memory-bandwidth GB/s and --flops TFLOP/s, or --gpu of a GPU by NVIDIA, AMD or Intel",
        )
    ranks = plan.deployment.tensor_parallel_size
    return StepTime(
        weights_bytes=plan.rank.weights_bytes * ranks,
        parameters=plan.model.active_parameters,
        kv_bytes_per_token=rank_token_bytes(plan) * ranks,
        bandwidth=bandwidth,
        flops=flops,
        devices=ranks,
    )


def _rows(result: Replay, setup: Setup, trace: Trace, took: float) -> list[tuple[str, str]]:
    # imported here, because it imports numba, which --help does not need
    from tonnage.cache.replay.result import quantiles

    def times(values: list[float]) -> str:
        return ", ".join(f"{name} {value:,.3f} s" for name, value in quantiles(values).items()) or "-"

    found = f"{100 * result.hit_rate:.2f} % of prompt tokens hit, {result.evictions:,} evictions"
    reasons = "".join(f", {count} {reason}" for reason, count in result.reasons.items())
    return [
        ("trace", f"{trace.name} ({trace.format}), {trace.skipped} lines skipped"),
        ("policy", result.policy),
        ("KV blocks", f"{setup.num_blocks - 1:,} of {setup.layout.block_size} tokens"),
        (
            "requests",
            f"{result.requests:,}: {result.finished:,} finished, {result.rejected:,} refused{reasons}",
        ),
        ("time in the model", f"{result.seconds:,.1f} s, {result.steps:,} steps"),
        ("wait for admission", times(result.waits)),
        ("time to first token", times(result.first_tokens)),
        ("time to the end", times(result.totals)),
        ("prefix cache", found + _states(setup)),
        ("running at once", f"{result.mean_running:.1f} decode on average, {result.most_running} at most"),
        ("pool in use", f"{100 * result.mean_used:.1f} % on average"),
        ("preemptions", f"{result.preemptions:,}, {100 * result.recomputed_share:.2f} % of tokens recomputed"),
        (
            "stalls",
            f"{100 * result.stall_share:.3f} % of turns, the longest {result.longest_stall:,} steps",
        ),
        ("replayed in", f"{took:.1f} s"),
    ]


def _states(setup: Setup) -> str:
    """Return a text on how the prefix cache keeps recurrent states, or "" for a model without such states."""
    # imported here, because it imports numpy, which --help does not need
    from tonnage.cache.blocks.groups import can_cache_states, num_states

    if not setup.enable_prefix_caching or num_states(setup.layout) == 0:
        return ""
    if can_cache_states(setup.layout):
        return f"; recurrent states are cached at ends of blocks, {setup.layout.block_size:,} tokens"
    return "; off: recurrent states are cached with the blocks of full attention, and there is none"


def _said(quiet: bool, ranks: int) -> Callable[[int, float], None]:
    def say(engines: int, wait: float) -> None:
        if not quiet or sys.stderr.isatty():
            print(f"{engines * ranks} GPUs: 99 % wait at most {wait:.3f} s", file=sys.stderr, flush=True)

    return say


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None] | None]:
    """Yield a function that updates the replay's progress bar, or None when stderr is not a terminal."""
    if not redraws(sys.stderr):
        yield None
        return
    from rich.console import Console  # imported here, because only the progress bar needs rich
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("requests", total=total)
        yield lambda done: bar.update(task, completed=done)
