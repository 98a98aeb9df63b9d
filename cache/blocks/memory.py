"""Where the arrays of the manager lie: memory taken when the manager is made, or page by page as it is used.

A page that nobody has touched costs nothing until a step touches it, and then the step pays: measured on a
virtual machine, 4.5 ms for a huge page (2 MiB) that the host has to find first (benchmarks/README.md), as much
as the admission of a prompt of 100,000 tokens. So what every full pool uses is touched at the start, and what
is reserved for the worst case (rows as long as max_model_len) is kept on small pages.
"""

from __future__ import annotations

import math
import mmap
from typing import Any

import numpy as np
import numpy.typing as npt


def resident(*shape: int, dtype: type[np.generic]) -> npt.NDArray[Any]:
    """Zeros whose memory is taken now."""
    array = np.empty(shape, dtype)
    array.fill(0)
    return array


def lazy(*shape: int, dtype: type[np.generic]) -> npt.NDArray[Any]:
    """Zeros whose memory is taken where it is touched, 4 KiB at a time.

    numpy asks for huge pages for whatever is 4 MiB or more (numpy/_core/src/multiarray/alloc.c, 2.x), and a
    few tokens at the start of a row would then take 2 MiB.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = mmap.mmap(-1, max(size, 1))
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # Linux
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype, count=math.prod(shape)).reshape(shape)
