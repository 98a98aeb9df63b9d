"""What the systemd unit forbids must leave a server that starts, answers and stops.

Its filter of system calls is tried here, without root and systemd; ``make deploy-check`` starts the whole unit.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import httpx
import psutil
import pytest
from serving import PATIENCE, serving
from unit_filter import allowed, groups, settings

from tonnage.server.demo.model import ensure_demo

UNIT = Path(__file__).resolve().parents[2] / "deploy" / "systemd" / "tonnage.service"
FILTERED = Path(__file__).resolve().parents[1] / "helpers" / "unit_filter.py"

pytestmark = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None,
    reason="systemd-analyze is not installed (apt-get install systemd): the unit's filter was NOT tried",
)


def test_systemd_unit_uses_the_writable_cache_as_home() -> None:
    environment = dict(word.split("=") for line in settings(UNIT, "Environment") for word in line.split())
    (cache,) = settings(UNIT, "CacheDirectory")
    assert environment["HOME"] == environment["TONNAGE_CACHE"] == f"/var/cache/{cache}"


def test_systemd_unit_denies_privileged_calls() -> None:
    calls = allowed(UNIT, groups())
    assert {"execve", "futex", "mbind", "sched_setaffinity", "setpriority"} <= calls
    forbidden = {"mount", "ptrace", "bpf", "kexec_load", "init_module", "chroot", "setuid", "reboot", "swapon"}
    assert not forbidden & calls


def test_server_and_engine_run_under_the_system_call_filter_of_the_systemd_unit() -> None:
    ensure_demo()
    flags = ["--kv-cache-memory-bytes", "64MiB", "--max-model-len", "512", "--max-num-seqs", "4"]
    under = (sys.executable, str(FILTERED), str(UNIT))
    with serving("demo", "--dtype", "float32", *flags, under=under) as url:
        states = [Path(f"/proc/{child.pid}/status").read_text() for child in psutil.Process().children()]
        assert any("Seccomp:\t2\n" in state for state in states)  # SECCOMP_MODE_FILTER
        body = {"model": "demo", "prompt": "The capital of France is", "max_tokens": 4}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE, trust_env=False)
        assert answer.status_code == 200
