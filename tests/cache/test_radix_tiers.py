"""Tests of the model of SGLang's radix tree with a host tier."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from tonnage.cache.errors import CacheConfigError
from tonnage.cache.replay.radix_tiers import RadixTiers, hicache_hit_rate
from tonnage.cache.replay.trace import read_trace

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hicache_replay", ROOT / "benchmarks" / "hicache_replay.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def check_tree(tree: RadixTiers) -> None:
    """Raise AssertionError if a size or a count is wrong, or a node on the GPU has a parent elsewhere."""
    held: Counter[str] = Counter()
    todo = [tree._root]
    while todo:
        node = todo.pop()
        for first, child in node.children.items():
            assert child.parent is node
            assert child.keys[0] == first
            assert child.on_gpu or child.on_host
            assert node.on_gpu or not child.on_gpu
            assert not child.locked
            held["gpu"] += len(child.keys) * child.on_gpu
            held["host"] += len(child.keys) * child.on_host
            todo.append(child)
    assert held["gpu"] == tree._on_gpu <= tree.gpu_chunks
    assert held["host"] <= tree._on_host <= tree.host_chunks


def test_prefix_hits_of_random_prompts_equal_those_recorded_from_sglang(benchmark) -> None:
    recorded = json.loads((DATA / "hicache_worlds.json").read_text())
    for seed, hits in enumerate(recorded):
        prompts, gpu, host = benchmark.world(seed)
        tree, found = RadixTiers(gpu, host), 0
        for prompt in prompts:
            found += tree.serve(prompt)
            check_tree(tree)
        assert found == hits, f"world {seed}"


def test_host_tier_serves_prefixes_that_the_gpu_has_evicted() -> None:
    tree = RadixTiers(4, 100)
    assert [tree.serve(prompt) for prompt in ((1, 2, 3), (4, 5, 6), (1, 2, 3), (4, 5, 6))] == [0, 0, 3, 3]


def test_prompt_that_branches_off_hits_the_common_beginning() -> None:
    tree = RadixTiers(10, 10)
    assert [tree.serve(prompt) for prompt in ((1, 2, 3, 4), (1, 2, 9), (1, 2, 3, 4))] == [0, 2, 4]


def test_full_host_tier_evicts_a_whole_node_for_each_new_one() -> None:
    """SGLang evicts the length of the new node although a slot is free, so the oldest node goes."""
    tree = RadixTiers(3, 4)
    for prompt in ((1, 2, 3), (4, 5), (6,)):
        tree.serve(prompt)
    assert (tree.written, tree.evicted) == (6, 3)
    assert tree.serve((1, 2, 3)) == 0


def test_tier_or_pool_size_of_zero_chunks_is_rejected() -> None:
    with pytest.raises(CacheConfigError, match="each needs at least 1"):
        RadixTiers(5, 0)


def test_unlimited_tiers_hit_as_many_tokens_as_the_largest_lru_cache() -> None:
    trace = read_trace(DATA / "traces" / "mooncake_conversation_120.jsonl")
    assert hicache_hit_rate(trace, 10**6, 10**6) == pytest.approx(0.0343, abs=5e-5)
