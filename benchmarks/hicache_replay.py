"""Compare the hits of our model of SGLang's HiCache with those of SGLang's own HiRadixCache, without a GPU.

    pip install --no-deps --target FOLDER sglang==0.5.9
    python benchmarks/hicache_replay.py TRACE... --sglang FOLDER --json --check
    python benchmarks/hicache_replay.py --sglang FOLDER --worlds 400 --check     random prompts, tiny pools

SGLang's radix tree with a host tier (mem_cache/hiradix_cache.py and radix_cache.py) runs unchanged. It decides
what is matched, written to the host, loaded back and evicted. Its pools and copies need CUDA. Stand-ins hand
out slots instead. A slot holds one chunk of the trace, which is one hash id.

Requests run one after the other, in order of the trace. Ours is `tonnage.cache.replay.radix_tiers`. The host
tier holds 5, 20 and 50 % of the trace's distinct chunks, and the GPU's pool a quarter of that (--hicache-ratio
4). ``lru`` has the hits of `tonnage replay --tiers`, whose pool and host tier evict single chunks in LRU order.

--check exits with 1 if hits differ. --write FILE stores SGLang's hits in the random worlds for the tests.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.abc
import importlib.machinery
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from tonnage.cache.replay.chunk_store import ChunkStore, ChunkUse
from tonnage.cache.replay.radix_tiers import RadixTiers
from tonnage.cache.replay.tiers import chunk_keys, chunk_tokens_of
from tonnage.cache.replay.trace import Trace, read_trace

SHARES, RATIO = (0.05, 0.2, 0.5), 4
# The modules that run as they are; every other module of SGLang is replaced by an empty one.
_OWN = ("hiradix_cache", "radix_cache", "evict_policy", "base_prefix_cache", "cache_init_params")


class _Empty(ModuleType):
    """A module whose every name is an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {})
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the few modules of `_OWN` in SGLang's folder, and an empty module for every other one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] != "sglang":
            return None
        if name.startswith("sglang.srt.mem_cache.") and name.rpartition(".")[2] in _OWN:
            file = self.folder.joinpath(*name.split(".")).with_suffix(".py")
            return importlib.util.spec_from_file_location(name, file)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the module is empty."""


class _Slots:
    """A pool of numbered slots, in place of SGLang's pools of tensors."""

    device = "cpu"

    def __init__(self, count: int) -> None:
        self.count = count
        self.clear()

    def clear(self) -> None:
        self.unused = list(range(self.count))

    def alloc(self, count: int) -> Any:
        import torch

        if count > len(self.unused):
            return None
        taken = self.unused[len(self.unused) - count :]
        del self.unused[len(self.unused) - count :]
        return torch.tensor(taken, dtype=torch.int64)

    def free(self, slots: Any) -> None:
        self.unused += slots.tolist()


class _Done:
    """The event of a copy that has ended."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Return at once."""


class _Controller:
    """HiCacheController without its copies: every transfer has ended when it is asked for."""

    write_policy = "write_through"  # the default of 0.5.9

    def __init__(self, device: _Slots, host: _Slots, *_: Any, **__: Any) -> None:
        self.mem_pool_device_allocator, self.mem_pool_host = device, host
        self.ack_write_queue: list[Any] = []
        self.ack_load_queue: list[Any] = []
        self.evicted = self.written = 0

    def reset(self) -> None:
        self.ack_write_queue.clear()
        self.ack_load_queue.clear()

    def write(self, device_indices: Any, node_id: int) -> Any:
        slots = self.mem_pool_host.alloc(len(device_indices))
        if slots is not None:
            self.written += len(slots)
            self.ack_write_queue.append((None, _Done(), [node_id]))
        return slots

    def load(self, host_indices: Any, node_id: int) -> Any:
        slots = self.mem_pool_device_allocator.alloc(len(host_indices))
        if slots is not None:
            self.ack_load_queue.append((None, _Done(), [node_id]))
        return slots

    def evict_device(self, slots: Any) -> int:
        self.mem_pool_device_allocator.free(slots)
        return len(slots)

    def evict_host(self, slots: Any) -> int:
        self.mem_pool_host.free(slots)
        self.evicted += len(slots)
        return len(slots)


def load_sglang(folder: Path) -> SimpleNamespace:
    """Import SGLang's radix trees with empty modules in place of what needs a GPU."""
    import torch

    if not (file := folder / "sglang/srt/mem_cache/hiradix_cache.py").exists():
        raise SystemExit(f"{file} does not exist: pip install --no-deps --target {folder} sglang==0.5.9")
    sys.meta_path.insert(0, _Finder(folder))
    torch.distributed.get_world_size = lambda group=None: 1  # type: ignore[assignment, misc]
    base = importlib.import_module("sglang.srt.mem_cache.base_prefix_cache")
    tree = importlib.import_module("sglang.srt.mem_cache.radix_cache")
    hierarchical = importlib.import_module("sglang.srt.mem_cache.hiradix_cache")
    params = importlib.import_module("sglang.srt.mem_cache.cache_init_params")
    return SimpleNamespace(
        **{**vars(base), **vars(tree), **vars(hierarchical), **vars(params)}, tree=hierarchical
    )


def hiradix(sglang: SimpleNamespace, device: int, host: int) -> Any:
    """Return a HiRadixCache over ``device`` and ``host`` slots."""
    pool = _Slots(device)
    pool.get_kvcache = sglang.tree.MHATokenToKVPool  # type: ignore[attr-defined]
    sglang.tree.MHATokenToKVPoolHost = lambda *_, **__: _Slots(host)
    sglang.tree.HiCacheController = _Controller
    arguments = SimpleNamespace(
        hicache_io_backend="kernel", hicache_mem_layout="layer_first", disable_hicache_numa_detect=True,
        hicache_ratio=0, hicache_size=0, hicache_storage_backend=None, extra_metric_labels=None,
        hicache_storage_backend_extra_config=None, hicache_storage_prefetch_policy="timeout",
        hicache_write_policy="write_through", served_model_name="",
    )  # fmt: skip
    cache = sglang.HiRadixCache(sglang.CacheInitParams(False, None, pool, 1), arguments)
    cache.load_back_threshold = 1  # SGLang's is 10 tokens, less than a chunk
    return cache


def hits_of_sglang(sglang: SimpleNamespace, prompts: Sequence[tuple[int, ...]], device: int, host: int) -> int:
    """Return the chunks that SGLang's tree finds on the GPU or loads from the host, over all prompts."""
    import torch

    cache, hits = hiradix(sglang, device, host), 0
    pool = cache.token_to_kv_pool_allocator
    for prompt in prompts:
        key = sglang.RadixKey(list(prompt[:device]))
        if not len(key):
            continue
        found = cache.match_prefix(sglang.MatchPrefixParams(key=key))
        held, node = found.device_indices, found.last_device_node
        if found.host_hit_length:
            loaded, node = cache.init_load_back(found.last_host_node, found.host_hit_length)
            held = torch.cat([held, loaded])
        hits += len(held)
        cache.inc_lock_ref(node)
        left = len(key) - len(held)
        if left > len(pool.unused):
            cache.evict(sglang.EvictParams(num_tokens=left - len(pool.unused)))
        fresh = pool.alloc(left)
        assert fresh is not None
        cache.insert(sglang.InsertParams(key=key, value=torch.cat([held, fresh])))
        cache.dec_lock_ref(node)
        cache.check_hicache_events()
        cache.match_prefix(sglang.MatchPrefixParams(key=key))
    return hits


def hits_of_chunks(prompts: Sequence[tuple[int, ...]], device: int, host: int) -> int:
    """Return the chunks that a pool of LRU order finds or loads from the replay's host tier."""
    pool, tier, hits = ChunkStore(device), ChunkStore(host), 0
    for prompt in prompts:
        keys = prompt[:device]
        uses = ChunkUse(keys), ChunkUse(keys)
        found = 0
        while found < len(keys) and (pool.lookup(keys[found]) or tier.lookup(keys[found])):
            found += 1
        hits += found
        for store, use in zip((pool, tier), uses, strict=True):
            new = store.store(use, 0, len(keys))
            store.written(new or [])
            store.finish(use)
    return hits


def compare(sglang: SimpleNamespace, trace: Trace) -> list[dict[str, Any]]:
    """Return the hit rates of both trees for each size of the tier."""
    known: dict[tuple[int, int], int] = {}
    prompts = [chunk_keys(request, known) for request in trace.requests]
    size, tokens = chunk_tokens_of(trace), sum(request.prompt_tokens for request in trace.requests)
    rows = []
    for share in SHARES:
        host = max(RATIO, int(share * len(known)))
        device = host // RATIO
        tree = RadixTiers(device, host)
        counts = {
            "sglang": hits_of_sglang(sglang, prompts, device, host),
            "ours": sum(map(tree.serve, prompts)),
            "lru": hits_of_chunks(prompts, device, host),
            "without_tier": hits_of_chunks(prompts, device, 1),
        }
        rows.append(
            {"trace": trace.name, "requests": len(prompts), "host_chunks": host, "gpu_chunks": device,
             "equal": counts["sglang"] == counts["ours"],
             **{name: round(count * size / tokens, 5) for name, count in counts.items()}}
        )  # fmt: skip
    return rows


def world(seed: int) -> tuple[list[tuple[int, ...]], int, int]:
    """Return random prompts that share beginnings, and the chunks of a small GPU pool and a small host tier."""
    draw = random.Random(seed)
    heads = [
        tuple(draw.randrange(10**6) for _ in range(draw.randint(1, 12))) for _ in range(draw.randint(1, 6))
    ]
    prompts: list[tuple[int, ...]] = []
    for _ in range(draw.randint(20, 200)):
        before = draw.choice(prompts) if prompts and draw.random() < 0.5 else draw.choice(heads)
        new = tuple(draw.randrange(10**6) for _ in range(draw.randint(0, 8)))
        prompts.append(before[: draw.randint(1, len(before))] + new)
    return prompts, draw.randint(5, 60), draw.randint(1, 120)


def compare_worlds(sglang: SimpleNamespace, worlds: int) -> list[dict[str, Any]]:
    """Return the hits of both trees in each of ``worlds`` random worlds."""
    rows = []
    for seed in range(worlds):
        prompts, device, host = world(seed)
        tree = RadixTiers(device, host)
        theirs, ours = hits_of_sglang(sglang, prompts, device, host), sum(map(tree.serve, prompts))
        rows.append({"seed": seed, "sglang": theirs, "ours": ours, "equal": theirs == ours})
    return rows


def main() -> int:
    """Print the comparison; return 1 with --check if hits differ."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("trace", type=Path, nargs="*")
    parser.add_argument("--sglang", type=Path, required=True, help="folder with SGLang's sources")
    parser.add_argument("--limit", type=int, help="requests of each trace")
    parser.add_argument("--worlds", type=int, default=0, help="number of random worlds")
    parser.add_argument("--write", type=Path, help="store SGLang's hits in the random worlds in this file")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--check", action="store_true", help="exit code 1 if hits differ")
    arguments = parser.parse_args()
    if not arguments.trace and not arguments.worlds:
        parser.error("nothing to compare: give a trace or --worlds N")
    sglang = load_sglang(arguments.sglang)
    rows = [row for path in arguments.trace for row in compare(sglang, read_trace(path, limit=arguments.limit))]
    worlds = compare_worlds(sglang, arguments.worlds)
    if arguments.write:
        arguments.write.write_text(json.dumps([row["sglang"] for row in worlds]) + "\n")
    equal = sum(row["equal"] for row in worlds)
    if arguments.json:
        print(json.dumps({"rows": rows, "worlds": len(worlds), "equal_worlds": equal}))
    else:
        for row in rows:
            print(*(f"{name} {value}" for name, value in row.items()), sep="  ")
        if worlds:
            print(f"random worlds with equal hits: {equal} of {len(worlds)}")
    return int(arguments.check and not all(row["equal"] for row in rows + worlds))


if __name__ == "__main__":
    raise SystemExit(main())
