"""Scheduling priority of an engine that computes on the CPU, below that of the API process."""

from __future__ import annotations

import os

# Compute threads keep every core busy. At equal priority, a probe, a scrape or a token on its way out waits for
# a time slice: 99 % of scrapes took 5.4 to 5.8 ms, with nice 5 3.7 to 4.0, at the same tokens per second
# (benchmarks/metrics_scrape.py, hf engine).
BEHIND_THE_API = 5


def stand_back() -> None:
    """Lower the priority of all threads of this process, and of threads they start later.

    os.nice would change the calling thread only.
    """
    for thread in map(int, os.listdir("/proc/self/task")):
        niceness = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, niceness + BEHIND_THE_API)
