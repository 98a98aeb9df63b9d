"""Measure host memory of vLLM's parts that need no GPU, for the figures in engines/vllm/host.py.

- vLLM's weight iterators read two files of 384 MiB with tensors of 64 MiB (``--safetensors-load-strategy``,
  ``--load-format pt``). Measured are additional anonymous memory and mapped pages of the files. A second run
  in a memory cgroup with 200 MiB to spare shows that the process does not need the plan's page cache, and
  does need the memory that the plan counts.
- The engine core's block pool: bytes per block, and with a hash in the prefix index.
- The index of our disk tier: bytes per block, and with the learned order.

    python benchmarks/host_memory.py
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from memory_limit import Limit
from safetensors.torch import save_file
from vllm.model_executor.model_loader import weight_utils
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.block_pool import BlockPool

from tonnage.cache.disk.folder import NAMESPACE_BYTES
from tonnage.cache.disk.order import LearnedBlocks, compile_order

MIB = 1 << 20
FILES, TENSORS, TENSOR = 2, 6, 64 * MIB
ROOM = 200 * MIB
STRATEGIES = ("lazy", "eager", "prefetch", "pt")
BLOCKS = 400_000


def held() -> dict[str, int]:
    """Return the resident bytes of this process by kind."""
    lines = Path("/proc/self/status").read_text().splitlines()
    pairs = (line.split(":") for line in lines if line.startswith(("RssAnon", "RssFile")))
    return {name: int(value.split()[0]) * 1024 for name, value in pairs}


class PeakSampler:
    """A context manager that samples each kind of resident memory every 2 ms and keeps the maximum."""

    def __enter__(self) -> PeakSampler:
        self.before, self.over = held(), False
        self.most = dict(self.before)
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()
        return self

    def _watch(self) -> None:
        while not self.over:
            self.most = {name: max(size, self.most[name]) for name, size in held().items()}
            time.sleep(0.002)

    def __exit__(self, *_: object) -> None:
        self.over = True
        self.thread.join()


def forget(folder: Path) -> None:
    """Remove the files from the page cache, so that the next reader is charged for them."""
    for file in folder.iterdir():
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def read_weights(strategy: str, folder: Path) -> dict[str, int]:
    """Read all weights with ``strategy`` and return the additional memory in MiB."""
    forget(folder)
    target = torch.ones(TENSOR // 4)
    with PeakSampler() as peak:
        if strategy == "pt":
            found = weight_utils.pt_weights_iterator(sorted(map(str, folder.glob("*.bin"))), False)
        else:
            files = sorted(map(str, folder.glob("*.safetensors")))
            found = weight_utils.safetensors_weights_iterator(files, False, strategy)
        for _, tensor in found:
            target.copy_(tensor)
    more = {name: (size - peak.before[name]) // MIB for name, size in peak.most.items()}
    return {"anonymous_mib": more["RssAnon"], "mapped_mib": more["RssFile"]}


def block_pool() -> dict[str, float]:
    """Return the bytes per block of vLLM's block pool, unhashed and hashed."""
    gc.collect()
    before = held()["RssAnon"]
    pool = BlockPool(BLOCKS, True, 16)
    gc.collect()
    plain = held()["RssAnon"]
    for block in pool.blocks:
        key = kv_cache_utils.make_block_hash_with_group_id(kv_cache_utils.BlockHash(os.urandom(32)), 0)
        block.set_block_hash(key, 16)
        pool.cached_block_hash_to_block.insert(key, block)
    gc.collect()
    hashed = held()["RssAnon"]
    return {"bytes": round((plain - before) / BLOCKS), "hashed_bytes": round((hashed - before) / BLOCKS)}


def disk_index() -> dict[str, int]:
    """Return the bytes per block of a disk tier's index, without and with the learned order."""
    compile_order()
    gc.collect()
    before = held()["RssAnon"]
    # ids of a namespace and a hash, and bytes on disk, as in `tonnage.cache.disk.folder.Folder`
    blocks = OrderedDict((os.urandom(NAMESPACE_BYTES + 32), 1 << 20) for _ in range(BLOCKS))
    plain = held()["RssAnon"]
    order, ids = LearnedBlocks(BLOCKS), list(blocks)
    for start in range(0, BLOCKS, 100):
        request = ids[start : start + 100]
        for block in request:
            order.insert(block)
        order.finish(request, request, set())
    del ids
    gc.collect()
    learned = held()["RssAnon"]
    return {"bytes": round((plain - before) / BLOCKS), "learned_bytes": round((learned - before) / BLOCKS)}


def _answer(pipe: Connection, limit: Limit | None, ask: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    if limit is not None:
        limit.enter()  # memory allocated so far stays charged to the old cgroup
    pipe.send(ask(*arguments))


def in_child(ask: Callable[..., Any], *arguments: Any, room: int | None = None) -> Any:
    """Return the result of ``ask`` in a forked process that has imported everything; "killed" if out of memory.

    ``room`` is the limit of the process's memory cgroup in bytes.
    """
    limit = None if room is None else Limit(room)
    assert limit is None or limit.folder is not None, "no memory cgroup can be written here"
    fork = multiprocessing.get_context("fork")
    theirs, ours = fork.Pipe()
    process = fork.Process(target=_answer, args=(theirs, limit, ask, arguments))
    process.start()
    theirs.close()
    try:
        answer = ours.recv()
    except EOFError:
        answer = None
    process.join()
    if limit is not None:
        limit.close()
    assert process.exitcode in (0, -9), process.exitcode
    return "killed" if process.exitcode else answer


def main() -> None:
    """Measure everything and print one JSON object."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for i in range(FILES):
            tensors = {f"{i}.{j}": torch.ones(TENSOR // 4) for j in range(TENSORS)}
            save_file(tensors, folder / f"{i}.safetensors")
            torch.save(tensors, folder / f"{i}.bin")
        del tensors
        reading = {each: in_child(read_weights, each, folder) for each in STRATEGIES}
        within = {each: in_child(read_weights, each, folder, room=ROOM) for each in STRATEGIES}
    out = {
        "files": FILES,
        "file_mib": TENSORS * TENSOR // MIB,
        "tensor_mib": TENSOR // MIB,
        "reading": reading,
        "room_mib": ROOM // MIB,
        "within_room": within,
        "block": in_child(block_pool),
        "disk_index": in_child(disk_index),
    }
    print(json.dumps(out, indent=2))


if __name__ == "__main__":
    main()
