"""Compile all numba kernels before the first start: ``python -m tonnage.server.engines.hf.ahead [--all]``.

It writes one archive of machine code per instruction set (such as AVX-512) beside the package. When the HF
engine starts, it reads the archive for its processor (`tonnage.cache.ahead`). Run this command when an image or
a wheel is built, or once after an installation.
"""

from __future__ import annotations

import argparse
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from numba.core.serialize import dumps

from tonnage.cache import ahead
from tonnage.cache.admission import AdmissionMode, Policy
from tonnage.cache.ahead import LEVELS, Level, level_here
from tonnage.cache.compiled import Compiler
from tonnage.planner.model.layout import KVGroup, KVLayout
from tonnage.server.engines.hf.compile import SAY_SECONDS, Part

OK, FAILED = 0, 1
_SECONDS = 40  # processor time, in seconds, of compiling everything for one instruction set

# The KV cache groups that most models have are compiled for every admission mode. Code for other groups is
# compiled at a model's first start.
_FULL, _SLIDING = KVGroup("full", (0,)), KVGroup("sliding", (1,), window=32)
_LAYOUTS = tuple(KVLayout(groups, 16, 1, 1, 8, "float32", 4) for groups in ((_FULL,), (_FULL, _SLIDING)))
_MANAGERS = [
    Part(layout, policy) for layout in _LAYOUTS for policy in (None, *(Policy(mode) for mode in AdmissionMode))
]
PARTS = {"kernels": [Part(None)], "manager": _MANAGERS}


@dataclass(frozen=True, slots=True)
class Compiled:
    """The machine code of numba kernels that one compiling process has produced.

    Attributes:
        name: name of the compiler's cache, and of the archive part that the code goes to.
        members: content of each archive member, by member name.
        signatures: (module, function, argument types) of each compiled function. Another process can compile
            the same functions from them without running the functions.
    """

    name: str
    members: dict[str, bytes]
    signatures: list[tuple[str, str, Any]]


def collect(compiler: Compiler, parts: list[Part], signatures: list[tuple[str, str, Any]] | None) -> Compiled:
    """Compile ``parts`` for the processor that numba targets, and return the machine code.

    Args:
        compiler: compiler that keeps the machine code of all ``parts`` in its cache.
        parts: code to compile.
        signatures: (module, function, argument types) of each function of ``parts``, to compile the functions
            without running them. With None, the parts are run once, which compiles their functions.
    """
    compiler.archive.collect()
    if signatures is None:
        for part in parts:
            part.load()
    else:
        for module, function, types in signatures:
            getattr(import_module(module), function).compile(types)
    made = [
        (each.py_func.__module__, each.py_func.__qualname__, types)
        for each in compiler.made
        for types in each.signatures
    ]
    return Compiled(
        compiler.archive.name,
        {**(compiler.archive.collected or {}), **{part.note: b"" for part in parts}},
        made,
    )


def named() -> list[str]:
    """Return the keys of `PARTS` that this installation can compile; "kernels" needs torch."""
    return [name for name in PARTS if name != "kernels" or find_spec("torch")]


def is_there(level: Level, names: list[str]) -> bool:
    """Return whether the archive for ``level`` has up-to-date machine code of ``names``.

    A name is "kernels" (the CPU kernels) or "manager" (the block manager).
    """
    return all(
        {part.note for part in PARTS[name]}
        <= ahead.read(level.path, PARTS[name][0].compiler.archive.name).keys()
        for name in names
    )


def write(level: Level, found: list[Compiled]) -> None:
    """Write machine code to the archive file for the CPU instruction set ``level``, atomically."""
    level.path.parent.mkdir(parents=True, exist_ok=True)
    partial = level.path.with_suffix(f".{os.getpid()}")
    try:
        ahead.write(partial, {each.name: each.members for each in found})
        partial.replace(level.path)
    finally:
        partial.unlink(missing_ok=True)


class _Processes:
    """A pool of processes that compile kernels, at most one per core, with progress lines on stderr."""

    def __init__(self, work: Path, pool: ThreadPoolExecutor) -> None:
        self._work = work
        self._pool = pool
        self._begun = time.monotonic()
        self._told: dict[Path, str] = {}  # progress line of each running process, by output file

    def start(self, level: Level, name: str, signatures: Path | None) -> Future[Path]:
        """Start compiling code for an instruction set; return a future of the output file.

        ``name`` is "kernels" (the CPU kernels) or "manager" (the block manager). The future raises
        CalledProcessError if the process fails.
        """
        return self._pool.submit(self._run, level, name, signatures)

    def _run(self, level: Level, name: str, signatures: Path | None) -> Path:
        begun = time.monotonic()
        to = self._work / f"{level.name}-{name}"
        command = [sys.executable, "-m", __spec__.name, "--part", name, "--to", str(to)]
        command += [] if signatures is None else ["--signatures", str(signatures)]
        with subprocess.Popen(
            command, env=os.environ | level.environment, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                self._told[to] = f"{name} {line.strip()}"
        self._told.pop(to, None)
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command)
        _say(f"compiled for {level.name}: {name}, {time.monotonic() - begun:.0f} s")
        return to

    def results(self, started: list[Future[Path]]) -> list[Path]:
        """Wait for all started compilations; return their output files in order.

        Raises:
            CalledProcessError: a process failed.
        """
        while wait(started, SAY_SECONDS).not_done:
            so_far = ", ".join(self._told.copy().values())
            _say(f"compiling, {time.monotonic() - self._begun:.0f} s so far: {so_far or 'importing'}")
        return [each.result() for each in started]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _tell(compiler: Compiler) -> None:
    """Print the number of compiled functions on stdout twice a second; the parent process reads it."""
    while True:
        done, of = compiler.progress()
        # Call os.write instead of print, because Python aborts if the process exits during a print.
        os.write(1, f"{done} of {of} functions\n".encode())
        time.sleep(0.5)


def read(path: Path) -> Compiled:
    """Return the machine code that a compiling process has pickled to the file ``path``."""
    return Compiled(*pickle.loads(path.read_bytes()))


def compile_ahead(levels: list[Level], here: Level, names: list[str]) -> None:
    """Compile the numba code ``names`` for each CPU instruction set in ``levels``, and write archives.

    A name is "kernels" (the CPU kernels) or "manager" (the block manager). This processor's instruction set,
    ``here``, comes first: running the code yields the functions' signatures. The other instruction sets are
    compiled from these signatures.
    """
    what = ", ".join(level.name for level in levels)
    _say(
        f"compiling {' and '.join(names)} for {what}, once: {_SECONDS * len(levels)} s of processor time or so"
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool,
    ):
        processes = _Processes(Path(folder), pool)
        run = processes.results([processes.start(here, name, None) for name in names])
        done = {(here, name): path for name, path in zip(names, run, strict=True)}
        others = [(level, name) for level in levels if level is not here for name in names]
        later = [processes.start(level, name, done[here, name]) for level, name in others]
        done |= dict(zip(others, processes.results(later), strict=True))
        for level in levels:
            write(level, [read(done[level, name]) for name in names])
            _say(f"{level.path} ({level.path.stat().st_size / 1e6:.1f} MB)")


def main() -> int:
    """Parse the command line, and compile the kernels that the archives lack; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--all", action="store_true", help=f"for {', '.join(level.name for level in LEVELS)}")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--to", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--signatures", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        parts = PARTS[arguments.part]
        threading.Thread(target=_tell, args=(parts[0].compiler,), daemon=True).start()
        given = None if arguments.signatures is None else read(arguments.signatures).signatures
        found = collect(parts[0].compiler, parts, given)
        arguments.to.write_bytes(dumps((found.name, found.members, found.signatures)))
        return OK
    here = level_here()
    if here is None:
        known = ", ".join(level.name for level in LEVELS)
        _say(f"nothing is compiled ahead: this processor has none of {known}")
        return OK
    names = named()
    wanted = LEVELS if arguments.all else (here,)
    levels = [level for level in wanted if not is_there(level, names)]
    if not levels:
        return OK
    try:
        compile_ahead(levels, here, names)
    # Python raises RuntimeError if it was built without lzma.
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        _say(f"nothing is compiled ahead: {error}")
        return FAILED
    return OK


if __name__ == "__main__":
    sys.exit(main())
