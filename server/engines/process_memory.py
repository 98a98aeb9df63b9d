"""Memory of the server's processes, anonymous plus shared, read from /proc (Linux only).

RssAnon + RssShmem (proc_pid_status(5)) exclude file-backed pages: libraries and mapped files. All processes
share these pages and the kernel reclaims them under pressure, so a plan does not count them.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence

_KIB = 1024

# Up to this number of bytes, the processes' shared memory is summed without correction; counting it twice is a
# negligible error. Above it, smaps_rollup gives the exact share. To compute the share, the kernel walks every
# page of a process, including private pages: 80 ms for 2.6 GiB, while it holds the lock that page faults need.
_SHARED_THAT_MATTERS = 4 * 1024 * _KIB


def stat_fields(folder: str) -> list[bytes]:
    """Return the fields of a /proc folder's ``stat`` file from the third, ``state``, on (proc_pid_stat(5)).

    Returns an empty list if the process has ended.
    """
    try:
        with open(f"{folder}/stat", "rb") as stat:
            text = stat.read()
    except OSError:
        return []
    # The second field is the command in parentheses. The command may contain ") ", so search for the last ")".
    return text[text.rindex(b")") + 2 :].split()


def process_tree(pid: int) -> list[int]:
    """Return ``pid`` and the process ids of all its living descendants; empty if the process has ended.

    The parent of each process is read from /proc/N/stat, because /proc/PID/task/TID/children needs a kernel
    option (CONFIG_PROC_CHILDREN) that not every kernel has.
    """
    children: dict[int, list[int]] = {}
    alive = False
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        child = int(name)
        alive = alive or child == pid
        state, parent, *_ = stat_fields(f"/proc/{name}") or (b"Z", b"0")
        if state != b"Z":
            children.setdefault(int(parent), []).append(child)
    if not alive:
        return []
    tree = [pid]
    for member in tree:  # the loop appends each process's children to the list
        tree.extend(children.get(member, ()))
    return tree


def anonymous_bytes(pid: int | str = "self") -> int:
    """Return the anonymous memory (RssAnon) of a process in bytes; 0 if it has ended or there is no /proc.

    The default is this process. A call takes microseconds. It reads /proc/PID/statm (proc_pid_statm(5)) and
    subtracts the file-backed and shared pages from the resident pages.
    """
    try:
        with open(f"/proc/{pid}/statm", "rb", buffering=0) as statm:
            _, resident, shared, *_ = map(int, statm.read().split())
    except OSError:
        return 0
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def process_tree_bytes(pid: int) -> int:
    """Return RssAnon + RssShmem of a process and its descendants in bytes; 0 if the process has ended.

    If several processes have shared memory, and their RssShmem is above 4 MiB in total, each process's
    proportional share (Pss_Shmem of smaps_rollup, Linux 5.9) replaces its RssShmem. So a page that several of
    them map is counted once. Anonymous pages are counted per process. So pages that a forked child shares with
    its parent would be counted twice, but engines are spawned, not forked.
    """
    return _held(process_tree(pid))


def _held(tree: Sequence[int]) -> int:
    """Return RssAnon + RssShmem of the processes ``tree`` in bytes; a process that has ended counts as 0."""
    anonymous = 0
    shared: dict[int, int] = {}
    for member in tree:
        status = _fields(f"/proc/{member}/status", ("RssAnon:", "RssShmem:"))
        anonymous += status.get("RssAnon:", 0)
        if status.get("RssShmem:", 0):
            shared[member] = status["RssShmem:"]
    if len(shared) > 1 and sum(shared.values()) > _SHARED_THAT_MATTERS:
        for member, resident in shared.items():
            rollup = _fields(f"/proc/{member}/smaps_rollup", ("Pss_Shmem:",))
            shared[member] = rollup.get("Pss_Shmem:", resident)
    return anonymous + sum(shared.values())


_SHARE_OF_A_CORE = 0.05
# Seconds between two listings of the process tree. A listing reads a file of every process on the machine, and
# a sample only one file per process of the tree. A listing at each sample took most of the CPU time of an API
# process in front of vLLM (benchmarks/server.py, api_cpu_ms_per_token).
_TREE_SECONDS = 1.0


class PeakSampler:
    """A thread that records the peak memory of a process tree, sampled every ``interval`` seconds.

    It samples less often if sampling would take more than 5 % of a core. It can miss a peak shorter than the
    interval, and the first second of a new process.
    """

    def __init__(self, pid: int | None = None, interval: float = 0.05) -> None:
        self._pid = os.getpid() if pid is None else pid
        self._interval = interval
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._tree: list[int] = []
        self._found = 0.0  # time of the last listing of the process tree
        self._current = 0
        self._peak = 0

    @property
    def current(self) -> int:
        """Bytes of memory that the process tree held at the most recent sample."""
        return self._current

    @property
    def peak(self) -> int:
        """Largest number of bytes of memory that the process tree held at any sample."""
        return self._peak

    def sample(self) -> int:
        """Measure now how many bytes of memory the process tree holds, and return the number."""
        self._tree = process_tree(self._pid)
        self._found = time.monotonic()
        return self._sample()

    def _sample(self) -> int:
        self._current = _held(self._tree)
        self._peak = max(self._peak, self._current)
        return self._current

    def start(self) -> None:
        """Take a first memory sample and start the sampling thread."""
        if self._thread is not None:
            return
        self._stop.clear()
        self.sample()
        self._thread = threading.Thread(target=self._run, name="memory-sampler", daemon=True)
        self._thread.start()

    def stop(self) -> int:
        """End the sampling thread after a last sample; return the memory peak in bytes."""
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None
            self.sample()
        return self._peak

    def _run(self) -> None:
        pause = self._interval
        while not self._stop.wait(pause):
            begun, begun_at = time.thread_time(), time.monotonic()
            if begun_at - self._found > _TREE_SECONDS:
                self.sample()
            else:
                self._sample()
            pause = max(self._interval, (time.thread_time() - begun) / _SHARE_OF_A_CORE)


def _fields(path: str, names: tuple[str, ...]) -> dict[str, int]:
    """Return the values in bytes of the lines ``Name:  N kB`` of a /proc file, for the given names.

    Returns an empty dictionary if the process has ended.
    """
    found: dict[str, int] = {}
    try:
        with open(path, encoding="ascii", errors="replace") as lines:
            for line in lines:
                name, *value = line.split()
                if name in names:
                    found[name] = int(value[0]) * _KIB
    except OSError:
        return {}
    return found
