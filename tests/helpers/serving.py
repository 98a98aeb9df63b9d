"""`tonnage serve` in a process of its own, and nothing left of it afterwards."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

# Seconds until what must happen counts as never happening. Not a bound of anything: only a hang takes as long,
# also on a machine with much else to do.
PATIENCE = 240.0

# vLLM on its own, to compare with. Its engine core runs in the process that asked, which saves the start of a
# process and its imports; every core computes, as behind the server.
BARE_ENVIRONMENT = {
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}  # fmt: skip


def ask_bare_vllm(script: str, *asked: Any) -> dict[str, Any]:
    """Run ``script`` in a new process; return the JSON that it prints after ``RESULT``.

    The script gets ``asked`` as JSON in its first argument. It runs without the garbage collector and exits
    without freeing the heap, which saves 3 s.
    """
    script = f"import gc, os, sys\ngc.disable()\n{script}\nsys.stdout.flush()\nos._exit(0)"
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(asked)],
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE,
        env=os.environ | BARE_ENVIRONMENT,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stdout[-2000:] + done.stderr[-4000:]
    result: dict[str, Any] = json.loads(lines[0].removeprefix("RESULT "))
    return result


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


@contextmanager
def serving(
    model: str, *flags: str, killed: bool = False, before: str = "", under: Sequence[str] = ()
) -> Iterator[str]:
    """Run a server on a free port; yield its URL when it is ready.

    At the end it is stopped, or killed by SIGKILL if ``killed``, as when memory runs out. In both cases all of
    its processes must end. The server's process runs the Python code ``before`` first. ``under`` is a command
    that executes the command in its arguments.
    """
    start = [str(Path(__file__).with_name("after.py")), before] if before else ["-m", "tonnage.server.cli"]
    python = os.environ.get("TONNAGE_PYTHON", sys.executable)  # where pytest has an environment of its own
    command = [*under, python, *start, "serve", model, "--port", "0", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    family: list[psutil.Process] = []
    try:
        url = next((line.split()[-1] for line in process.stdout if line.startswith("ready on ")), None)
        assert url is not None, "the server ended before it was ready"
        threading.Thread(target=process.stdout.read, daemon=True).start()
        yield url
    finally:
        if process.poll() is None:
            family = psutil.Process(process.pid).children(recursive=True)
        process.kill() if killed else process.terminate()
        process.communicate(timeout=PATIENCE)
        _, alive = psutil.wait_procs(family, timeout=PATIENCE)
        for child in alive:
            child.kill()
    assert alive == [], "processes outlived the server"
    assert killed or process.returncode == 0


def listens(process: psutil.Process, url: str) -> bool:
    """Return whether this process is the one that listens on ``url``."""
    port = int(url.rsplit(":", 1)[1])
    try:
        return any(
            connection.laddr.port == port and connection.status == psutil.CONN_LISTEN
            for connection in process.net_connections("tcp")
        )
    except psutil.Error:  # it has ended
        return False
