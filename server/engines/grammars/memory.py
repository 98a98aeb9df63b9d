"""Memory of the compiled grammars in this process, in bytes."""

from __future__ import annotations

import threading
import weakref
from typing import Protocol


class Held(Protocol):
    """A compiled grammar that states how many bytes of memory it takes."""

    held: int  # memory of the compiled grammar in bytes


# All compiled grammars in the cache or in use. A sequence keeps its grammar alive after the cache has evicted
# it.
_LIVE: weakref.WeakSet[Held] = weakref.WeakSet()
_LIVE_LOCK = threading.Lock()  # needed because several threads that compile grammars add to `_LIVE`


def count(compiled: Held) -> None:
    """Include a compiled grammar's memory in `held_bytes` until the object is freed."""
    with _LIVE_LOCK:
        _LIVE.add(compiled)


def held_bytes() -> int:
    """Return the memory in bytes of all compiled grammars that are in the cache or in use."""
    with _LIVE_LOCK:
        return sum(compiled.held for compiled in _LIVE)
