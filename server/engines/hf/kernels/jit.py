"""Compile kernels once per machine: machine code is kept in the user's cache folder.

numba notices a changed file only for the function's own file; these kernels are made of several. So the folder
is named by a digest of all sources here. Where nothing can be written the kernels compile at every start.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numba

_HERE = Path(__file__).parent


def _folder() -> str:
    digest = sha256(numba.__version__.encode())
    for source in sorted(_HERE.glob("*.py")):
        digest.update(source.read_bytes())
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return str(Path(cache) / "tonnage" / "kernels" / digest.hexdigest()[:16])


FOLDER = _folder()


def compiled(*, parallel: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """``numba.njit`` without the GIL, kept in :data:`FOLDER`."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        before = numba.config.CACHE_DIR
        numba.config.CACHE_DIR = FOLDER
        try:
            return numba.njit(parallel=parallel, nogil=True, cache=True)(function)  # type: ignore[no-any-return]
        except (RuntimeError, OSError):  # no folder that can be written
            return numba.njit(parallel=parallel, nogil=True)(function)  # type: ignore[no-any-return]
        finally:
            numba.config.CACHE_DIR = before

    return decorate
