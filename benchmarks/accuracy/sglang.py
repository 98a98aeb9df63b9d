"""Section ``sglang``: tokens from the memory that SGLang prints for its pools, within 1 %."""

from __future__ import annotations

from typing import Any

from accuracy.common import Inputs, Section, read_jsonl
from accuracy.reports import GIB, label, model_config
from tonnage.planner.deployment import Deployment
from tonnage.planner.engines.sglang import token_bytes
from tonnage.planner.errors import TonnageError
from tonnage.planner.families.registry import build_architecture
from tonnage.planner.planning.build import plan_source
from tonnage.planner.source.resolve import ModelSource

NAME = "sglang"


def score(inputs: Inputs) -> Section | None:
    """Return the scores of the section, or None without configs and reports."""
    if inputs.configs is None or inputs.reports is None:
        return None
    section = Section()
    left_out: list[str] = []
    within = 0
    for index, row in enumerate(read_jsonl(inputs.reports)):
        if row["engine"] != "SGLang" or not row["observed"].get("kv_tokens"):
            continue
        config = model_config(inputs, row)
        if config is None:
            left_out.append(f"{label(index, row)}: no config")
            continue
        if not row["observed"]["kv_pools"] and not row["observed"]["available_kv_gib"]:
            left_out.append(f"{label(index, row)}: the pool's size is not given")
            continue
        within += _row(section, label(index, row), row, config)
    section.extra |= {"within_1_percent": within, "left_out": left_out}
    return section


def _row(section: Section, name: str, row: dict[str, Any], config: dict[str, Any]) -> bool:

    seen, ranks = row["observed"], row["tensor_parallel"] or 1
    said = dict(part.split("=", 1) for part in (row["other_flags"] or "").split() if "=" in part)
    dtype = "fp8" if "float8" in (row["kv_cache_dtype"] or "") else "bfloat16"
    try:
        architecture = build_architecture(config)
        full, sliding = token_bytes(architecture, dtype, ranks)
        flags = Deployment(
            engine="sglang",
            device="cuda",
            device_memory=1 << 50,  # large enough for any weights, because the pool is given
            kv_cache_memory_bytes=_pool_bytes(seen, 2 if full and sliding else 1),
            kv_cache_dtype=dtype,
            tensor_parallel_size=ranks,
            swa_full_tokens_ratio=float(said.get("swa_full_tokens_ratio", Deployment().swa_full_tokens_ratio)),
        )
        tokens = plan_source(ModelSource(name, name, config, "folder"), flags).kv_cache.tokens
    except TonnageError as error:
        section.refuse(name, error)
        return False
    truth = seen["kv_tokens"]
    section.rows += 1
    error_share = abs(tokens - truth) / truth
    section.errors.append(error_share)
    section.exact += tokens == truth
    if error_share > 0.01:
        section.misses.append(f"{name}: planned {tokens:,}, printed {truth:,}")
    return error_share <= 0.01


def _pool_bytes(seen: dict[str, Any], pools: int) -> int:
    """Return the bytes of the target model's pools; a speculative draft's pools follow them in the log."""
    listed = (seen.get("kv_pools") or [])[:pools]
    if listed and len(listed) == pools:
        return int(sum(pool["k_gib"] + pool["v_gib"] for pool in listed) * GIB)
    return int((seen["available_kv_gib"] or sum(p["k_gib"] + p["v_gib"] for p in seen["kv_pools"])) * GIB)
