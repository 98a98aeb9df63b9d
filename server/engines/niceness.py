"""Scheduling priority of an engine that computes on the CPU: lower than that of the API process."""

from __future__ import annotations

import os

# Niceness of the engine. Its compute threads keep every core busy. At equal priority, the API process waits for
# a time slice before it answers a health check or a request for metrics, or sends a token. The 99th percentile
# of the time to answer /metrics was 5.4 to 5.8 ms at equal priority, and 3.7 to 4.0 ms when the engine had
# niceness 5. Both had equal tokens per second (benchmarks/metrics_scrape.py, HF engine).
BEHIND_THE_API = 5


def stand_back() -> None:
    """Lower the scheduling priority of all threads of this process, and of threads they start later.

    os.nice would change only the calling thread.
    """
    for thread in map(int, os.listdir("/proc/self/task")):
        niceness = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, niceness + BEHIND_THE_API)
