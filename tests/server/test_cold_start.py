"""The first start on a machine, with nothing compiled yet, holds no more memory than the plan says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import llvmlite.binding as llvm
from serving import PATIENCE

from tonnage.server.demo.model import ensure_demo


def verify(**environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tonnage.server.cli", "verify", "demo", "--json"]
    settings = ["--kv-cache-memory-bytes", "128MiB", "--max-model-len", "1024", "--max-num-seqs", "16"]
    return subprocess.run(
        [*command, *settings],
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE,
        env=os.environ | environment,
    )


def test_first_start_with_compilation_stays_within_planned_memory(tmp_path: Path) -> None:
    """In a fresh checkout this is the first start, and what it compiles serves the tests after it."""
    model = {"TONNAGE_CACHE": str(ensure_demo().parent.parent)}
    # The processor named as it would be found: what was compiled ahead is for other names, and what is compiled
    # now serves later tests all the same.
    done = verify(NUMBA_CPU_NAME=llvm.get_host_cpu_name())
    if "compiling for this machine" not in done.stderr:
        cold = {"NUMBA_CPU_NAME": llvm.get_host_cpu_name()}
        cold |= {"NUMBA_CACHE_DIR": str(tmp_path / "numba"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
        done = verify(**model, **cold)
        assert list(tmp_path.rglob("*.nbc"))
    assert "compiling for this machine" in done.stderr
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert result["within"] is True
    rows = {row["name"]: row for row in result["rows"]}
    assert set(rows) == {"weights", "KV pool", "process", "KV bytes per token"}
    assert all(rows[name]["difference"] == 0 for name in rows if name != "process")
    assert rows["weights"]["measured"] >= 2 * 134_515_008
    assert abs(rows["process"]["difference"]) <= 0.1 * rows["process"]["planned"]
