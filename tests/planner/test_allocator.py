"""Tests of planner/engines/allocator.py against start-up logs that print four decimals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.planner.deployment import Deployment
from tonnage.planner.engines.vllm.allocator import unsplit_bytes
from tonnage.planner.planning.build import plan_source
from tonnage.planner.source.resolve import ModelSource
from tonnage.planner.units import GiB, MiB

REPORTS = Path(__file__).parent.parent / "data" / "field_reports.jsonl"


@pytest.mark.parametrize(
    ("sizes", "extra"),
    [
        ([48 * MiB], 0),
        ([47 * MiB + MiB // 2], MiB // 2),  # a segment of 48, the rest too small to split off
        ([47 * MiB], MiB),
        ([47 * MiB - 512], 0),  # 1 MiB and 512 bytes are left over: split off
        ([1], 0),  # small requests have their own pool
        ([2 * MiB] * 10, 0),  # ten fill a segment of 20
        ([19 * MiB // 2] * 2, MiB),  # two of 9.5 leave 1 MiB of 20, which the second keeps
        ([13 * MiB - 512 * 1024, MiB + 512 * 1024], 0),  # the second uses the remainder of the first
    ],
)
def test_allocator_remainder_too_small_to_split_counts_as_allocated(sizes: list[int], extra: int) -> None:
    assert unsplit_bytes(sizes) == extra


@settings(deadline=None)
@given(st.lists(st.integers(1, 64 * MiB), max_size=60))
def test_each_tensor_allocation_wastes_at_most_two_mebibytes(sizes: list[int]) -> None:
    assert 0 <= unsplit_bytes(sizes) <= len(sizes) * (MiB + 512)


def four_decimals() -> list[dict]:
    """Return the report rows on CUDA with four decimals, the model's own config, and no draft or adapters."""
    found = []
    for line in REPORTS.read_text().splitlines():
        row = json.loads(line)
        printed = row["observed"].get("model_load_gib")
        if (
            printed is not None
            and round(printed, 2) != printed
            and row["model"] in ("Qwen/Qwen3-4B", "Qwen/Qwen2.5-3B", "meta-llama/Llama-3.1-8B-Instruct")
            and not (row["gpu"] or "").startswith("AMD")
        ):
            found.append(row)
    return found


@pytest.mark.parametrize("row", four_decimals(), ids=lambda row: f"{row['model']} {row['engine_version']}")
def test_planned_weights_match_logged_model_load(row: dict, config_of) -> None:
    config = config_of(row["config"])
    flags = Deployment(engine="vllm", device="cuda", device_memory=80 * GiB, max_model_len=2048)
    planned = plan_source(ModelSource(row["model"], "", config, "folder"), flags).rank.weights_bytes
    assert abs(planned - row["observed"]["model_load_gib"] * GiB) < MiB // 4
