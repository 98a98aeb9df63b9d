"""What this process holds now (/proc/self/statm, proc_pid_statm(5); in microseconds), and its grammars."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Protocol

_PAGE = os.sysconf("SC_PAGE_SIZE")


class Held(Protocol):
    """A compiled grammar."""

    held: int  # bytes


# Every one that is kept or matched: an answer holds on to its own, whatever is kept of it.
_LIVE: weakref.WeakSet[Held] = weakref.WeakSet()
_LIVE_LOCK = threading.Lock()  # the compiler's threads add to them


def count(compiled: Held) -> None:
    """From now on, for as long as it is there."""
    with _LIVE_LOCK:
        _LIVE.add(compiled)


def held_bytes() -> int:
    """Of all that are counted."""
    with _LIVE_LOCK:
        return sum(compiled.held for compiled in _LIVE)


def mapped_bytes() -> int:
    return _fields()[0] * _PAGE


def resident_bytes() -> int:
    """Without pages of files: libraries are read in as they are used."""
    _, resident, shared, *_ = _fields()
    return (resident - shared) * _PAGE


def _fields() -> list[int]:
    with open("/proc/self/statm", "rb", buffering=0) as statm:
        return [int(field) for field in statm.read(256).split()]
