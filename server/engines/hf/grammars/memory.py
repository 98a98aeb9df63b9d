"""What this process holds now, from /proc/self/statm (proc_pid_statm(5)), in microseconds."""

from __future__ import annotations

import os

_PAGE = os.sysconf("SC_PAGE_SIZE")


def mapped_bytes() -> int:
    return _fields()[0] * _PAGE


def resident_bytes() -> int:
    """Without pages of files: libraries are read in as they are used."""
    _, resident, shared, *_ = _fields()
    return (resident - shared) * _PAGE


def _fields() -> list[int]:
    with open("/proc/self/statm", "rb", buffering=0) as statm:
        return [int(field) for field in statm.read(256).split()]
