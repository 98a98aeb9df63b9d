"""A process that has work and does nothing: how one that hangs is told from one that is slow.

Slow work uses processor time: on a busy machine later, never none. A process that is stopped (SIGSTOP), or
waits for a lock that nobody gives back, a disk or a driver that does not answer, uses none at all. So no
length of a step or of a load is a fault, only that nothing moved: no message came, and no clock tick went to
the process or to its children (an engine that loads waits for the process that compiles).
"""

from __future__ import annotations

from tonnage.server.engines.process_memory import process_tree

# Looks are counted, not seconds: an API process that was stopped itself, or whose machine slept, did not look.
LOOK_SECONDS = 1.0
# A process of nice 5 beside eight busy ones on its only core gets 4 % of it (weights 335 and 1024,
# kernel/sched/core.c), a tick of 10 ms in a quarter of a second: a minute without one is 240 times as long.
STILL_LOOKS = 60
# A file server may be away for some minutes and come back (nfs(5): over TCP what was asked is asked again after
# 60 s, on a hard mount for ever); no client waits for an answer yet.
STILL_LOOKS_LOADING = 300


def processor_ticks(pid: int) -> int:
    """Clock ticks that a process, its descendants and those it has waited for have had, user and system.

    Source: proc_pid_stat(5), utime, stime, cutime and cstime.
    """
    total = 0
    for member in process_tree(pid):
        try:
            with open(f"/proc/{member}/stat", "rb") as stat:
                text = stat.read()
        except OSError:  # it ended between the listing and now
            continue
        # The second field is the command in parentheses and may itself hold ") "; the last one closes it.
        total += sum(map(int, text[text.rindex(b")") + 2 :].split()[11:15]))
    return total


class Stillness:
    """Of one process. Not for two threads at once."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._before: tuple[int, int] | None = None
        self._looks = 0

    def look(self, heard: int) -> int:
        """Looks in a row at which nothing had moved since the one before. ``heard``: messages so far."""
        now = heard, processor_ticks(self._pid)
        self._looks = self._looks + 1 if now == self._before else 0
        self._before = now
        return self._looks

    def moved(self) -> None:
        """It has nothing to do, or a message came: it is not still."""
        self._before, self._looks = None, 0
