"""The compiler of the hot loops: numba, in one place, with the compiled code kept on disk.

What runs for every block of every request (hashing, matching, publishing, releasing, evicting) is written as
plain loops over arrays of ints and compiled; the same source runs uncompiled with NUMBA_DISABLE_JIT=1, and the
tests hold the two against each other. Compiling takes some seconds once per machine and version: the result is
kept beside the source, or in the user's cache folder where that is not writable (NUMBA_CACHE_DIR moves it).
Only what imports the manager pays for the import; `tonnage plan` does not.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import xxhash

Function = TypeVar("Function", bound=Callable[..., Any])


def _sources() -> str:
    """Digest of all modules of this package. numba asks only whether a function's own file has changed, and not
    those of the functions and constants compiled into it."""
    digest = xxhash.xxh3_64()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


VERSION = f"{numba.__version__} {_sources()}"


def compiled(function: Function) -> Function:
    """``function`` compiled at its first call; arguments are numbers, arrays and named tuples of arrays.

    Without numba's reference counts: nothing is allocated inside, and their atomic operations in the inner
    loops cost a third of the time (each waits for the stores before it).
    """
    dispatcher = numba.njit(cache=True, error_model="numpy", _nrt=False)(function)
    if dispatcher is not function:  # NUMBA_DISABLE_JIT leaves it as it is
        # Compared before anything kept is unpickled (numba/core/caching.py, IndexDataCacheFile, 0.65).
        dispatcher._cache._cache_file._version = VERSION
    return cast(Function, dispatcher)


def inlined(function: Function) -> Function:
    """As `compiled`, copied into each caller: for what runs once a block. A call that passes all arrays of the
    core by value costs more than what it does."""
    return cast(Function, numba.njit(error_model="numpy", _nrt=False, inline="always")(function))
