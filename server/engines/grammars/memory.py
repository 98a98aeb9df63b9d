"""Memory of this process and of its compiled grammars, in bytes.

The process's memory is read from /proc/self/statm (proc_pid_statm(5)), which takes microseconds.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Protocol

_PAGE = os.sysconf("SC_PAGE_SIZE")


class Held(Protocol):
    """A compiled grammar that states how many bytes of memory it takes."""

    held: int  # memory of the compiled grammar in bytes


# All compiled grammars in the cache or in use. A sequence keeps its grammar alive after the cache has evicted
# it.
_LIVE: weakref.WeakSet[Held] = weakref.WeakSet()
_LIVE_LOCK = threading.Lock()  # several compiler threads add to the set


def count(compiled: Held) -> None:
    """Include a compiled grammar's memory in `held_bytes` until the object is freed."""
    with _LIVE_LOCK:
        _LIVE.add(compiled)


def held_bytes() -> int:
    """Return the memory in bytes of all compiled grammars that are in the cache or in use."""
    with _LIVE_LOCK:
        return sum(compiled.held for compiled in _LIVE)


def mapped_bytes() -> int:
    """Return the size of this process's address space in bytes."""
    return _fields()[0] * _PAGE


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes, without pages of files such as libraries."""
    _, resident, shared, *_ = _fields()
    return (resident - shared) * _PAGE


def _fields() -> list[int]:
    with open("/proc/self/statm", "rb", buffering=0) as statm:
        return [int(field) for field in statm.read(256).split()]
