"""Block files of a disk tier, read through the page cache and past it (O_DIRECT).

    python benchmarks/disk_reads.py --folder DIR [--files 46] [--block 5906432] [--rounds 5] [--json]

Each round reads all files cold, both ways in random order, and once from the page cache. DIR is on the disk to
measure; its files are removed at the end. The last line is JSON: medians of MB/s, and of CPU seconds per GB.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import statistics
import tempfile
import time
from pathlib import Path


def forget(paths: list[Path]) -> None:
    """Remove the files from the page cache."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def read(paths: list[Path], into: memoryview, flags: int) -> tuple[float, float]:
    """Read each file into ``into``; return the MB/s and the CPU seconds per GB."""
    since, used = time.perf_counter(), time.process_time()
    for path in paths:
        descriptor, at = os.open(path, os.O_RDONLY | flags), 0
        while at < len(into):
            at += os.preadv(descriptor, [into[at:]], at)
        os.close(descriptor)
    size = len(paths) * len(into)
    seconds, cpu = time.perf_counter() - since, time.process_time() - used
    return size / seconds / 1e6, cpu / size * 1e9


def main() -> None:
    """Measure and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--files", type=int, default=46)
    parser.add_argument("--block", type=int, default=5_906_432, help="bytes of a file; a multiple of 4,096")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="accepted: the last line is always JSON")
    options = parser.parse_args()
    ways = {"page cache, cold": 0, "O_DIRECT": os.O_DIRECT}
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in (*ways, "page cache, warm")}
    into = memoryview(mmap.mmap(-1, options.block))  # aligned to a page, as O_DIRECT needs
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        paths = [Path(folder, str(number)) for number in range(options.files)]
        for path in paths:
            with path.open("wb") as file:
                file.write(os.urandom(options.block))
                file.flush()
                os.fsync(file.fileno())
        for _ in range(options.rounds):
            for way in random.sample(list(ways), 2):
                forget(paths)
                found[way].append(read(paths, into, ways[way]))
            read(paths, into, 0)
            found["page cache, warm"].append(read(paths, into, 0))
    result = {
        way: {
            "megabytes_per_second": round(statistics.median(rate for rate, _ in each)),
            "cpu_seconds_per_gigabyte": round(statistics.median(cpu for _, cpu in each), 3),
        }
        for way, each in found.items()
    }
    for way, figures in result.items():
        print(
            f"{way}: {figures['megabytes_per_second']:,} MB/s, {figures['cpu_seconds_per_gigabyte']} CPU s/GB"
        )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
