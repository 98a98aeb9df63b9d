"""Section ``llama_cpp``: size of the KV cache that llama.cpp and ik_llama.cpp print, within its rounding.

``compute_buffers`` compares the compute buffer of starts on one device. Starts of ik_llama.cpp are left out,
because its graphs differ from llama.cpp's.
"""

from __future__ import annotations

from statistics import median
from typing import Any, Literal

from accuracy.common import Inputs, Section, read_jsonl
from accuracy.reports import decimals, label, model_config, printed_interval
from tonnage.planner.deployment import Deployment
from tonnage.planner.engines.llama_cpp import size_cache
from tonnage.planner.engines.registry import engine_of
from tonnage.planner.errors import TonnageError
from tonnage.planner.families.registry import build_architecture
from tonnage.planner.planning.deployment import complete

NAME = "llama_cpp"

MIB = 1 << 20
# ik_llama.cpp's -mla: 0 expands K and V, 1 keeps the latent and a transposed copy, 2 and 3 only the latent.
_MLA: dict[str, Literal["expanded", "latent", "latent+transposed"]] = {
    "0": "expanded", "1": "latent+transposed", "2": "latent", "3": "latent",
}  # fmt: skip


def score(inputs: Inputs) -> Section | None:
    """Return the scores of the section, or None without configs and reports."""
    if inputs.configs is None or inputs.reports is None:
        return None
    section = Section()
    left_out: list[str] = []
    buffers: list[tuple[float, bool, str]] = []
    section.extra["left_out"] = left_out
    for index, row in enumerate(read_jsonl(inputs.reports)):
        if "llama.cpp" not in row["engine"] or not row["observed"].get("available_kv_gib"):
            continue
        config = model_config(inputs, row)
        if config is None:
            left_out.append(f"{label(index, row)}: no config")
            continue
        if row["max_model_len"] is None:
            left_out.append(f"{label(index, row)}: the context's length is not given")
            continue
        _row(section, label(index, row), row, config)
        if (found := _buffer(row, config)) is not None:
            buffers.append((*found[:2], f"{label(index, row)}: {found[2]}"))
    errors = sorted(abs(error) for error, _, _ in buffers)
    section.extra["compute_buffers"] = {
        "rows": len(buffers), "median_error": median(errors) if errors else None,
        "worst_error": errors[-1] if errors else None, "covered": sum(inside for _, inside, _ in buffers),
        "lines": [line for _, _, line in buffers],
    }  # fmt: skip
    return section


def _buffer(row: dict[str, Any], config: dict[str, Any]) -> tuple[float, bool, str] | None:
    """Return (error, whether the interval covers it, description) of the compute buffer of the only device.

    Returns None if the model is on several devices, or the buffer is not printed.
    """
    seen = row["observed"]
    weights = {name: float(size) for name, size in seen.get("model_buffers_mib") or ()}
    printed = {name: float(size) for name, size in seen.get("compute_buffers_mib") or ()}
    most = max(weights, key=lambda name: weights[name], default="")
    if weights.get(most, 0) < 0.8 * sum(weights.values()) or printed.get(most.removesuffix("_Mapped"), 0) <= 0:
        return None
    said = dict(part.split("=", 1) for part in (row["other_flags"] or "").split() if "=" in part)
    if said.get("mla_attn", "0") not in ("0", "None"):
        return None
    flags = Deployment(
        engine="llama.cpp", device="cpu" if most.startswith("CPU") else "cuda", device_memory=1 << 50,
        max_model_len=row["max_model_len"] // _sequences(row), max_num_seqs=_sequences(row),
        max_num_batched_tokens=int(said.get("n_ubatch", 512)),
        flash_attn="off" if said.get("flash_attn") == "0" else "on",
    )  # fmt: skip
    try:
        architecture = build_architecture(config)
        chosen = complete(flags, architecture, "bfloat16")
        found = engine_of("llama.cpp").runtime_terms(architecture, chosen).activation
    except TonnageError:
        return None
    logged = printed[most.removesuffix("_Mapped")] * MIB
    low, high = found.low / MIB, found.high / MIB
    line = f"planned {found.value / MIB:.2f} ({low:.2f} to {high:.2f}), printed {logged / MIB}"
    return (found.value - logged) / logged, found.low <= logged + MIB / 200 and logged <= found.high, line


def _row(section: Section, name: str, row: dict[str, Any], config: dict[str, Any]) -> None:

    said = dict(part.split("=", 1) for part in (row["other_flags"] or "").split() if "=" in part)
    old = row["engine"] == "ik_llama.cpp"
    sequences = _sequences(row)
    try:
        cache = size_cache(
            build_architecture(config),
            row["max_model_len"],
            row["kv_cache_dtype"] or "f16",
            sequences=sequences,
            ubatch=int(said.get("n_ubatch", 512)),
            full_sliding=old,
            unified=sequences == 1,
            mla=_MLA.get(said.get("mla_attn", "0"), "expanded") if old else "latent",
        )
    except TonnageError as error:
        section.refuse(name, error)
        return
    seen = row["observed"]
    planned = cache.k_bytes + cache.v_bytes
    printed, unit = (
        (seen["kv_self_mib"], MIB) if seen.get("kv_self_mib") else (seen["available_kv_gib"], 1 << 30)
    )
    low, high = printed_interval(printed, max(2, decimals(printed)))
    section.rows += 1
    section.errors.append(abs(planned / unit - printed) / printed)
    if low <= planned / unit <= high:
        section.exact += 1
    else:
        section.misses.append(f"{name}: planned {planned / unit:.4f}, printed {printed}")


def _sequences(row: dict[str, Any]) -> int:
    """Return the number of sequences that divide the cache; "2/2 seqs" in the log means streams / sequences."""
    if row["max_num_seqs"]:
        return int(row["max_num_seqs"])
    before, found, _ = (row["quote"] or "").partition(" seqs)")
    counts = before.rsplit(" ", 1)[-1].split("/")
    return int(counts[1]) if found and len(counts) == 2 and counts[1].isdigit() else 1
