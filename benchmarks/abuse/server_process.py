"""The attacked server, ``tonnage serve demo`` with three keys, and its memory compared with its plan."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from abuse.raw_http import HOST, Address, get
from tonnage.planner.engines.runtime import hf
from tonnage.planner.engines.runtime.api import API_LIMIT_BYTES
from tonnage.planner.engines.vllm import cpu
from tonnage.server.engines.process_memory import process_tree_bytes

ENGINES = ("fake", "hf", "vllm")
VICTIM, ABUSER, OPERATOR = "key-of-the-victim", "key-of-the-abuser", "key-of-the-operator"
TLS_FILES = 1024  # the soft limit of a process on Linux (linux 6.12: include/uapi/linux/fs.h, INR_OPEN_CUR)
START_SECONDS, STOP_SECONDS = 300.0, 60.0
SLACK = 0.03  # share of the plan that a container has in addition (docs/operations.md)
FLAGS = ("--max-model-len", "8192", "--max-num-seqs", "32", "--kv-cache-memory-bytes", "512MiB")
# tonnage serve with a fake engine of 100 tokens per second; without a rate, its streams end immediately.
PACED = """
import sys
from tonnage.server.engines.fake import FakeEngine
FakeEngine.__init__.__kwdefaults__["token_rate"] = 100.0
from tonnage.server.cli import main
sys.exit(main())
"""


@dataclass(frozen=True, slots=True)
class ServerSnapshot:
    """The state of a server.

    Attributes:
        unfinished: Sequences and requests in flight.
        blocks: Used blocks of the pool.
        bytes: Memory of all its processes.
        files: Open files of the API process.
    """

    unfinished: int
    blocks: int
    bytes: int
    files: int


class AttackedServer:
    """A running server of one engine."""

    def __init__(self, engine: str, process: subprocess.Popen[bytes], address: Address) -> None:
        self.engine, self.address = engine, address
        self._process = process
        self.pid = process.pid
        self.planned = 0  # bytes of all processes
        self.api_planned = 0

    @property
    def alive(self) -> bool:
        """Return whether the server's first process runs."""
        return self._process.poll() is None

    async def page(self, path: str, seconds: float = 10) -> Any:
        """Return the JSON of a page, or None if the server does not answer in time."""
        return await get(self.address, path, OPERATOR, seconds)

    async def ready(self) -> bool:
        """Return whether the server reports that it is ready."""
        return await self.page("/ready") is not None

    async def state(self) -> ServerSnapshot | None:
        """Return the server's state, or None if it is not available."""
        load, memory = await self.page("/load"), await self.page("/memory")
        if load is None or memory is None or not memory["ready"]:
            return None
        with contextlib.suppress(psutil.NoSuchProcess):
            files = psutil.Process(self.pid).num_fds()
            unfinished = load["sequences"] + load["running"] + load["waiting"]
            return ServerSnapshot(
                unfinished, memory["pool"]["blocks"]["used"], process_tree_bytes(self.pid), files
            )
        return None

    def children(self) -> set[psutil.Process]:
        """Return all processes of the server except the first."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return set(psutil.Process(self.pid).children(recursive=True))
        return set()

    def largest_child(self, besides: Set[psutil.Process] = frozenset()) -> psutil.Process | None:
        """Return the engine process, which uses the most memory, other than the processes in ``besides``."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return max(self.children() - besides, key=lambda child: child.memory_info().rss, default=None)
        return None

    async def read_plan(self) -> None:
        """Read the planned bytes of all processes and of the API process."""
        plan = (await self.page("/memory"))["plan"]
        self.planned = sum(
            size for name, size in plan["ranks"][0].items() if name not in ("free_bytes", "total_bytes")
        )
        if self.engine == "fake":  # the fake engine runs in the API process and has no plan
            self.api_planned = process_tree_bytes(self.pid)
        else:
            of = cpu if self.engine == "vllm" else hf
            self.api_planned = of.api_bytes(plan["model"]["vocab_size"]) + API_LIMIT_BYTES


@contextlib.contextmanager
def running_server(engine: str, tls: bool = False, more: Sequence[str] = ()) -> Iterator[AttackedServer]:
    """Start a server and yield it once it is ready; end it afterwards, even if it is stopped or hangs.

    A server with ``tls`` may open TLS_FILES files. ``more`` are further flags.

    Raises:
        SystemExit: the server does not start.
    """
    start = ["-c", PACED] if engine == "fake" else ["-m", "tonnage.server.cli"]
    with tempfile.TemporaryDirectory() as scratch:
        keys, log = Path(scratch, "keys.toml"), Path(scratch, "log")
        keys.write_text("".join(
            f'[[key]]\nname = "{name}"\nkey = "{key}"\nmetrics = {str(key == OPERATOR).lower()}\n'
            for name, key in (("victim", VICTIM), ("abuser", ABUSER), ("operator", OPERATOR))
        ))  # fmt: skip
        command = [sys.executable, *start, "serve", "demo", "--backend", engine, "--host", HOST, "--port", "0"]
        certificate = None
        if tls:
            certificate = str(Path(scratch, "certificate.pem"))
            command += ["--ssl-certfile", certificate, "--ssl-keyfile", _make_certificate(Path(certificate))]
            command = ["prlimit", f"--nofile={TLS_FILES}:{TLS_FILES}", *command]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*command, *FLAGS, *more, "--api-key-file", str(keys)],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
            )
        try:
            yield AttackedServer(engine, process, Address(_port(process, log), certificate))
        finally:
            _end(process)


def _make_certificate(path: Path) -> str:
    """Write a certificate for HOST, signed by itself, to ``path``; return the file of its key."""
    key = str(path.with_name("key.pem"))
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", f"/CN={HOST}", "-addext", f"subjectAltName=IP:{HOST}"]
    subprocess.run([*command, "-keyout", key, "-out", str(path)], check=True, capture_output=True)
    return key


def _port(process: subprocess.Popen[bytes], log: Path) -> int:
    since = time.monotonic()
    while time.monotonic() < since + START_SECONDS and process.poll() is None:
        for line in log.read_text(errors="replace").splitlines():
            if line.startswith("ready on "):
                return int(line.rpartition(":")[2])
        time.sleep(0.1)
    raise SystemExit(f"no server came up: {log.read_text(errors='replace')[-3000:]}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Terminate the process, then kill it with all its children; a stopped process can only be killed."""
    with contextlib.suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
        process.kill()
        for child in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    process.wait()
