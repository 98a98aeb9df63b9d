"""Heap settings of the API process: return freed memory to the kernel, keep garbage collections short."""

from __future__ import annotations

import contextlib
import ctypes
import gc

# mallopt(3), malloc.h of glibc: M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_ARENA_MAX. Blocks over 128 KiB (bodies,
# texts) return to the kernel when freed, and so does the end of the heap beyond 1 MiB. Without these settings
# glibc raises both limits with the first large block that is freed. One arena, because each thread that loads
# or encodes would keep its peak (vLLM with a vocabulary of 262,144: 40 MiB at rest, 230 during the load).
_MALLOC = ((-3, 2**17), (-1, 2**20), (-8, 1))


def bound_heap() -> None:
    """Make the allocator return freed memory to the kernel. Call first: earlier allocations are unaffected."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        for option, value in _MALLOC:
            ctypes.CDLL(None).mallopt(option, value)


def settle_heap() -> None:
    """Exempt all present objects from garbage collection and return free memory to the kernel.

    A full collection visits every object: 60 to 170 ms with the code and the model's tables loaded, during
    which no stream receives a token (benchmarks/server.py, 512 streams). Call it after a model has loaded. It
    also collects garbage among the objects exempted before, such as a stopped engine and its open files.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
