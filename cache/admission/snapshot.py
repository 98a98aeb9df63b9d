"""A snapshot of the running requests, one row of counts per request, which admission reads.

A *request* is the unit of admission: one prompt with its n sequences, forks to come included. Rows are in order
of admission, oldest first. Only blocks of **full-attention** groups are counted individually. The blocks of
windowed groups are bounded (`tonnage.cache.admission.reservation`) and set aside in full in ``windowed`` when a
request is admitted. A window that releases a shared block therefore changes no reservation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]

HELD, PRIVATE, RESERVED, PROMPT, PROMPT_LEFT, OUTPUT, OUTPUT_LEFT, SEQUENCES = range(8)
COLUMNS = 8


@dataclass(frozen=True, slots=True)
class RunningSnapshot:
    """Counts of the pool and of each running request.

    Attributes:
        usable: Blocks of the pool without the null block.
        used: Distinct blocks of full-attention groups with a reference.
        windowed: Upper bound of the blocks of all running requests in windowed groups (0 without such groups).
        rows: int32 [running requests, COLUMNS]: the properties below are its columns. Views are allowed, since
            readers change nothing.
    """

    usable: int
    used: int
    windowed: int
    rows: Int32Array

    @property
    def held(self) -> Int32Array:
        """Distinct blocks in the request's tables of full-attention groups, int32 [running]."""
        return self.rows[:, HELD]

    @property
    def private(self) -> Int32Array:
        """Held blocks that no other request references, or a lower bound of them, int32 [running]."""
        return self.rows[:, PRIVATE]

    @property
    def reserved(self) -> Int32Array:
        """Upper bound of the request's blocks in full-attention groups, int32 [running]."""
        return self.rows[:, RESERVED]

    @property
    def prompt(self) -> Int32Array:
        """Prompt tokens, int32 [running]."""
        return self.rows[:, PROMPT]

    @property
    def prompt_left(self) -> Int32Array:
        """Prompt tokens not computed yet, int32 [running]."""
        return self.rows[:, PROMPT_LEFT]

    @property
    def output(self) -> Int32Array:
        """Output tokens of the request's longest live sequence, int32 [running]."""
        return self.rows[:, OUTPUT]

    @property
    def output_left(self) -> Int32Array:
        """Upper bound of the tokens that each request's live sequence may still produce, int32 [running]."""
        return self.rows[:, OUTPUT_LEFT]

    @property
    def sequences(self) -> Int32Array:
        """Live sequences plus forks to come, int32 [running]."""
        return self.rows[:, SEQUENCES]

    @property
    def capacity(self) -> int:
        """Blocks that full-attention groups may use."""
        return self.usable - self.windowed

    @property
    def available(self) -> int:
        """Blocks that full-attention groups may still take: free blocks and unreferenced cached blocks."""
        return self.usable - self.windowed - self.used

    @property
    def need(self) -> Int32Array:
        """Blocks that each request may still take, int32 [running]."""
        return self.reserved - self.held

    def __len__(self) -> int:
        return len(self.rows)
