"""RunningSnapshot: what every running request holds and may still ask for, as arrays.

One entry per *request slot*: a request with its n sequences is one unit of admission, and keeps its slot from
admission until its last sequence is freed. The arrays are read-only views of what the manager keeps up to date
with every operation: reading them costs no work per request, and they are valid until the next call that
changes the manager (copy them to keep them).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RunningSnapshot:
    """State of the pool, and per request slot int32 [slots] (0 where the slot is empty).

    ``held`` distinct blocks in the tables of the request's sequences; ``private`` a lower bound of those that
    nobody else references, i.e. that become free or evictable at once if the request ends now; ``promised``
    the most blocks it can ever hold (over all groups and sequences); ``prompt_left`` prompt tokens not yet
    computed; ``sequences`` those that count against max_num_seqs, forks still to come included; ``admitted``
    int64: number of the admission, growing (0: empty slot).

    Laws: ``private <= held <= promised`` everywhere; ``used <= sum(held)``; ``free + cached + used = usable``.
    """

    usable: int
    free: int
    cached: int
    running: int  # requests
    admitted: Int64Array
    held: Int32Array
    private: Int32Array
    promised: Int32Array
    prompt_left: Int32Array
    sequences: Int32Array

    @property
    def available(self) -> int:
        """Blocks that can be taken now: free ones and cached ones that nobody references."""
        return self.free + self.cached
