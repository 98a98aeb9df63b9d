"""Processes that share a cache folder: they compile at once, or run on processors of other types."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from serving import PATIENCE

KINDS = ("int8", "int16", "int32", "float32", "float64")
SOURCE = """
def double(values):
    total = values[0]
    for value in values:
        total += value
    return total
"""
# numba's window between reading and writing an index takes microseconds; here it takes a fifth of a second.
COMPILE = """
import sys, time
from pathlib import Path
import numpy as np
from numba.core import caching
from tonnage.cache.compiled import Compiler
sys.path.insert(0, sys.argv[1])
from module import double
read = caching.IndexDataCacheFile._load_index
def slowly(self):
    found = read(self)
    time.sleep(0.2)
    return found
caching.IndexDataCacheFile._load_index = slowly
made = Compiler(Path(sys.argv[1]))(double)
print("ready", flush=True)
sys.stdin.readline()
for kind in sys.argv[2:]:
    made(np.ones(3, kind))
print(sum(made.stats.cache_hits.values()), sum(made.stats.cache_misses.values()))
"""


# Prints whether the note was there, and leaves it there.
NOTE = """
import sys
from pathlib import Path
from tonnage.cache.compiled import Compiler
compiler = Compiler(Path(sys.argv[1]))
print("kernels" in compiler)
compiler.note("kernels")
"""


def start(sources: Path, *kinds: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", COMPILE, str(sources), *kinds]
    environment = os.environ | {"NUMBA_CACHE_DIR": str(sources / "cache")}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)


def finish(process: subprocess.Popen[str]) -> tuple[int, int]:
    """Return how many signatures the process has read from disk and compiled."""
    out, _ = process.communicate("\n", timeout=PATIENCE)
    hits, misses = out.split()[-2:]
    return int(hits), int(misses)


def test_processes_that_compile_at_the_same_time_all_cache_their_compiled_code(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(SOURCE)
    processes = [start(tmp_path, kind) for kind in KINDS]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    assert [finish(process) for process in processes] == [(0, 1)] * len(KINDS)
    assert finish(start(tmp_path, *KINDS)) == (len(KINDS), 0)


def noted(sources: Path, cpu: str) -> bool:
    """Return whether functions count as compiled for the processor ``cpu``, and note that they are."""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(sources / "cache"), "NUMBA_CPU_NAME": cpu}
    command = [sys.executable, "-c", NOTE, str(sources)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=PATIENCE
    )
    return done.stdout == "True\n"


def test_compiled_code_cached_for_one_processor_does_not_count_for_another(tmp_path: Path) -> None:
    """The engine process would otherwise compile them itself, with memory that is not planned."""
    assert [noted(tmp_path, cpu) for cpu in ("znver4", "skylake-avx512", "znver4")] == [False, False, True]
