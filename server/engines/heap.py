"""The API process's heap: it gives back what it frees, and what stays is not gone through again and again."""

from __future__ import annotations

import contextlib
import ctypes
import gc

# mallopt(3), malloc.h of glibc: M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_ARENA_MAX. Blocks over 128 KiB (bodies,
# texts) go back to the kernel when freed, and so does the end of the heap beyond 1 MiB; glibc begins with as
# much and raises both with the first large block that is freed. One arena: each thread that loads or encodes
# would keep what it needed most (vLLM with a vocabulary of 262,144: 40 MiB at rest, 230 while it loads).
_MALLOC = ((-3, 2**17), (-1, 2**20), (-8, 1))


def bound_heap() -> None:
    """Have the process give back what it frees. Call it first of all: what is there by then stays as it is."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        for option, value in _MALLOC:
            ctypes.CDLL(None).mallopt(option, value)


def settle_heap() -> None:
    """Take what the process holds by now out of the garbage collector's sight, and give back what is free.

    A full collection looks at every object: 60 to 170 ms with the code and the model's tables loaded, in which
    no stream gets a token (benchmarks/server.py, 512 streams). Call it when a model is loaded; what was settled
    before and is of no use any more, an engine that has ended and its open files, goes.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
