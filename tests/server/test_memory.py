"""The measured memory of a process tree, against processes that hold a known number of bytes."""

from __future__ import annotations

import subprocess
import sys

from tonnage.server.engines.process_memory import process_tree, process_tree_bytes

MIB = 2**20

HOLDER = """
import mmap, multiprocessing, sys
held = bytearray(b"x") * (int(sys.argv[1]) * 2**20)
print("ready", flush=True)
sys.stdin.readline()
"""

# Two processes that both wrote all pages of one shared mapping of 64 MiB.
SHARERS = """
import mmap, os, sys
area = mmap.mmap(-1, 64 * 2**20)
area.write(b"y" * len(area))
read, write = os.pipe()
child = os.fork()
if child == 0:
    area.seek(0); area.write(b"z" * len(area))
    os.write(write, b"1")
    sys.stdin.readline(); os._exit(0)
os.read(read, 1)
print("ready", flush=True)
sys.stdin.readline(); os.kill(child, 9)
"""

# A parent with little memory whose child holds 48 MiB.
NESTED = f"""
import subprocess, sys
pipe = subprocess.PIPE
child = subprocess.Popen([sys.executable, "-c", {HOLDER!r}, "48"], stdin=pipe, stdout=pipe)
child.stdout.readline()
print("ready", flush=True)
sys.stdin.readline(); child.kill(); child.wait()
"""


class Held:
    def __init__(self, code: str, *argv: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *argv], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def __enter__(self) -> int:
        return self.process.pid

    def __exit__(self, *_: object) -> None:
        self.process.communicate("\n")


def test_process_memory_is_measured() -> None:
    with Held(HOLDER, "0") as empty, Held(HOLDER, "64") as full:
        difference = process_tree_bytes(full) - process_tree_bytes(empty)
    assert abs(difference - 64 * MIB) < MIB


def test_memory_of_child_processes_is_counted() -> None:
    with Held(NESTED) as pid:
        tree = process_tree(pid)
        held = process_tree_bytes(pid)
    assert tree[0] == pid
    assert len(tree) == 2
    assert held > 48 * MIB


def test_memory_pages_shared_by_processes_are_counted_once() -> None:
    with Held(SHARERS) as pid:
        assert len(process_tree(pid)) == 2
        held = process_tree_bytes(pid)
    assert 64 * MIB <= held < 100 * MIB


def test_exited_process_counts_no_memory() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert process_tree(gone.pid) == []
    assert process_tree_bytes(gone.pid) == 0


PEAK = f"""
from tonnage.server.engines.process_memory import PeakSampler
sampler = PeakSampler(interval=0.01)
before = sampler.sample()
sampler.start()
held = bytearray(b"x") * (96 * {MIB})
sampler.sample()
del held
sampler.stop()
print(sampler.peak - before, sampler.current - before)
"""


def test_peak_memory_is_kept_after_allocation_is_freed() -> None:
    # In a process of its own: the sampler counts children too, and this one's come and go with other tests.
    out = subprocess.run([sys.executable, "-c", PEAK], check=True, capture_output=True, text=True).stdout
    peak, current = map(int, out.split())
    assert peak > 90 * MIB
    assert current < 60 * MIB
