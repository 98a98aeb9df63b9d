"""RunningSnapshot: what admission and the grant of blocks read; arrays of ints, one entry a running request.

A *request* here is the unit of admission: one prompt with its n sequences (forks to come included). Entries
stand in order of admission, the oldest first. Only **full** groups are counted block by block: what sliding
groups may ever hold is bounded (`tonnage.cache.admission.reservation`), so it is set aside whole in
``windowed`` when a request is admitted, and a window that drops a shared block changes nothing that anybody was
reserved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class RunningSnapshot:
    """Pool counters, and int32 arrays of shape [running requests]. Views are fine: readers change nothing.

    - ``usable``: blocks of the pool without the null block;
    - ``used``: distinct blocks of full groups with a reference;
    - ``windowed``: most blocks all running requests can hold in sliding groups (0 without such groups);
    - ``held``: distinct blocks in the request's tables, full groups;
    - ``private``: those of ``held`` that no other request references, or fewer (a lower bound is safe);
    - ``reserved``: most blocks the request can ever hold in full groups;
    - ``prompt``: prompt tokens; ``prompt_left``: of these not yet computed;
    - ``output``: tokens produced by its longest live sequence; ``output_left``: the most that one of its live
      sequences may still produce;
    - ``sequences``: live ones plus forks to come.
    """

    usable: int
    used: int
    windowed: int
    held: Int32Array
    private: Int32Array
    reserved: Int32Array
    prompt: Int32Array
    prompt_left: Int32Array
    output: Int32Array
    output_left: Int32Array
    sequences: Int32Array

    @property
    def capacity(self) -> int:
        """Blocks that full groups may use."""
        return self.usable - self.windowed

    @property
    def available(self) -> int:
        """Blocks that full groups may still take: free ones, and cached ones that nobody references."""
        return self.usable - self.windowed - self.used

    @property
    def need(self) -> Int32Array:
        """int32 [running]: blocks each request may still ask for."""
        return self.reserved - self.held

    def __len__(self) -> int:
        return len(self.held)

    def with_one(
        self, used: int, windowed: int, private_lost: Int32Array, entry: Sequence[int]
    ) -> RunningSnapshot:
        """The state with one more request, the last entry: ``entry`` has its value of each array, in order.

        ``used``, ``windowed``: blocks that it adds; ``private_lost`` int32 [running]: blocks that were each
        running request's alone and are shared with it.
        """
        arrays = (
            self.held,
            self.private - private_lost,
            self.reserved,
            self.prompt,
            self.prompt_left,
            self.output,
            self.output_left,
            self.sequences,
        )
        more = np.array(entry, np.int32)
        return RunningSnapshot(
            self.usable, self.used + used, self.windowed + windowed, *map(np.append, arrays, more)
        )
