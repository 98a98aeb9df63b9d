"""Storage of measured memory figures from start-up logs, by GPU and engine version (`--calibrate FILE`)."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tonnage.planner.errors import DeploymentError
from tonnage.planner.fitlog.compare import FITTED
from tonnage.planner.fitlog.comparison import Comparison, Row
from tonnage.planner.planning.calibration import FORMAT, Entry, read_calibration


def keep(path: Path, compared: Sequence[Comparison]) -> int:
    """Add the memory figures of start-up logs to a calibration file; return how many logs it then covers.

    If the file already has an entry from the same log, the new entry replaces it.

    Raises:
        DeploymentError: the file is no calibration file, or the logs have no usable figure. Nothing is written
            in these cases.
    """
    entries = read_calibration(str(path)) if path.exists() else []
    learnt = [entry for comparison in compared for entry in _entries(comparison)]
    if not learnt:
        raise DeploymentError(
            "no log states the bytes of activations, non-torch memory or CUDA graphs on a known GPU",
            field="--calibrate",
            hint="name the GPU with --gpu; start vLLM with VLLM_LOGGING_LEVEL=DEBUG to log these bytes",
        )
    again = {entry["log"] for entry in learnt}
    entries = [entry for entry in entries if entry["log"] not in again] + learnt
    beside = path.with_name(path.name + ".new")
    try:
        beside.write_text(json.dumps({"tonnage_calibration": FORMAT, "starts": entries}, indent=1) + "\n")
        os.replace(beside, path)
    except OSError as error:
        with suppress(OSError):
            beside.unlink()  # remove the partial file that a full disk may leave
        raise DeploymentError(f"{path}: {error.strerror}", field="--calibrate") from None
    return len({entry["log"] for entry in entries})


def _entries(comparison: Comparison) -> list[Entry]:
    flags = comparison.flags
    if flags is None or flags.device_memory is None:
        return []
    by_rank: dict[str, list[Row]] = {}
    for row in comparison.ranks:
        if row.term in FITTED:
            by_rank.setdefault(row.rank, []).append(row)
    out: list[Entry] = []
    for rank, rows in by_rank.items():
        out.append({
            "log": f"{comparison.model} {comparison.digest}",
            "rank": rank,
            "engine": flags.engine,
            "version": flags.engine_version,
            "gpu": flags.gpu,
            "device_memory": flags.device_memory,
            "ranks": [flags.tensor_parallel_size, flags.pipeline_parallel_size],
            "shape": list(comparison.shape),
            "terms": {FITTED[r.term]: {"planned": int(r.planned), "logged": int(r.logged)} for r in rows},
        })  # fmt: skip
    return out
