"""Comparison of an engine's start-up log with the plan for the log's flags, by rank and memory term."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tonnage.planner.deployment import Deployment
from tonnage.planner.devices.catalogue import Gpu, catalogue
from tonnage.planner.engines.base import Engine
from tonnage.planner.engines.log import LogFigures
from tonnage.planner.engines.registry import engine_of
from tonnage.planner.errors import DeploymentError, ModelNotFound, TonnageError
from tonnage.planner.fitlog.read import StartLog
from tonnage.planner.flags import flags_of, given
from tonnage.planner.planning.calibration import shape_of
from tonnage.planner.planning.size import Size, Sizer
from tonnage.planner.planning.stages import Stage
from tonnage.planner.quantization.read import read_quantization
from tonnage.planner.source.resolve import ModelSource, resolve_model
from tonnage.planner.units import GiB, gib

# ASKED lists the flags of `tonnage plan` that `tonnage fit-log` accepts. _LOGGED lists the flags that a
# start-up log may contain.
ASKED = (
    "gpu", "device_memory", "engine_version", "tensor_parallel_size", "gpu_memory_utilization", "dtype",
    "kv_cache_dtype", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "num_gpus",
    "device_memory_used",
)  # fmt: skip
_LOGGED = (
    "gpu_memory_utilization", "dtype", "kv_cache_dtype", "max_model_len", "max_num_seqs",
    "max_num_batched_tokens", "block_size", "tensor_parallel_size", "pipeline_parallel_size",
    "data_parallel_size", "decode_context_parallel_size", "enable_expert_parallel", "enforce_eager",
    "enable_prefix_caching", "kv_cache_memory_bytes", "num_gpu_blocks_override", "cpu_offload_bytes",
    "enable_lora", "max_loras", "max_lora_rank", "swa_full_tokens_ratio", "mem_fraction_static",
    "mamba_full_memory_ratio", "limit_mm_per_prompt", "language_model_only", "skip_mm_profiling", "flash_attn",
    "kv_unified",
)  # fmt: skip
_OTHER_NAMES = {"cpu_offload_bytes": "cpu_offload_gb"}
# Flags with the largest effect on a plan; they are reported as assumed if neither log nor user gives them.
_ASSUMED = (
    "tensor_parallel_size", "dtype", "kv_cache_dtype", "gpu_memory_utilization", "max_model_len",
    "max_num_seqs", "max_num_batched_tokens",
)  # fmt: skip
# Two memory sizes, in bytes, that drivers report are of the same GPU type if they differ by less than this.
# Reports of the same GPU type differ by 0.01 GiB.
_SAME_MEMORY = 0.02 * GiB
# A GPU's nominal memory size differs from the size that its driver reports by less than this fraction, except
# for the T4 (NOMINAL_RESERVE).
_NOMINAL = 0.02
FITTED = ("activation_bytes", "non_torch_bytes", "cuda_graph_bytes")
"""Terms that only a run of the engine determines, by their names in a log."""
_ENDLESS = 1 << 50  # bytes that stand for a device with unknown memory.
# Logged weights may differ by this fraction from the size computed from the model's files alone (0.1 % in
# tests/data/field_reports.jsonl).
_EXACT = 0.001
# A larger ratio of logged to planned weights means another checkpoint or another format.
_OTHER_WEIGHTS = 1.25


@dataclass(frozen=True, slots=True)
class Row:
    """One memory term of a start-up log compared with its planned value.

    Attributes:
        planned: the planned value, expected between `low` and `high`.
        logged: the value in the log, which is within `rounding` of the true value.
        rank: name of the rank in the log, or empty for the whole engine.
    """

    term: str
    planned: float
    logged: float
    low: float | None = None
    high: float | None = None
    rounding: float = 0.0
    rank: str = ""

    @property
    def exact(self) -> bool:
        """Return whether the planned value of this memory term is exact, without an interval."""
        return self.low is None or self.high is None or self.low == self.high

    @property
    def agrees(self) -> bool:
        """Return whether the term's logged value, within its rounding, lies in the planned interval."""
        low = self.planned if self.low is None else self.low
        high = self.planned if self.high is None else self.high
        rounding = self.rounding + (_EXACT * abs(self.logged) if self.term == "weights_bytes" else 0.0)
        return low - rounding <= self.logged <= high + rounding

    @property
    def verdict(self) -> str:
        """Return the result for this memory term as text: `agrees`, `planned too high` or `planned too low`."""
        if self.agrees:
            return "agrees"
        return "planned too high" if self.planned > self.logged else "planned too low"


@dataclass(frozen=True, slots=True)
class Comparison:
    """The comparison of one engine's start-up log with its plan, term by term.

    Attributes:
        rows: compared memory terms of the rank with the smallest KV pool, and of the engine as a whole.
        ranks: compared terms of every rank, if the engine has several.
        missing: names of the terms that the log does not contain.
        assumed: flags that neither log nor user gave, with the assumed values.
        digest: hash of the log's text.
    """

    name: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    ranks: tuple[Row, ...] = ()
    missing: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    failure: str | None = None
    headline: str = ""
    flags: Deployment | None = None
    model: str = ""
    shape: tuple[object, ...] = ()
    digest: str = ""

    @property
    def shown(self) -> tuple[Row, ...]:
        """Return the comparisons of memory terms to print; ranks with equal figures share one row."""
        if len({row.rank for row in self.ranks}) < 2:
            return self.rows
        by_rank = {row.term for row in self.ranks}
        return (*_merged(self.ranks), *(row for row in self.rows if row.term not in by_rank))

    @property
    def verdict(self) -> str:
        """Return a sentence on how well the plan agrees with the start-up log."""
        start = "the start failed; " if self.failure else ""
        if not self.rows:
            return f"{start}nothing to compare"
        shown = self.shown
        wrong = [row for row in shown if not row.agrees]
        count = f"{len(shown) - len(wrong)} of {len(shown)} terms agree"
        pool = next((row for row in self.rows if row.term == "kv_pool_bytes"), None)
        said = f"; the KV pool was planned {_deviation(pool)}" if pool is not None and pool.logged else ""
        if not wrong:
            return f"{start or 'the plan holds: '}{count}{said}"
        worst = max(wrong, key=lambda row: abs(row.planned - row.logged) / max(abs(row.logged), 1.0))
        name = word(worst.term) + (f" of {worst.rank}" if worst.rank else "")
        holds = "the plan does not hold: "
        if all(row.agrees for row in self.rows):
            holds = "the plan holds for the rank with the smallest pool, not for others: "
        return f"{start or holds}{count}; worst: {name}, {_deviation(worst)}{said}"


def _deviation(row: Row) -> str:
    if not row.logged:
        return "where the log has none"
    share = 100 * (row.planned - row.logged) / abs(row.logged)
    return (
        f"{abs(share):.2f} % too {'high' if share > 0 else 'low'}" if row.planned != row.logged else "exactly"
    )


_WORDS = {
    "weights_bytes": "weights",
    "activation_bytes": "activations",
    "non_torch_bytes": "non-torch",
    "cuda_graph_bytes": "CUDA graphs",
    "graph_estimate_bytes": "CUDA graphs",
    "kv_pool_bytes": "KV pool",
    "num_blocks": "blocks",
    "max_concurrency": "concurrency",
    "device_bytes": "memory of the device",
    "context_tokens": "n_ctx",
}
OF_LOGGED_POOL = "_of_logged_pool"
"""End of the names of terms that are computed from the log's pool instead of the plan's."""


def word(term: str) -> str:
    """Return the readable name of a memory term: `tokens of the logged pool` for `tokens_of_logged_pool`.

    If `term` has alternative names, separated by `|`, the first is used.
    """
    name, space, how = term.partition(" (")
    name = name.partition("|")[0]
    plain = name.removesuffix(OF_LOGGED_POOL)
    return _WORDS.get(plain, plain) + (" of the logged pool" if plain != name else "") + space + how


def _merged(rows: Sequence[Row]) -> list[Row]:
    """Return `rows` with one row in place of those of several ranks that have the same figures."""
    out: dict[tuple[object, ...], list[Row]] = {}
    for row in sorted(rows, key=lambda row: list(dict.fromkeys(r.term for r in rows)).index(row.term)):
        out.setdefault((row.term, row.planned, row.logged), []).append(row)
    return [
        Row(r.term, r.planned, r.logged, r.low, r.high, r.rounding,
            f"{same[0].rank}-{same[-1].rank}" if len(same) > 1 else r.rank)
        for same in out.values()
        for r in same[:1]
    ]  # fmt: skip


def infer_gpu(device_bytes: float) -> tuple[list[Gpu], list[Gpu]]:
    """Return the GPU types that have `device_bytes` of memory (a log's figure), and those that may have it.

    The first list is empty if no GPU has this memory, or GPUs with different plans have it. It has several GPUs
    only if they all have the same plan. Memory sizes that a driver reported are compared more strictly than
    nominal sizes.
    """
    gpus = [gpu for gpu in catalogue() if gpu.device == "cuda"]

    def distance(gpu: Gpu) -> float:
        return abs(gpu.memory_bytes - device_bytes)

    exact = [gpu for gpu in gpus if gpu.basis == "reported" and distance(gpu) < _SAME_MEMORY]
    near = sorted((gpu for gpu in gpus if distance(gpu) < _NOMINAL * device_bytes), key=distance)
    found = exact or near
    alike = len({(gpu.vendor, gpu.capability) for gpu in found}) == 1
    if not exact and alike:
        found = found[:1]
    # A GPU's SXM and PCIe versions have the same figures. The SXM version is preferred, because servers have it
    # more often.
    found = sorted(found, key=lambda gpu: "pcie" in gpu.name)
    return (found if alike else []), near


def compare(found: StartLog, name: str, args: argparse.Namespace) -> Comparison:
    """Compute the plan for a start-up log's flags and compare the plan's memory terms with the log.

    Raises:
        TonnageError: the log lacks a required value, or the deployment is not supported; the message says
            which.
    """
    model = args.model or found.model
    if model is None:
        raise DeploymentError("the log does not name its model", field="--model", hint=f"give it for {name}")
    try:
        source = resolve_model(model)
    except ModelNotFound as error:
        if args.model is None:
            error.hint = f"--model names the log's model by another name or folder; {error.hint}"
        raise
    flags = deployment_of(found, args)
    inferred: tuple[str, ...] = ()
    candidates: list[Gpu] = []
    if _asks_gpu(found, args, flags):
        alike, candidates = infer_gpu(found.figures["device_bytes"])
        if alike:
            flags = replace(flags, gpu=alike[0].name)
            others = f"; {alike[1].name} has as much" if len(alike) > 1 else ""
            total = gib(int(found.figures["device_bytes"]))
            inferred = (f"--gpu {alike[0].name} (the log's total is {total}{others})",)
        else:
            flags = replace(flags, device_memory=None)
    flags, notes = _with_format(flags, found, source)
    notes += [*_option_notes(found, args), *source.notes]
    size, sized = _size(source, flags, found, candidates, notes)
    engine = engine_of(flags.engine)
    skipped = _not_compared(engine, size, source, found, flags, candidates, notes)
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
        _missing(engine, found, size), inferred + _assumed(found, args, size), found.failure,
        _headline(found, model),
        size.chosen.flags, model, tuple(shape_of(size.architecture, size.chosen.flags)), found.digest,
    )  # fmt: skip


def _asks_gpu(found: StartLog, args: argparse.Namespace, flags: Deployment) -> bool:
    """Return whether the plan depends on the GPU type, of which the start-up log has only the memory size."""
    if args.gpu is not None or args.device_memory is not None or flags.device == "cpu":
        return False
    return "device_bytes" in found.figures and not engine_of(flags.engine).sized_by_context


def _gpu_hint(candidates: Sequence[Gpu], found: StartLog) -> str:
    """Return the text that asks for --gpu and lists the GPUs with the memory size in the start-up log."""
    if "device_bytes" not in found.figures:
        return "--gpu"
    total = gib(int(found.figures["device_bytes"]))
    if not candidates:
        return f"--gpu; the log's total of {total} is that of no GPU in the catalogue"
    return f"--gpu; the log's total of {total} may be {' or '.join(gpu.name for gpu in candidates)}"


def _size(
    source: ModelSource, flags: Deployment, found: StartLog, candidates: Sequence[Gpu], notes: list[str]
) -> tuple[Size, bool]:
    """Return the memory plan for a log's flags, and whether its KV pool can be compared with the log.

    If the log names neither the GPU nor its memory, the plan takes the size of the KV pool from the log, so the
    pool cannot be compared. Notes are appended to `notes`.
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
            hint = _gpu_hint(candidates, found)
            notes.append(f"the pool is not compared: the log {what}, and the GPU is not known ({hint})")
        flags = replace(flags, device_memory=_ENDLESS, kv_cache_memory_bytes=pool if pool > 0 else None)
        sized = False
    draft = _draft(found)
    if draft is not None:
        model, count = draft
        try:
            return sizer.size(replace(flags, speculative_model=model, num_speculative_tokens=count)), sized
        except TonnageError as error:
            notes.append(f"its draft {model} is not in the plan: {error}")
    return sizer.size(flags), sized


def deployment_of(found: StartLog | LogFigures, args: argparse.Namespace) -> Deployment:
    """Return the deployment that a start-up log describes: the log's flags, completed by the user's options."""
    asked = given(args, Deployment)
    if "gpu" not in asked and "device_bytes" in found.figures:
        asked.setdefault("device_memory", int(found.figures["device_bytes"]))
    if found.version is not None:
        asked.setdefault("engine_version", found.version)
    said = _logged_flags(found)
    device = found.flags.get("device", "cuda")
    engine = {"engine": found.engine or "vllm", "device": device if device == "cpu" else "cuda"}
    flags = Deployment(**{**engine, **asked, **said})
    # Such an engine sizes its KV pool by the context length, not by the device's memory.
    if engine_of(flags.engine).sized_by_context:
        if flags.max_model_len is None:
            raise DeploymentError(
                "the log has neither n_ctx nor the number of cache cells",
                field="n_ctx",
                hint="give the whole start-up log, or --max-model-len",
            )
        return replace(flags, device_memory=flags.device_memory or _ENDLESS)
    return flags


def _logged_flags(found: StartLog | LogFigures) -> dict[str, Any]:
    """Return the engine flags that a start-up log contains."""
    said = {name: value for name in _LOGGED if (value := _logged(name, found.flags)) is not None}
    if length := found.figures.get("max_model_len"):
        said["max_model_len"] = int(length)
    return said


def _option_notes(found: StartLog, args: argparse.Namespace) -> Iterator[str]:
    """Yield a note for each command-line option that contradicts a flag in the start-up log.

    The value `auto` contradicts nothing.
    """
    asked, said = given(args, Deployment), _logged_flags(found)
    for name in asked:
        if name in said and asked[name] not in ("auto", said[name]):
            yield f"{flags_of(Deployment)[name].option} {asked[name]} is not used: the log says {said[name]}"
    version = asked.get("engine_version")
    if found.version is not None and version not in (None, found.version):
        yield f"planned for version {version} (--engine-version); the log is of {found.version}"


def _logged(name: str, said: Mapping[str, str]) -> Any:
    """Return the parsed value of the flag `name` in a log's flags `said`; None if absent or invalid."""
    flag, text = flags_of(Deployment)[name], said.get(_OTHER_NAMES.get(name, name))
    if text is None or text in ("None", "null"):
        return None
    if flag.kind == "bool":
        return text in ("True", "true")
    try:
        return flag.read(text)
    except DeploymentError:
        return None


def _with_format(flags: Deployment, found: StartLog, source: ModelSource) -> tuple[Deployment, list[str]]:
    """Return the flags with the quantization that the engine applied while loading, and notes on it.

    The flags are unchanged if the checkpoint itself is quantized, because its config then states the format.
    """
    logged = found.flags.get("quantization")
    made = {"bitsandbytes": "nf4"}.get(logged or "", logged)
    stored = read_quantization(source.config, None).scheme
    if made not in engine_of(flags.engine).quantizes_to or stored != "none":
        return flags, []
    return replace(flags, quantization=made), [f"its weights were quantized to {logged} while loading"]


def _draft(found: StartLog) -> tuple[str, int] | None:
    """Return (draft model, draft tokens per step) in a start-up log, None without speculative decoding."""
    text = found.flags.get("speculative_config", "")
    method = re.search(r"'?method'?[:=]\s*'(\w+)'", text)
    tokens = re.search(r"'?num_spec(?:ulative)?_tokens'?[:=]\s*(\d+)", text)
    model = re.search(r"'?model'?[:=]\s*'([^']+)'", text)
    if tokens is None or not (method or model):
        return None
    if method and "mtp" in method[1]:
        return "mtp", int(tokens[1])
    return (model[1], int(tokens[1])) if model else None


def _not_compared(
    engine: Engine, size: Size, source: ModelSource, found: StartLog, flags: Deployment,
    candidates: Sequence[Gpu], notes: list[str],
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
            notes.append(f"not compared, as they depend on the GPU: {names} ({_gpu_hint(candidates, found)})")
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
    stage = _stage(size, rank)
    figures = told.figures
    bounds = stage.intervals()
    added = stage.rank.lora_bytes + stage.rank.draft_bytes
    weights = stage.rank.weights_bytes
    low, high = bounds.get("weights_bytes", (weights, weights))
    planned = {
        "weights_bytes": (weights + added, low + added, high + added),
        "activation_bytes": (stage.rank.activation_bytes, *bounds.get("activation_bytes", (0, 0))),
        "non_torch_bytes": (stage.rank.framework_bytes, *bounds.get("framework_bytes", (0, 0))),
        "cuda_graph_bytes": (stage.rank.cuda_graph_bytes, *bounds.get("cuda_graph_bytes", (0, 0))),
    }
    # CUDA graphs outside the budget of --gpu-memory-utilization
    if (beside := stage.runtime.beside) is not None:
        planned["cuda_graph_bytes"] = beside.value, beside.low, beside.high
    graphs = figures.get("graph_estimate_bytes", figures.get("cuda_graph_bytes"))
    for name, (value, lower, upper) in planned.items():
        logged = graphs if name == "cuda_graph_bytes" else figures.get(name)
        if logged is not None and value:
            yield Row(name, value, logged, lower, upper, told.rounding.get(name, 0.0), rank)
    if "kv_pool_bytes" in figures and sized:
        yield Row("kv_pool_bytes", *_pool(size, stage, figures["kv_pool_bytes"]),
                  told.rounding.get("kv_pool_bytes", 0.0), rank)  # fmt: skip


def _pool(size: Size, stage: Stage, logged: float) -> tuple[float, float, float, float]:
    """Return (planned, logged, lower bound, upper bound) of the KV pool's size in bytes."""
    planned = engine_of(size.chosen.flags.engine).logged_pool(size.chosen, stage.rank)
    if engine_of(size.chosen.flags.engine).sized_by_context:
        return planned, logged, planned, planned
    low, high = stage.intervals()["used_bytes"]
    return planned, logged, planned - (high - stage.rank.used_bytes), planned + (stage.rank.used_bytes - low)


def _engine_rows(size: Size, engine: Engine, found: StartLog, sized: bool) -> Iterator[Row]:
    """Yield comparisons of the KV pool's numbers of blocks, tokens and sequences in the log with the plan.

    Each figure in the log is compared twice: with the plan, and with the figure computed from the bytes of the
    logged pool.
    """
    held = size.held
    planned = {"num_blocks": held.num_blocks, "tokens": held.tokens, "max_concurrency": held.max_concurrency}
    pools = {
        rank: (told.figures["kv_pool_bytes"], told.rounding.get("kv_pool_bytes", 0.0))
        for rank, told in found.ranks.items()
        if "kv_pool_bytes" in told.figures
    }
    worst = size.worst
    width = worst.intervals()["used_bytes"]
    pool = max(1, worst.rank.kv_pool_bytes)
    below, above = (width[1] - worst.rank.used_bytes) / pool, (worst.rank.used_bytes - width[0]) / pool
    for name, value in planned.items():
        if name not in found.figures or not value:
            continue
        if engine.sized_by_context:
            yield Row(name, value, found.figures[name])
            continue
        if sized:
            yield Row(
                name, value, found.figures[name], value * (1 - below), value * (1 + above), _half_digit(name)
            )
    if engine.sized_by_context or not pools:
        return
    low, middle, high = (_held(size, engine, pools, sign) for sign in (-1, 0, 1))
    suffix = "_of_logged_pool" if sized else ""
    for name in planned:
        if name in found.figures and getattr(middle, name):
            yield Row(f"{name}{suffix}", getattr(middle, name), found.figures[name], getattr(low, name),
                      getattr(high, name), _half_digit(name))  # fmt: skip


def _half_digit(name: str) -> float:
    """Return the rounding error of a figure in a start-up log: half of its last printed digit.

    Concurrency is printed with two decimals, so its error is 0.005. Counts are exact.
    """
    return 0.005 if name == "max_concurrency" else 0.0


def _held(size: Size, engine: Engine, pools: Mapping[str, tuple[float, float]], sign: int) -> Any:
    given = size.chosen.flags.kv_cache_memory_bytes
    blocks = min(
        int(pool + sign * rounding) // _stage(size, rank).block_bytes
        for rank, (pool, rounding) in pools.items()
    )
    # --kv-cache-memory-bytes sets the exact pool size.
    if given is not None and size.chosen.device_memory != _ENDLESS:
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
    """Return the name of the logged rank with the smallest KV pool, else of the rank with the most weights."""

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


def _assumed(found: StartLog, args: argparse.Namespace, size: Size) -> tuple[str, ...]:
    asked, flags = given(args, Deployment), size.chosen.flags
    out = []
    if engine_of(flags.engine).sized_by_context:
        return ()
    if found.version is None and "engine_version" not in asked and flags.engine_version not in (None, "none"):
        out.append(f"version {flags.engine_version}")
    for name in _ASSUMED:
        known = name in asked or _logged(name, found.flags) is not None or name in found.figures
        if not known:
            value = getattr(flags, name)
            shown = f"{value:,}" if isinstance(value, int) else value
            out.append(f"{flags_of(Deployment)[name].option} {shown}")
    return tuple(out)


def _headline(found: StartLog, model: str) -> str:
    engine = engine_of(found.engine or "vllm").title
    ranks = f", {len(found.ranks)} ranks" if len(found.ranks) > 1 else ""
    named = found.model or model
    # If the log has another name for the model, the headline also has the name under which it was planned.
    other = "" if named == model else f", planned as {model}"
    return f"{engine}{' ' + found.version if found.version else ''}, {named}{ranks}{other}"
