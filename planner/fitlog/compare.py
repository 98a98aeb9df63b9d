"""Comparison of an engine's start-up log with the plan for the log's flags, by rank and memory term."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from tonnage.planner.deployment import Deployment
from tonnage.planner.engines.base import Engine
from tonnage.planner.engines.log import LogFigures
from tonnage.planner.engines.pool import PoolCapacity
from tonnage.planner.engines.registry import engine_of
from tonnage.planner.errors import DeploymentError, ModelNotFound, TonnageError
from tonnage.planner.fitlog import log_flags
from tonnage.planner.fitlog.comparison import OF_LOGGED_POOL, Comparison, Row, word
from tonnage.planner.fitlog.read import StartLog
from tonnage.planner.planning.calibration import shape_of
from tonnage.planner.planning.size import Size, Sizer
from tonnage.planner.planning.stages import Stage
from tonnage.planner.source.resolve import ModelSource, resolve_model
from tonnage.planner.units import gib

FITTED = {
    "activation_bytes": "activation_bytes", "non_torch_bytes": "framework_bytes",
    "cuda_graph_bytes": "cuda_graph_bytes",
}  # fmt: skip
"""Memory terms that only a run of the engine determines: name in a log -> name in a plan."""
# A larger ratio of logged to planned weights means another checkpoint or another format.
_OTHER_WEIGHTS = 1.25
# Figure of the KV pool in a log -> its maximum rounding error. Counts are exact; concurrency has two decimals.
_POOL_ROUNDING = {"num_blocks": 0.0, "tokens": 0.0, "max_concurrency": 0.005}


def compare(found: StartLog, name: str, args: argparse.Namespace) -> Comparison:
    """Compute the plan for a start-up log's flags and compare the plan's memory terms with the log.

    Raises:
        TonnageError: the log lacks a required value, or the deployment is not supported. The message says what
            is missing or not supported.
    """
    model = args.model or found.model
    if model is None:
        raise DeploymentError(
            "the log does not name its model", field="--model", hint=f"give --model for {name}"
        )
    try:
        source = resolve_model(model)
    except ModelNotFound as error:
        if args.model is None:
            error.hint = f"--model names the log's model by another name or folder; {error.hint}"
        raise
    flags = log_flags.deployment_of(found, args)
    flags, inferred, hint = log_flags.with_gpu(flags, found, args)
    flags, notes = log_flags.with_format(flags, found, source)
    notes += [*log_flags.option_notes(found, args), *source.notes]
    size, sized = _size(source, flags, found, hint, notes)
    engine = engine_of(flags.engine)
    skipped = _not_compared(engine, size, source, found, flags, hint, notes)
    rows = [row for row in _engine_rows(size, engine, found, sized) if row.term not in skipped]
    ranks = [
        row
        for rank, told in found.ranks.items()
        for row in _rank_rows(size, rank, told, sized)
        if row.term not in skipped
    ]
    weights = next((row for row in ranks if row.term == "weights_bytes" and row.logged > 0), None)
    if weights is not None and not 1 / _OTHER_WEIGHTS < weights.planned / weights.logged < _OTHER_WEIGHTS:
        notes.append(
            f"its weights have {weights.logged / weights.planned:.2f} times the bytes of {model}: "
            "the log is from another checkpoint or another format (--model)"
        )
    decides = _deciding(found)
    own = [row for row in ranks if row.rank == decides]
    return Comparison(
        name, (*(replace(row, rank="") for row in own), *rows), tuple(notes), tuple(ranks),
        _missing(engine, found, size), (*inferred, *log_flags.assumed(found, args, size)), found.failure,
        _headline(found, model),
        size.chosen.flags, model, tuple(shape_of(size.architecture, size.chosen.flags)), found.digest,
    )  # fmt: skip


def _size(
    source: ModelSource, flags: Deployment, found: StartLog, hint: str, notes: list[str]
) -> tuple[Size, bool]:
    """Return the memory plan for a log's flags, and whether its KV pool can be compared with the log.

    If the log names neither the GPU nor its memory, the plan takes the size of the KV pool from the log, so the
    pool cannot be compared. Notes for the user are appended to `notes`. `hint` is text for such a note, which
    asks the user for --gpu.
    """
    sizer, sized = Sizer(source), True
    engine = engine_of(flags.engine)
    if engine.sized_by_context or flags.kv_cache_memory_bytes is not None:
        sized = engine.sized_by_context
    elif flags.gpu is None and flags.device_memory is None:
        pool = int(found.figures.get("kv_pool_bytes", 0))
        if pool <= 0:
            what = f"prints a pool of {gib(pool)}" if pool else "prints no pool"
            if "weights_bytes" not in found.figures:
                raise DeploymentError(
                    f"the GPU must be known, because the log {what}",
                    field="--gpu",
                    hint="give --gpu or --device-memory",
                )
            notes.append(f"the pool is not compared: the log {what}, and the GPU is not known ({hint})")
        pool_bytes = max(0, pool) or None
        flags = replace(flags, device_memory=log_flags.UNKNOWN_MEMORY, kv_cache_memory_bytes=pool_bytes)
        sized = False
    if (drafted := log_flags.draft(found)) is not None:
        model, count = drafted
        try:
            return sizer.size(replace(flags, speculative_model=model, num_speculative_tokens=count)), sized
        except TonnageError as error:
            notes.append(f"its draft {model} is not in the plan: {error}")
    return sizer.size(flags), sized


def _not_compared(
    engine: Engine, size: Size, source: ModelSource, found: StartLog, flags: Deployment, hint: str,
    notes: list[str],
) -> set[str]:  # fmt: skip
    skipped: set[str] = set()
    if why := engine.log_mismatch(size.chosen.flags, source.kind, found.flags.get("quantization")):
        skipped.add("weights_bytes")
        notes.append(f"weights not compared: {why}")
    if flags.gpu is None and flags.device_memory is None and not engine.sized_by_context:
        left = [name for name in FITTED if name in found.figures]
        skipped.update(FITTED)
        if left:
            names = ", ".join(dict.fromkeys(map(word, left)))
            notes.append(f"not compared, as they depend on the GPU: {names} ({hint})")
    if found.failure is not None:
        foretold = size.failure.sentence if size.failure is not None and size.reasons else None
        notes.append(
            "the plan expects these flags to start; the failure has another reason" if foretold is None
            else f"the plan expects this error: {foretold}"
        )  # fmt: skip
    if found.starts > 1:
        notes.append(f"the log holds {found.starts} starts: the last is compared")
    return skipped


def _rank_rows(size: Size, rank: str, told: LogFigures, sized: bool) -> Iterator[Row]:
    stage, figures = _stage(size, rank), told.figures
    runtime = stage.runtime
    estimates = {
        "activation_bytes": runtime.activation,
        "non_torch_bytes": runtime.framework,
        # `runtime.beside` is set if the engine captures CUDA graphs after it sized the KV pool.
        "cuda_graph_bytes": runtime.graphs if runtime.beside is None else runtime.beside,
    }
    added = stage.rank.lora_bytes + stage.rank.draft_bytes
    low, high = stage.weights_bounds
    planned = {"weights_bytes": (stage.rank.weights_bytes + added, low + added, high + added)}
    planned |= {name: (e.value, e.low, e.high) for name, e in estimates.items()}
    graphs = figures.get("graph_estimate_bytes", figures.get("cuda_graph_bytes"))
    for name, (value, lower, upper) in planned.items():
        logged = graphs if name == "cuda_graph_bytes" else figures.get(name)
        if logged is not None and value:
            yield Row(name, value, logged, lower, upper, told.rounding.get(name, 0.0), rank)
    if "kv_pool_bytes" in figures and sized:
        engine, used = engine_of(size.chosen.flags.engine), stage.rank.used_bytes
        low, high = stage.used_bounds
        pool, rounding = engine.logged_pool(size.chosen, stage.rank), told.rounding.get("kv_pool_bytes", 0.0)
        # If the engine sizes the pool by the context length, the pool's size does not depend on the memory that
        # weights and activations use, so its planned interval has no width.
        less, more = (0, 0) if engine.sized_by_context else (high - used, used - low)
        yield Row("kv_pool_bytes", pool, figures["kv_pool_bytes"], pool - less, pool + more, rounding, rank)


def _engine_rows(size: Size, engine: Engine, found: StartLog, sized: bool) -> Iterator[Row]:
    """Yield comparisons of the logged KV pool with the planned one: numbers of blocks, tokens and sequences.

    Each figure in the log is compared twice: with the plan, and with the figure computed from the bytes of the
    logged pool.
    """
    figures = {name: found.figures[name] for name in _POOL_ROUNDING if name in found.figures}
    planned = {name: value for name in figures if (value := getattr(size.held, name))}
    if engine.sized_by_context:
        yield from (Row(name, value, figures[name]) for name, value in planned.items())
        return
    used, (low, high) = size.worst.rank.used_bytes, size.worst.used_bounds
    pool = max(1, size.worst.rank.kv_pool_bytes)
    below, above = (high - used) / pool, (used - low) / pool
    for name, value in planned.items() if sized else ():
        bounds = value * (1 - below), value * (1 + above)
        yield Row(name, value, figures[name], *bounds, _POOL_ROUNDING[name])
    pools = {
        rank: (told.figures["kv_pool_bytes"], told.rounding.get("kv_pool_bytes", 0.0))
        for rank, told in found.ranks.items()
        if "kv_pool_bytes" in told.figures
    }
    if not pools:
        return
    least, middle, most = (_held(size, engine, pools, sign) for sign in (-1, 0, 1))
    suffix = OF_LOGGED_POOL if sized else ""
    for name, logged in figures.items():
        if value := getattr(middle, name):
            bounds = getattr(least, name), getattr(most, name)
            yield Row(f"{name}{suffix}", value, logged, *bounds, _POOL_ROUNDING[name])


def _held(size: Size, engine: Engine, pools: Mapping[str, tuple[float, float]], sign: int) -> PoolCapacity:
    given = size.chosen.flags.kv_cache_memory_bytes
    blocks = min(
        int(pool + sign * rounding) // _stage(size, rank).block_bytes
        for rank, (pool, rounding) in pools.items()
    )
    # --kv-cache-memory-bytes sets the exact pool size.
    if given is not None and size.chosen.device_memory != log_flags.UNKNOWN_MEMORY:
        blocks = size.held.num_blocks
    return engine.capacity(size.pool, size.chosen, max(1, blocks))


def _stage(size: Size, rank: str) -> Stage:
    """Return the plan of a rank's pipeline stage, by the rank's name in the log such as `PP1_TP0`.

    A name without a stage means the first stage.
    """
    match = re.search(r"PP(\d+)", rank)
    place = int(match[1]) if match else 0
    return size.stages[min(place, len(size.stages) - 1)]


def _deciding(found: StartLog) -> str:
    """Return the name of the rank that has the smallest KV pool in a start-up log.

    If the log states no KV pool, the rank with the most bytes of weights is returned.
    """

    def key(name: str) -> tuple[float, float]:
        figures = found.ranks[name].figures
        return figures.get("kv_pool_bytes", float("inf")), -figures.get("weights_bytes", 0.0)

    return min(found.ranks, key=key, default="")


def _missing(engine: Engine, found: StartLog, size: Size) -> tuple[str, ...]:
    if found.failure is not None:
        return ()  # A failed start may have stopped before any memory term was logged.
    said = {name for rank in found.ranks.values() for name in rank.figures} | set(found.figures)
    out = [
        f"{name} ({how})" if how else name
        for name, how in engine.log_figures.items()
        if not any(part in said for part in name.split("|"))
    ]
    flags = size.chosen.flags
    ranks = flags.tensor_parallel_size * flags.pipeline_parallel_size * flags.data_parallel_size
    told = len(found.ranks)
    if ranks > 1 and told < ranks and not engine.sized_by_context:
        out.append(f"memory of {ranks - told} of {ranks} ranks")
    if found.version is None and any(engine.newest):
        out.append("the engine's version")
    return tuple(out)


def _headline(found: StartLog, model: str) -> str:
    engine = engine_of(found.engine or "vllm").title
    ranks = f", {len(found.ranks)} ranks" if len(found.ranks) > 1 else ""
    named = found.model or model
    # If the log names the model differently than the plan, the headline has both names.
    other = "" if named == model else f", planned as {model}"
    return f"{engine}{' ' + found.version if found.version else ''}, {named}{ranks}{other}"
