"""Test of planned KV tiers against published facts: every figure that flags and model decide agrees."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "tiers_truth.py"


def test_planned_kv_tiers_agree_with_published_measurements() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "--json", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    record = json.loads(done.stdout)
    assert (record["facts"], record["compared"], record["agreeing"]) == (39, 21, 21)
    assert len({row["row"] for row in record["rows"]}) == 39
    assert all(row["reason"] for row in record["rows"])
    judged = record["verdicts"]
    assert record["verdicts_right"] >= 0.8 * len(judged)
    assert [one["right"] for one in judged if not one["published_pays"]].count(True) >= 4
