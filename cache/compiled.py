"""The compiler of the hot loops: numba, in one place, with the compiled code kept on disk.

What runs for every block of every request (hashing, matching, publishing, releasing, evicting) is written as
plain loops over arrays of ints and compiled; the same source runs uncompiled with NUMBA_DISABLE_JIT=1, and the
tests hold the two against each other. The kernels of the server's engine use the same `Compiler`.

Compiling takes some seconds once per machine and version. The result is kept in the user's cache folder
(XDG_CACHE_HOME or ~/.cache; NUMBA_CACHE_DIR moves it); where nothing can be written, it is compiled at every
start. Only what imports the manager pays for the import; `tonnage plan` does not.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import xxhash

Function = TypeVar("Function", bound=Callable[..., Any])


class Compiler:
    """numba for the modules below one folder, whose functions are compiled into one another.

    ``folder`` holds their machine code and is named by a digest of all these modules: numba itself asks only
    whether a function's own file has changed, and not those of the functions and constants compiled into it.
    None: nothing is kept (no folder that can be written, or NUMBA_DISABLE_JIT).
    """

    def __init__(self, sources: Path) -> None:
        # numba keeps code by the path of its source as it was imported (core/caching.py, 0.65), so another
        # installation finds nothing in this folder.
        digest = xxhash.xxh3_64(f"{numba.__version__} {sources.absolute()}".encode())
        for path in (Path(__file__), *sorted(sources.rglob("*.py"))):
            digest.update(path.read_bytes())
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tonnage"
        folder = Path(numba.config.CACHE_DIR or cache) / f"compiled-{digest.hexdigest()}"
        self.folder = folder if not numba.config.DISABLE_JIT and _writable(folder) else None

    def __call__(self, function: Function, **options: Any) -> Function:
        """``function`` compiled at its first call, with numba's options."""
        if self.folder is None:
            return cast(Function, numba.njit(**options)(function))
        before = numba.config.CACHE_DIR
        numba.config.CACHE_DIR = str(self.folder)  # read when the function is decorated
        try:
            return cast(Function, numba.njit(cache=True, **options)(function))
        finally:
            numba.config.CACHE_DIR = before


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


COMPILER = Compiler(Path(__file__).parent)


def compiled(function: Function) -> Function:
    """``function`` of this package compiled; arguments are numbers, arrays and named tuples of arrays.

    Without numba's reference counts: nothing is allocated inside, and their atomic operations in the inner
    loops cost a third of the time (each waits for the stores before it).
    """
    return COMPILER(function, error_model="numpy", _nrt=False)


def inlined(function: Function) -> Function:
    """As `compiled`, copied into each caller: for what runs once a block. A call that passes all arrays of the
    core by value costs more than what it does."""
    return cast(Function, numba.njit(error_model="numpy", _nrt=False, inline="always")(function))
