"""Heap settings of the API process that return freed memory to the kernel and shorten garbage collections."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
from typing import NoReturn

from tonnage.server.engines.process_memory import anonymous_bytes

# mallopt(3) parameters (glibc malloc.h): M_MMAP_THRESHOLD, M_TRIM_THRESHOLD and M_ARENA_MAX. Blocks over 128
# KiB (bodies, texts) return to the kernel when freed, and so does free memory over 1 MiB at the end of the
# heap. Without these settings glibc raises both thresholds when the first large block is freed. One arena is
# enough, because with more each thread that loads or encodes would keep its peak (vLLM with a vocabulary of
# 262,144: 40 MiB at rest, 230 MiB during the load).
_MALLOC = ((-3, 2**17), (-1, 2**20), (-8, 1))


def bound_heap() -> None:
    """Make glibc's allocator return freed memory to the kernel; this affects only later allocations."""
    with contextlib.suppress(OSError, AttributeError):  # C libraries other than glibc may lack mallopt
        for option, value in _MALLOC:
            ctypes.CDLL(None).mallopt(option, value)


# Number of new objects after which Python's garbage collector runs. A request body of 1.5 MB may have 40,000
# message parts. Their validation takes 60 ms of the event loop with this threshold, and 260 ms with the default
# of 700 (benchmarks/event_loop.py many_parts).
_COLLECTED_AT_ONCE = 50_000


def settle_heap() -> None:
    """Exempt existing objects from garbage collection, make collections rare, return free memory to the kernel.

    A full collection visits every object. With the code and the model's tables loaded it takes 60 to 170 ms,
    during which no stream receives a token (benchmarks/server.py, 512 streams). Call this after a model has
    loaded. It also collects garbage among objects exempted earlier, such as a stopped engine and its open
    files.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECTED_AT_ONCE)
    trim()


# Free memory is returned when the process has grown by _GROWTH_BYTES, the default maximum size of a request
# body (max_request_body_bytes). If that freed at least _WORTH_BYTES, the next check returns free memory again.
# A check per second is often enough, because a flood of requests lasts longer (benchmarks/abuse.py).
_GROWTH_BYTES = 8 * 2**20
_WORTH_BYTES = 2**20
_CHECK_SECONDS = 1.0


async def shrink_heap() -> NoReturn:
    """Return free heap memory to the kernel whenever this process has grown, until the task is cancelled.

    By itself, glibc returns only the free memory behind the last block in use. So in benchmarks/abuse.py, the
    memory of each attack was added to the memory that earlier attacks had left. In the attack `unread`, the API
    process of the hf engine took 63 MiB more than planned for it, and the benchmark permits 42 MiB.

    Garbage is not collected here, because a collection during a flood of requests delays the event loop.
    """
    least, freed = anonymous_bytes(), 0
    while True:
        await asyncio.sleep(_CHECK_SECONDS)
        now = anonymous_bytes()
        if now > least + _GROWTH_BYTES or freed >= _WORTH_BYTES:
            trim()
            least = anonymous_bytes()
            freed = now - least
        else:
            least = min(least, now)


def trim() -> None:
    """Return free heap memory to the kernel; do nothing with a C library that has no malloc_trim."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
