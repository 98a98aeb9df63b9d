"""The compiler of the hot loops: numba, in one place, with the compiled code kept on disk.

What runs for every block of every request (hashing, matching, publishing, releasing, evicting) is written as
plain loops over arrays of ints and compiled; the same source runs uncompiled with NUMBA_DISABLE_JIT=1, and the
tests hold the two against each other. Compiling takes some seconds once per machine and version: the result is
kept beside the source, or in the user's cache folder where that is not writable (NUMBA_CACHE_DIR moves it).
Only what imports the manager pays for the import; `tonnage plan` does not.

`Struct` makes a named tuple of arrays one pointer for compiled code. Passing the tuples themselves by value
costs a minute of compiling instead of seconds, and 4 us a call instead of 0.7.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from numba.core import config, types
from numba.experimental import structref

Function = TypeVar("Function", bound=Callable[..., Any])

INTERPRETED = bool(config.DISABLE_JIT)


def compiled(function: Function) -> Function:
    """``function`` compiled at its first call; arguments are numbers, arrays and structs of them."""
    return cast(Function, numba.njit(cache=True, error_model="numpy")(function))


class StructType(types.StructRef):  # type: ignore[misc]
    """Base of the types below: fields of any array or struct type."""

    def preprocess_fields(self, fields: Any) -> Any:
        return tuple((name, types.unliteral(kind)) for name, kind in fields)


class Proxy(structref.StructRefProxy):  # type: ignore[misc]
    """Base of the classes that compiled code builds structs with."""


def define(proxy: type[Proxy], kind: type[StructType], fields: tuple[str, ...]) -> None:
    """Tie a proxy to its type; ``fields`` in the order of the constructor."""
    structref.register(kind)
    structref.define_proxy(proxy, kind, list(fields))
