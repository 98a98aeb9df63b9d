"""The servers that commands of the documentation ask, by the names they have there.

``localhost:8000`` is the server that ``tonnage serve`` of the documentation starts: the demo model on the hf
backend. ``gpu-7:8000`` is full: two requests of the fake engine run and a third waits, and no token comes. The
others answer with recorded pages of vLLM, SGLang and llama-server (tests/data/SOURCES.md).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import httpx
from serving import PATIENCE, serving

HERE = "localhost:8000"
DEFAULT = "127.0.0.1:8000"  # what a command asks that names none

# What differs from run to run and from machine to machine; all else is compared. The bytes that a process
# measures, and what is planned or free of a machine's own memory, are numbers in the rows that begin so.
_ROWS = "framework|activations|free|device|process|all processes"
VARIES = (
    (re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d|^\d\d:\d\d:\d\d", re.M), "DATE"),
    (re.compile(r"; full in \d.*"), ""),  # told once the pool has filled for a while
    (re.compile(r"\b\d[\d.]* (?:ms|s|min|h)\b(?: \d+ (?:s|min)\b)?"), "SECONDS"),
    (re.compile(r"\b(cmpl|chatcmpl|resp|msg)[-_][0-9a-f]+"), r"\1-ID"),
    (re.compile(r'"created": ?\d+'), '"created":DATE'),
    (re.compile(r"\b[0-9a-f]{16}\b"), "PLAN"),  # its number, which the machine's memory is in
    (re.compile(rf'(component="(?:{_ROWS})"\}}) [\d.e+]+'), r"\1 #"),
    (
        re.compile(r"^(?!The capital)(.* \.\.\.) .*", re.M),
        r"\1 ANSWER",
    ),  # another processor's may differ
    (re.compile(r" {2,}"), " "),  # columns are as wide as their numbers
)
_MEASURED = re.compile(rf"^(?:{_ROWS})\b.*", re.M)
# The verdict of a component with an interval; another machine's may differ.
_VERDICT = re.compile(r"\b(?:ok|below|OUTSIDE),")
_NUMBER = re.compile(r"[+-]?\d[\d,.]*(?: [KMG]iB)?")


def compared(lines: list[str]) -> str:
    """Return the text of ``lines`` with the values that vary between runs replaced by placeholders."""
    text = "\n".join(line.strip() for line in lines)
    for pattern, name in VARIES:
        text = pattern.sub(name, text)
    return _MEASURED.sub(lambda row: _VERDICT.sub("VERDICT,", _NUMBER.sub("#", row[0])), text)


def asked(command: str) -> str | None:
    """Return the name of the server that a documented command queries or starts; None without a server."""
    if re.match(r"(?:\$ )?tonnage (?:serve|verify|demo|status(?! \w))\b(?!.*--help)", command):
        return HERE
    return next((name for name in (HERE, *_MADE) if name in command), None)


class Servers:
    """The documented servers, each started at first use, in the folder of `documented.models`."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack, self._addresses = stack, {}  # type: tuple[ExitStack, dict[str, str]]
        self._said: dict[str, list[str]] = {}
        # `tonnage` is this checkout's.
        self._bin = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        script = self._bin / "tonnage"
        script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m tonnage.server.cli "$@"\n')
        script.chmod(0o755)

    def output(self, command: str) -> list[str]:
        """Lines that ``command`` prints."""
        if command.startswith("tonnage serve"):
            assert not self._said, f"one server of the documentation is enough: {list(self._said)}"
            return self._start(command)
        name = asked(command)
        assert name is not None
        if command.startswith(("tonnage verify", "tonnage demo")):
            address = ""
        elif name == HERE:
            assert self._said, "no page has started a server before"
            address = self._addresses[HERE]
            _settled(address)
            command = re.sub(r"^tonnage status(?! \w)", f"tonnage status {address}", command)
        else:
            if name not in self._addresses:
                url = self._stack.enter_context(_MADE[name]())
                self._addresses[name] = url.removeprefix("http://")
            address = self._addresses[name]
        # A demo minds no setting of another server.
        foreign = {"TONNAGE_MAX_MODEL_LEN": "16"} if command == "tonnage demo" else {}
        environment = _environment() | foreign | {"PATH": f"{self._bin}:{os.environ['PATH']}"}
        command = command.replace(name, address)
        if command.startswith("COLUMNS="):
            return self._shown(_on_terminal(command, environment), name).rstrip("\n").split("\n")
        done = subprocess.run(
            ["bash", "-c", command], capture_output=True, text=True, timeout=2 * PATIENCE, env=environment
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        return self._shown(done.stdout, name).rstrip("\n").split("\n")

    def address(self, name: str = HERE) -> str:
        return self._addresses[name]

    def _shown(self, text: str, name: str) -> str:
        """Return the text with the address that the documentation shows."""
        if name in self._addresses:
            text = text.replace(self._addresses[name], DEFAULT if name == HERE else name)
        return re.sub(r"(?<=on http://127\.0\.0\.1:)\d+", "8000", text)

    def _start(self, command: str) -> list[str]:
        process = self._stack.enter_context(_running([*shlex.split(command), "--port", "0"], self._bin))
        said = self._said[command] = []
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line.rstrip())
            if line.startswith("ready on "):
                break
        assert process.poll() is None, said
        threading.Thread(target=process.stdout.read, daemon=True).start()
        self._addresses[HERE] = said[-1].rpartition("/")[2]
        return self._shown("\n".join(said), HERE).split("\n")


@contextmanager
def servers() -> Iterator[Servers]:
    with ExitStack() as stack:
        yield Servers(stack)


def _on_terminal(command: str, environment: dict[str, str]) -> str:
    """Return what ``command`` prints on a terminal without colours; it begins with the columns."""
    ours, theirs = pty.openpty()
    columns = int(command.partition(" ")[0].removeprefix("COLUMNS="))
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 60, columns, 0, 0))
    process = subprocess.Popen(
        ["bash", "-c", command], stdout=theirs, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL,
        env=environment | {"NO_COLOR": "1", "TERM": "xterm"},
    )  # fmt: skip
    os.close(theirs)
    said = b""
    with contextlib.suppress(OSError):  # EIO when the command has ended
        while part := os.read(ours, 65_536):
            said += part
    os.close(ours)
    assert process.wait(2 * PATIENCE) == 0, command
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said.decode()).replace("\r\n", "\n")


def _environment() -> dict[str, str]:
    """Without what is set for another server, or of a proxy."""
    return {name: value for name, value in os.environ.items() if not name.startswith("TONNAGE_")} | {
        "NO_PROXY": "*", **{name: os.environ[name] for name in ("TONNAGE_CACHE",) if name in os.environ},
    }  # fmt: skip


@contextmanager
def _running(words: list[str], bin: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [str(bin / words[0]), *words[1:]],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=_environment(),
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(PATIENCE)


# A step only while one may start: two run, and neither goes on.
_STAND_STILL = """
from tonnage.server.engines.fake import FakeEngine
step, FakeEngine.__init__.__kwdefaults__["token_rate"] = FakeEngine.step, 20
FakeEngine.step = lambda self: step(self) if self.stats().running < 2 and self.stats().waiting else None
"""


@contextmanager
def _full() -> Iterator[str]:
    """Start a full server, whose prompts of 40 tokens may produce 900 more."""
    flags = ["--backend", "fake", "--max-num-seqs", "2", "--max-model-len", "1024"]
    with (
        serving("demo", *flags, "--kv-cache-memory-bytes", "128MiB", before=_STAND_STILL, killed=True) as url,
        httpx.Client(base_url=url, trust_env=False, timeout=PATIENCE) as http,
    ):
        for token in range(3):
            body = {"model": "demo", "prompt": [token] * 40, "max_tokens": 900}
            threading.Thread(target=_hang, args=(url, body), daemon=True).start()
        deadline = time.monotonic() + PATIENCE
        while True:
            found = http.get("/memory").json()["requests"]
            if (found["running"], found["waiting"]) == (2, 1):
                break
            assert time.monotonic() < deadline, found
            time.sleep(0.05)
        yield url


def _settled(address: str) -> None:
    """Wait until the previous requests have returned their blocks."""
    deadline = time.monotonic() + PATIENCE
    with httpx.Client(base_url=f"http://{address}", trust_env=False, timeout=PATIENCE) as http:
        while True:
            found = http.get("/memory").json()
            if not found["requests"]["in_flight"] and not found["pool"]["blocks"]["promised"]:
                return
            assert time.monotonic() < deadline, found["requests"]
            time.sleep(0.05)


def _hang(url: str, body: dict[str, object]) -> None:
    with contextlib.suppress(httpx.HTTPError):  # the server is killed in the end
        httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE, trust_env=False)


def _recorded(kind: str) -> Callable[[], AbstractContextManager[str]]:
    @contextmanager
    def made() -> Iterator[str]:
        import watched  # reads pages of three servers

        pages = {
            "vllm": watched.vllm, "sglang": watched.sglang, "llama": lambda: watched.llama("default", "load"),
        }[kind]()  # fmt: skip
        with pages as server:
            yield server.url

    return made


_MADE: dict[str, Callable[[], AbstractContextManager[str]]] = {
    "gpu-7:8000": _full,
    "gpu-1:8000": _recorded("vllm"),
    "gpu-2:30000": _recorded("sglang"),
    "gpu-3:8080": _recorded("llama"),
}
