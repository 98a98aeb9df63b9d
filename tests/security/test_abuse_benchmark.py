"""benchmarks/abuse.py runs: a case on the fake engine, seen by a victim in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from serving import PATIENCE

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "abuse.py"


def test_abuse_benchmark_reports_measurements_and_a_verdict() -> None:
    command = [
        sys.executable,
        str(SCRIPT),
        "--engine",
        "fake",
        "--case",
        "letters",
        "--baseline",
        "1",
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE)
    assert done.stdout, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert len(result["machine"]["load_average_after"]) == 3
    (engine,) = result["engines"].values()
    rows = {row["case"]: row for row in engine["cases"]}
    assert list(rows) == ["alone", "neighbours", "letters"]
    for row in rows.values():
        assert row["tokens"] > 0
        assert row["probes"] > 0
        assert row["lost"] == {}
        assert set(row["answers"]) == {"200"}
        assert row["went_on"]
        assert row["restored_s"] is not None
        assert 0 < row["all_bytes"] < row["api_bytes"] + row["engine_bytes"] + 2**20
        # What is judged by the clock is a matter of the machine; that it is judged is not.
        assert ("the victim's stream stood still" in row["broken"]) == (row["gap_s"] > 1)
        assert ("/health" in row["broken"]) == (row["health_p99_ms"] > 100)
        assert "memory" not in row["broken"]
    assert rows["letters"]["abuser"] == {"400 invalid_value": 1}
    assert result["over"] == [f"fake {name}" for name, row in rows.items() if row["broken"]]
    assert done.returncode == bool(result["over"])
