"""RunningSnapshot: what admission and the grant of blocks read; a row of ints for each running request.

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

HELD, PRIVATE, RESERVED, PROMPT, PROMPT_LEFT, OUTPUT, OUTPUT_LEFT, SEQUENCES = range(8)
COLUMNS = 8


@dataclass(frozen=True, slots=True)
class RunningSnapshot:
    """Pool counters, and ``rows`` int32 [running requests, COLUMNS]. Views are fine: readers change nothing.

    - ``usable``: blocks of the pool without the null block;
    - ``used``: distinct blocks of full groups with a reference;
    - ``windowed``: most blocks all running requests can hold in sliding groups (0 without such groups).

    The columns, each int32 [running requests]:

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
    rows: Int32Array

    @property
    def held(self) -> Int32Array:
        return self.rows[:, HELD]

    @property
    def private(self) -> Int32Array:
        return self.rows[:, PRIVATE]

    @property
    def reserved(self) -> Int32Array:
        return self.rows[:, RESERVED]

    @property
    def prompt(self) -> Int32Array:
        return self.rows[:, PROMPT]

    @property
    def prompt_left(self) -> Int32Array:
        return self.rows[:, PROMPT_LEFT]

    @property
    def output(self) -> Int32Array:
        return self.rows[:, OUTPUT]

    @property
    def output_left(self) -> Int32Array:
        return self.rows[:, OUTPUT_LEFT]

    @property
    def sequences(self) -> Int32Array:
        return self.rows[:, SEQUENCES]

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
        return len(self.rows)

    def with_one(
        self, used: int, windowed: int, private_lost: Int32Array, entry: Sequence[int]
    ) -> RunningSnapshot:
        """The state with one more request, the last entry: ``entry`` has its value of each column, in order.

        ``used``, ``windowed``: blocks that it adds; ``private_lost`` int32 [running]: blocks that were each
        running request's alone and are shared with it.
        """
        rows = np.vstack((self.rows, np.array(entry, np.int32)))
        rows[:-1, PRIVATE] -= private_lost
        return RunningSnapshot(self.usable, self.used + used, self.windowed + windowed, rows)
