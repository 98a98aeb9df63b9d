"""The local machine: the memory that this process may use, and the CPU's instruction sets."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path


def host_memory(cgroup: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Return the bytes of memory that this process may use: physical memory, or its lowest cgroup limit.

    Args:
        cgroup: root of the cgroup file system (v2 memory.max, v1 memory.limit_in_bytes).
        own: file that lists the cgroups of this process (/proc/self/cgroup).
    """
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *_limits(cgroup, own)])


@cache
def cpu_features() -> frozenset[str]:
    """Return the CPU's instruction sets with Linux's names (`avx512_bf16`, `amx_tile`); empty without Linux."""
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("flags"):
                    return frozenset(line.partition(":")[2].split())
    except OSError:
        pass
    return frozenset()


def cpu_features_of(device: str) -> frozenset[str]:
    """Return the local CPU's instruction sets if the plan's device is a CPU, else an empty set.

    A plan for a CPU always describes the local machine.
    """
    return cpu_features() if device == "cpu" else frozenset()


def _limits(cgroup: Path, own: Path) -> list[int]:
    try:
        lines = own.read_text().splitlines()
    except OSError:
        lines = []
    folders = [cgroup, cgroup / "memory"]
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers in ("", "memory"):
            base = cgroup / "memory" if controllers else cgroup
            relative = Path(path.lstrip("/"))
            folders += [base / part for part in (relative, *relative.parents) if part != Path(".")]
    found = []
    for folder in folders:
        for name in ("memory.max", "memory.limit_in_bytes"):
            try:
                text = (folder / name).read_text().strip()
            except OSError:
                continue
            if text.isdigit() and int(text) > 0:  # A cgroup file with the text "max" sets no limit.
                found.append(int(text))
    return found
