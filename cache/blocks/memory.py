"""Allocation of the block manager's arrays: all memory pages at the start, or each page at its first use.

The first access to a new page is slow: 4.5 ms for a huge page (2 MiB) that the host has to provide, measured on
a virtual machine (benchmarks/README.md). That is as long as the admission of a prompt of 100,000 tokens. Arrays
that every full pool uses are therefore written once at the start. Arrays sized for the worst case (rows as long
as max_model_len) use small pages.
"""

from __future__ import annotations

import math
import mmap
from typing import Any

import numpy as np
import numpy.typing as npt


def resident(*shape: int, dtype: type[np.generic]) -> npt.NDArray[Any]:
    """Return an array of zeros whose memory pages are all allocated now, not at first access."""
    array = np.empty(shape, dtype)
    array.fill(0)
    return array


def lazy(*shape: int, dtype: type[np.generic]) -> npt.NDArray[Any]:
    """Return an array of zeros whose memory is allocated when it is first accessed, 4 KiB at a time.

    numpy requests huge pages for arrays of 4 MiB or more (numpy/_core/src/multiarray/alloc.c, 2.x). A few
    tokens at the start of a row would then take 2 MiB.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = mmap.mmap(-1, max(size, 1))
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # only Linux can be told to use no huge pages
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype, count=math.prod(shape)).reshape(shape)
