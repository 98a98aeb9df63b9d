"""Compile ahead of every start: ``python -m tonnage.server.engines.hf.ahead [--all]``.

Writes an archive for each set of instructions beside the package (`tonnage.cache.ahead`), which every start
on a processor that has them reads: for an image, for a wheel, or once where the package is installed.
"""

from __future__ import annotations

import argparse
import os
import pickle
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
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
from tonnage.server.engines.hf.compile import Part

OK, FAILED = 0, 1

# The groups that most models have, in every mode. What others need beside it is compiled at their first start.
_FULL, _SLIDING = KVGroup("full", (0,)), KVGroup("sliding", (1,), window=32)
_LAYOUTS = tuple(KVLayout(groups, 16, 1, 1, 8, "float32", 4) for groups in ((_FULL,), (_FULL, _SLIDING)))
_MANAGERS = [
    Part(layout, policy) for layout in _LAYOUTS for policy in (None, *(Policy(mode) for mode in AdmissionMode))
]
PARTS = {"kernels": [Part(None)], "manager": _MANAGERS}


@dataclass(frozen=True, slots=True)
class Compiled:
    """What a process has compiled. ``members``: by their names in an archive. ``signatures``: (module,
    function, types of its arguments) of each, by which another process compiles the same and runs nothing."""

    name: str
    members: dict[str, bytes]
    signatures: list[tuple[str, str, Any]]


def collect(compiler: Compiler, parts: list[Part], signatures: list[tuple[str, str, Any]] | None) -> Compiled:
    """Compile the parts for the processor that numba is told of: by running them, or by ``signatures``."""
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
    """Of `PARTS`, those that can run in this installation."""
    return [name for name in PARTS if name != "kernels" or find_spec("torch")]


def is_there(level: Level, names: list[str]) -> bool:
    """Whether its archive has these parts, compiled of the sources as they are."""
    return all(
        {part.note for part in PARTS[name]}
        <= ahead.read(level.path, PARTS[name][0].compiler.archive.name).keys()
        for name in names
    )


def write(level: Level, found: list[Compiled]) -> None:
    """The archive of ``level``, there at once or not at all."""
    level.path.parent.mkdir(parents=True, exist_ok=True)
    partial = level.path.with_suffix(f".{os.getpid()}")
    try:
        ahead.write(partial, {each.name: each.members for each in found})
        partial.replace(level.path)
    finally:
        partial.unlink(missing_ok=True)


def _in_a_process(level: Level, name: str, work: Path, signatures: Path | None) -> Path:
    """The file of a `Compiled`. Raises CalledProcessError."""
    begun = time.monotonic()
    to = work / f"{level.name}-{name}"
    command = [sys.executable, "-m", __spec__.name, "--part", name, "--to", str(to)]
    command += [] if signatures is None else ["--signatures", str(signatures)]
    subprocess.run(command, env=os.environ | level.environment, check=True)
    print(f"compiled for {level.name}: {name}, {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
    return to


def read(path: Path) -> Compiled:
    """What a process of ours has written."""
    return Compiled(*pickle.loads(path.read_bytes()))


def compile_ahead(levels: list[Level], here: Level, names: list[str]) -> None:
    """``here`` first, by running everything; the others of the same signatures. A process for each core."""
    with (
        tempfile.TemporaryDirectory() as folder,
        ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool,
    ):
        work = Path(folder)
        run = {name: pool.submit(_in_a_process, here, name, work, None) for name in names}
        done = {(here, name): running.result() for name, running in run.items()}
        others = [(level, name) for level in levels if level is not here for name in names]
        later = [pool.submit(_in_a_process, level, name, work, done[here, name]) for level, name in others]
        done |= {key: running.result() for key, running in zip(others, later, strict=True)}
        for level in levels:
            found = [read(done[level, name]) for name in names]
            write(level, found)
            size = f"{level.path.stat().st_size / 1e6:.1f} MB"
            print(f"{level.path} ({size})", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--all", action="store_true", help=f"for {', '.join(level.name for level in LEVELS)}")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--to", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--signatures", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        parts = PARTS[arguments.part]
        given = None if arguments.signatures is None else read(arguments.signatures).signatures
        found = collect(parts[0].compiler, parts, given)
        arguments.to.write_bytes(dumps((found.name, found.members, found.signatures)))
        return OK
    here = level_here()
    if here is None:
        known = ", ".join(level.name for level in LEVELS)
        print(f"nothing is compiled ahead: this processor has none of {known}", file=sys.stderr)
        return OK
    names = named()
    wanted = LEVELS if arguments.all else (here,)
    levels = [level for level in wanted if not is_there(level, names)]
    if not levels:
        return OK
    try:
        compile_ahead(levels, here, names)
    # RuntimeError: a Python that was built without lzma
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        print(f"nothing is compiled ahead: {error}", file=sys.stderr)
        return FAILED
    return OK


if __name__ == "__main__":
    sys.exit(main())
