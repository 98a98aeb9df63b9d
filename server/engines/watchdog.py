"""A watchdog that distinguishes a hung process from a slow one by its processor time.

A slow process uses processor time, even if it runs late on a busy machine. A process that is stopped (SIGSTOP),
or that waits forever for a lock, a disk or a driver, uses none. So the watchdog has no limit for the duration
of a step or a load. It reports a process only if it received no message and the process and its children used
no clock tick. Children count, because an engine that loads waits for the processes that compile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from tonnage.server.engines.process_memory import process_tree, stat_fields

# Seconds between two checks. The limits below are numbers of checks, not seconds, because no check is made
# while the API process is stopped or the machine sleeps.
CHECK_SECONDS = 1.0
# Checks without progress, one per second, after which a process counts as hung. A process with niceness 5
# beside eight busy processes on its only core gets 4 % of the core (weights 335 and 1024, kernel/sched/core.c).
# That is a clock tick of 10 ms every 0.25 s, and 60 s are 240 times as long.
HANG_CHECKS = 60
# Checks without progress after which a process counts as hung during the load. A file server may be unreachable
# for some minutes and return (nfs(5): over TCP a request is repeated after 60 s, on a hard mount without end),
# and no client waits for an answer during a load.
HANG_CHECKS_LOADING = 300


def processor_ticks(tree: Iterable[int], main_threads: bool = False) -> int:
    """Return the clock ticks of processor time that processes and their reaped children have used.

    Source: proc_pid_stat(5), utime, stime, cutime and cstime.

    Args:
        tree: process ids; a process that has ended counts as 0.
        main_threads: count only the main thread of each process.
    """
    total = 0
    for member in tree:
        folder = f"/proc/{member}/task/{member}" if main_threads else f"/proc/{member}"
        total += sum(map(int, stat_fields(folder)[11:15]))
    return total


class Watchdog:
    """A counter of consecutive checks in which processes and their descendants made no progress.

    It is not thread-safe.

    Args:
        pids: ids of the processes to check.
        main_threads: count only main threads; for processes whose other threads use time without work.
        parked: clock ticks that each process may use per check without counting as progress.
    """

    def __init__(self, *pids: int, main_threads: bool = False, parked: float = 0.0) -> None:
        self._pids = pids
        self._main_threads = main_threads
        self._parked = parked
        self._since: tuple[int, int] | None = None
        self._checks = 0

    def check(self, messages: int) -> int:
        """Check the processes once; return how many consecutive checks have found no progress.

        ``messages`` is the number of messages received so far; a new message is progress.
        """
        tree = [member for pid in self._pids for member in process_tree(pid)]
        ticks = processor_ticks(tree, self._main_threads)
        self._checks += 1
        idle = self._parked * len(tree) * self._checks
        if self._since is None or messages != self._since[0] or not 0 <= ticks - self._since[1] <= idle:
            self._since, self._checks = (messages, ticks), 0
        return self._checks

    def reset(self) -> None:
        """Reset the count of checks without progress, because a message from the processes arrived."""
        self._since, self._checks = None, 0


async def wait_until_hung(
    processes: Watchdog, messages: Callable[[], int], limit: Callable[[], int | None]
) -> float:
    """Wait until ``limit()`` consecutive checks have found no progress; return their duration in seconds.

    Args:
        processes: the watchdog of the processes.
        messages: function that returns the number of messages received so far.
        limit: function that returns the largest permitted number of checks without progress. While the
            processes have no work it returns None, and checks do not count.
    """
    before = -1
    while True:
        await asyncio.sleep(CHECK_SECONDS)
        now, most = messages(), limit()
        if now != before:
            before = now
            processes.reset()
        elif most is not None:
            # Run `check` in a thread, because it reads files in /proc, which would block the event loop.
            checks = await asyncio.to_thread(processes.check, now)
            if checks >= most and messages() == now:
                return checks * CHECK_SECONDS
