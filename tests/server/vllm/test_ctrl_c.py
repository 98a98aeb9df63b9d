"""Tests of Ctrl-C while vLLM loads, sent as by a terminal to every process of the group."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
from serving import PATIENCE


def test_ctrl_c_during_engine_start_prints_one_line() -> None:
    flags = ("--backend", "vllm", "--max-model-len", "512", "--kv-cache-memory-bytes", "64MiB", "--port", "0")
    process = subprocess.Popen(
        [sys.executable, "-m", "tonnage.server.cli", "serve", "demo", *flags],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + PATIENCE
    while not (family := _cores(process.pid)):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE)
    _, alive = psutil.wait_procs(family, timeout=PATIENCE)
    assert process.returncode == 130, err
    assert alive == []
    assert "Traceback" not in err
    assert err.count("stopping: nothing is in flight") == 1
    assert "tonnage: " not in err


def _cores(pid: int) -> list[psutil.Process]:
    """Return the engine cores and the processes that they started."""
    found = []
    for child in psutil.Process(pid).children(recursive=True):
        try:
            if "--multiprocessing-fork" in child.cmdline():
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found
