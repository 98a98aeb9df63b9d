"""The compiler of the hot loops: numba, in one place, with the compiled code kept on disk.

What runs for every block of every request (hashing, matching, publishing, releasing, evicting) is written as
plain loops over arrays of ints and compiled; the same source runs uncompiled with NUMBA_DISABLE_JIT=1, and the
tests hold the two against each other. Compiling takes some seconds once per machine and version: the result is
kept beside the source, or in the user's cache folder where that is not writable (NUMBA_CACHE_DIR moves it).
Only what imports the manager pays for the import; `tonnage plan` does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """``function`` compiled at its first call; arguments are numbers, arrays and named tuples of arrays.

    Without numba's reference counts: nothing is allocated inside, and their atomic operations in the inner
    loops cost a third of the time (each waits for the stores before it).
    """
    return cast(Function, numba.njit(cache=True, error_model="numpy", _nrt=False)(function))
