"""A watchdog that distinguishes a hung process from a slow one by its processor time.

A slow process uses processor time, even if late on a busy machine. A process that is stopped (SIGSTOP), or that
waits for a lock, a disk or a driver without end, uses none. So the watchdog sets no limit on the duration of a
step or a load. It reports a process only if no message came and no clock tick went to it or its children.
Children count, because an engine that loads waits for the processes that compile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from tonnage.server.engines.process_memory import process_tree

# The limits count checks, not seconds: if the API process was stopped or the machine slept, none was made.
CHECK_SECONDS = 1.0
# A process of nice 5 beside eight busy ones on its only core gets 4 % of it (weights 335 and 1024,
# kernel/sched/core.c): a tick of 10 ms per quarter of a second. A minute without one is 240 times as long.
HANG_CHECKS = 60
# A file server may be away for some minutes and return (nfs(5): over TCP a request is repeated after 60 s, on a
# hard mount without end), and no client waits for an answer during a load.
HANG_CHECKS_LOADING = 300


def processor_ticks(tree: Iterable[int], main_threads: bool = False) -> int:
    """Return the clock ticks, user and system, used by processes and the children they have waited for.

    Source: proc_pid_stat(5), utime, stime, cutime and cstime.

    Args:
        tree: process ids; ended processes count 0.
        main_threads: count only the main thread of each process.
    """
    total = 0
    for member in tree:
        folder = f"/proc/{member}/task/{member}" if main_threads else f"/proc/{member}"
        try:
            with open(f"{folder}/stat", "rb") as stat:
                text = stat.read()
        except OSError:  # the process ended after the listing
            continue
        # The second field is the command in parentheses and may itself hold ") "; the last one closes it.
        total += sum(map(int, text[text.rindex(b")") + 2 :].split()[11:15]))
    return total


class Watchdog:
    """A counter of consecutive checks without progress of processes and their descendants. Not thread-safe.

    Args:
        pids: the processes to check.
        main_threads: count only main threads, where the other threads also run without work.
        parked: ticks that each process may use per check without being counted as progress.
    """

    def __init__(self, *pids: int, main_threads: bool = False, parked: float = 0.0) -> None:
        self._pids = pids
        self._main_threads = main_threads
        self._parked = parked
        self._since: tuple[int, int] | None = None
        self._checks = 0

    def check(self, messages: int) -> int:
        """Check once; return how many checks in a row have found no progress, given the messages so far."""
        tree = [member for pid in self._pids for member in process_tree(pid)]
        ticks = processor_ticks(tree, self._main_threads)
        self._checks += 1
        idle = self._parked * len(tree) * self._checks
        if self._since is None or messages != self._since[0] or not 0 <= ticks - self._since[1] <= idle:
            self._since, self._checks = (messages, ticks), 0
        return self._checks

    def reset(self) -> None:
        """Record progress, because a message came."""
        self._since, self._checks = None, 0


async def wait_until_hung(
    processes: Watchdog, messages: Callable[[], int], limit: Callable[[], int | None]
) -> float:
    """Wait until the processes have made no progress for ``limit()`` checks; return that time in seconds.

    Args:
        processes: the progress counter.
        messages: returns the number of messages received so far.
        limit: returns the largest permitted number of checks, or None while the processes have no work; such
            checks do not count.
    """
    before = -1
    while True:
        await asyncio.sleep(CHECK_SECONDS)
        now, most = messages(), limit()
        if now != before:
            before = now
            processes.reset()
        elif most is not None:
            checks = await asyncio.to_thread(processes.check, now)  # reads /proc
            if checks >= most and messages() == now:
                return checks * CHECK_SECONDS
