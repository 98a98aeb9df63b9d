"""How far an engine that computes on the CPU stands back behind the API process."""

from __future__ import annotations

import os

# Compute threads keep every core busy. Unless they stand back, a probe, a scrape or a token on its way out
# waits for a time slice behind them: 99 % of scrapes took 5.4 to 5.8 ms, with nice 5 3.7 to 4.0, at the same
# tokens a second (benchmarks/metrics_scrape.py; the hf engine).
BEHIND_THE_API = 5


def stand_back() -> None:
    """All threads of this process, and those that they start. (os.nice is for the calling thread only.)"""
    for thread in map(int, os.listdir("/proc/self/task")):
        niceness = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, niceness + BEHIND_THE_API)
