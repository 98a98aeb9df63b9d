"""CPU kernels for bfloat16, compiled by numba: linear layers, attention on blocks, norms, rotary embedding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tonnage.cache.compiled import Compiler

COMPILER = Compiler(Path(__file__).parent)


def compiled(*, parallel: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator by which numba compiles a CPU kernel to machine code that runs without the GIL.

    With ``parallel`` the kernel's prange loops run in several threads.
    """
    return lambda function: COMPILER(function, parallel=parallel, nogil=True)
