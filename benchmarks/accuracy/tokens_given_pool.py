"""Section ``tokens_given_pool``: vLLM's printed tokens from its printed pool, within a block or rounding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from accuracy.common import Inputs, Section, read_jsonl
from accuracy.reports import gib_interval, label, model_config
from tonnage.planner.deployment import Deployment
from tonnage.planner.engines.version import parse_version
from tonnage.planner.errors import TonnageError
from tonnage.planner.planning.build import plan_source
from tonnage.planner.source.resolve import ModelSource

NAME = "tokens_given_pool"


def score(inputs: Inputs) -> Section | None:
    """Return the scores of the section, or None without configs and reports."""
    if inputs.configs is None or inputs.reports is None:
        return None
    section = Section()
    left_out: list[str] = []
    section.extra["left_out"] = left_out
    for index, row in enumerate(read_jsonl(inputs.reports)):
        if not row["engine"].startswith("vLLM"):
            continue
        seen = row["observed"]
        if not seen.get("available_kv_gib") or seen["available_kv_gib"] < 0:
            continue
        if not any(seen.get(name) for name in ("kv_tokens", "num_gpu_blocks")):
            continue
        why = _unusable(row)
        config = model_config(inputs, row)
        if why or config is None:
            left_out.append(f"{label(index, row)}: {why or 'no config'}")
            continue
        _row(section, label(index, row), row, config)
    return section


def _unusable(row: dict[str, Any]) -> str | None:
    """Return why a row has no exact pair of pool and tokens, or None if it has one."""
    note = row["consistency_note"] or ""
    if "DISAGREES" in note:
        return "the report contradicts itself (its own note)"
    if "APPROXIMATE" in note:
        return "round numbers"
    if row["speculative"] and "mtp" not in str(row["speculative"]):
        return "a draft model whose config is not given shares the pool"
    return None


def _row(section: Section, name: str, row: dict[str, Any], config: dict[str, Any]) -> None:

    seen = row["observed"]
    said = str(row["other_flags"] or "")
    pool = gib_interval(seen["available_kv_gib"])
    caching = True if "'enable_prefix_caching': True" in said else None
    flags = Deployment(
        engine="vllm",
        engine_version=_version(row),
        device="cuda",
        device_memory=1 << 50,
        kv_cache_dtype=row["kv_cache_dtype"] or "auto",
        max_model_len=row["max_model_len"],
        max_num_seqs=row["max_num_seqs"],
        max_num_batched_tokens=row["max_num_batched_tokens"],
        block_size=row["block_size"],
        tensor_parallel_size=row["tensor_parallel"] or 1,
        pipeline_parallel_size=row["pipeline_parallel"] or 1,
        enable_prefix_caching=caching,
        speculative_model="mtp" if row["speculative"] else None,
        num_speculative_tokens=_speculative(said) if row["speculative"] else 0,
        dtype="float16" if row["gpu"] == "Tesla T4" else "auto",
    )
    # The pool is given, so the format of the weights does not matter.
    config = {key: value for key, value in config.items() if key != "quantization_config"}
    source = ModelSource(row["model"], row["model"], config, "folder")
    try:
        low, high = (_tokens(source, flags, size, seen) for size in pool)
    except TonnageError as error:
        section.refuse(name, error)
        return
    truth = seen.get("kv_tokens") or seen["num_gpu_blocks"]
    section.rows += 1
    if low[0] - low[1] <= truth <= high[0] + high[1]:
        section.exact += 1
        section.errors.append(0.0)
        return
    middle = (low[0] + high[0]) / 2
    section.errors.append(abs(middle - truth) / truth)
    section.misses.append(f"{name}: planned {low[0]:,} to {high[0]:,}, printed {truth:,}")


def _tokens(source: Any, flags: Any, size: int, seen: dict[str, Any]) -> tuple[int, int]:
    """Return (tokens or blocks as the row prints them, the size of one block in the same unit)."""
    plan = plan_source(source, replace(flags, kv_cache_memory_bytes=size))
    cache = plan.kv_cache
    if not seen.get("kv_tokens"):
        return cache.num_blocks, 1
    return cache.tokens, max(group.block_size or cache.layout.block_size for group in cache.layout.groups)


def _version(row: dict[str, Any]) -> str | None:

    text = row["engine_version"]
    if text is None:
        return "0.11.0"  # undated reports of 2025: the most frequent version of the other reports
    try:
        parse_version(text)
    except TonnageError:
        return "0.6.0"  # "main, 2024-12-13" and the like
    return str(text)


def _speculative(said: str) -> int:
    _, _, rest = said.partition("'num_speculative_tokens': ")
    digits = rest[: next((i for i, c in enumerate(rest) if not c.isdigit()), len(rest))]
    return int(digits or 1)
