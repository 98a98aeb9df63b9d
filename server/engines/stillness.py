"""A process that has work and does nothing: how one that hangs is told from one that is slow.

Slow work uses processor time: on a busy machine later, never none. A process that is stopped (SIGSTOP), or
waits for a lock that nobody gives back, a disk or a driver that does not answer, uses none at all. So no
length of a step or of a load is a fault, only that nothing moved: no message came, and no clock tick went to
the process or to its children (an engine that loads waits for the process that compiles).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from tonnage.server.engines.process_memory import process_tree

# Looks are counted, not seconds: an API process that was stopped itself, or whose machine slept, did not look.
LOOK_SECONDS = 1.0
# A process of nice 5 beside eight busy ones on its only core gets 4 % of it (weights 335 and 1024,
# kernel/sched/core.c), a tick of 10 ms in a quarter of a second: a minute without one is 240 times as long.
STILL_LOOKS = 60
# A file server may be away for some minutes and come back (nfs(5): over TCP what was asked is asked again after
# 60 s, on a hard mount for ever); no client waits for an answer yet.
STILL_LOOKS_LOADING = 300


def processor_ticks(tree: Iterable[int], main_threads: bool = False) -> int:
    """Clock ticks that processes, or only their main threads, and those they have waited for have had, user and
    system.

    Source: proc_pid_stat(5), utime, stime, cutime and cstime.
    """
    total = 0
    for member in tree:
        folder = f"/proc/{member}/task/{member}" if main_threads else f"/proc/{member}"
        try:
            with open(f"{folder}/stat", "rb") as stat:
                text = stat.read()
        except OSError:  # it ended between the listing and now
            continue
        # The second field is the command in parentheses and may itself hold ") "; the last one closes it.
        total += sum(map(int, text[text.rindex(b")") + 2 :].split()[11:15]))
    return total


class Stillness:
    """Of processes and their descendants. Not for two threads at once.

    ``main_threads``: the others turn also when there is nothing to do. ``parked``: ticks that each of them may
    use in a look without doing anything.
    """

    def __init__(self, *pids: int, main_threads: bool = False, parked: float = 0.0) -> None:
        self._pids = pids
        self._main_threads = main_threads
        self._parked = parked
        self._since: tuple[int, int] | None = None
        self._looks = 0

    def look(self, heard: int) -> int:
        """Looks in a row at which nothing had moved since the first of them. ``heard``: messages so far."""
        tree = [member for pid in self._pids for member in process_tree(pid)]
        ticks = processor_ticks(tree, self._main_threads)
        self._looks += 1
        idle = self._parked * len(tree) * self._looks
        if self._since is None or heard != self._since[0] or not 0 <= ticks - self._since[1] <= idle:
            self._since, self._looks = (heard, ticks), 0
        return self._looks

    def moved(self) -> None:
        """A message came."""
        self._since, self._looks = None, 0


async def still(processes: Stillness, heard: Callable[[], int], limit: Callable[[], int | None]) -> float:
    """Returns when they have been still for ``limit()`` looks, with the seconds that was.

    ``limit`` says None while they have nothing to do: such looks do not count. ``heard``: messages so far.
    """
    before = -1
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        now, most = heard(), limit()
        if now != before:
            before = now
            processes.moved()
        elif most is not None:
            looks = await asyncio.to_thread(processes.look, now)  # reads /proc
            if looks >= most and heard() == now:
                return looks * LOOK_SECONDS
