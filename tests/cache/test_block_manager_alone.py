"""The block manager without its features: a scheduler runs on it with a few lines of admission."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from kv_small import FULL, SLIDING

from tonnage.cache.admission.ledger import Reservations
from tonnage.cache.admission.policy import Policy
from tonnage.cache.admission.reservation import refusal, reserved_blocks
from tonnage.cache.admission.snapshot import RunningSnapshot
from tonnage.cache.admission.types import (
    AdmissionMode,
    AdmissionRequest,
    Admit,
    Decision,
    Head,
    Wait,
    WaitReason,
)
from tonnage.cache.block_manager import BlockManager
from tonnage.cache.blocks.state import Int64Array
from tonnage.cache.manager import KVCacheManager
from tonnage.cache.scheduler import Scheduler, Sequence
from tonnage.planner.model.layout import KVLayout

LIMITS = {"max_num_seqs": 6, "max_model_len": 64, "max_num_batched_tokens": 16, "hash_seed": 1}


class BySum:
    """Admission by the sum of all reservations, in the fewest lines."""

    mode, lookahead, auto, several_keys = AdmissionMode.NO_EVICT, 0, None, False

    def __init__(self, held: Reservations) -> None:
        self.held = held

    def decide_early(self, request: AdmissionRequest, head: Head | None = None) -> Decision:
        blocks, limits = reserved_blocks(request, self.held.limits), self.held.limits
        if never := refusal(request, limits):
            return never
        if self.held.sequences + request.n > limits.max_num_seqs:
            return Wait(WaitReason.SEQUENCES)
        short = self.held.reserved + blocks - limits.usable_blocks
        return Wait(WaitReason.BLOCKS, short) if short > 0 else Admit(blocks)

    def decide(self, request: AdmissionRequest, row: int, hit: int, head: Head | None = None) -> Decision:
        raise AssertionError("decided before the prefix cache was asked")

    def start_of(self, request: AdmissionRequest) -> Head:
        raise AssertionError("no request overtakes another")

    def grant(self, batch: Int64Array, ends: Int64Array) -> Int64Array:
        return ends

    def victim(self, snapshot: RunningSnapshot) -> int:
        raise AssertionError("all reservations fit")

    def choose(self, in_system: int) -> None:
        pass

    def ended(self, output_tokens: int, tenant: str = "", prompt_tokens: int = 1, max_tokens: int = 1) -> None:
        pass

    def ranking(self) -> Callable[[AdmissionRequest], tuple[int, float]]:
        raise AssertionError("one API key")


class Known(Sequence):
    """A sequence whose tokens are a list."""

    tokens: list[int]

    def token_ids(self) -> list[int]:
        return self.tokens


def known(prompt: list[int], most: int) -> Known:
    sequence = Known(prompt=len(prompt), max_tokens=most, arrival=0.0)
    sequence.tokens = list(prompt)
    return sequence


def run(scheduler: Scheduler[Known], seed: int) -> list[object]:
    """Serve random requests for 300 steps and return every decision, block table and count."""
    draw, seen = random.Random(seed), []
    for _ in range(300):
        if len(scheduler.waiting) < 8:
            prompt = [draw.randrange(2)] * draw.randrange(1, 30) + [
                draw.randrange(4) for _ in range(draw.randrange(9))
            ]
            scheduler.add(known(prompt, draw.randrange(1, 30)))
        step = scheduler.step()
        decisions = step.decisions()
        scheduler.computed(step.picked)
        tokens = [draw.randrange(4) for _ in step.drawing]
        scheduler.append(step.drawing, np.array(tokens, np.int32))
        for sequence, token in zip(step.drawing, tokens, strict=True):
            sequence.tokens.append(token)
            if sequence.generated == sequence.max_tokens:
                scheduler.end(sequence, sequence.generated)
        tables = [table.tolist() for table in scheduler.manager.tables]
        seen.append((decisions, tables, scheduler.manager.stats()))
    return seen


@pytest.mark.parametrize("groups", [(FULL,), (FULL, SLIDING)], ids=["full", "sliding"])
def test_minimal_block_manager_decides_like_the_full_one_with_no_evict_admission_and_lru_eviction(
    groups: tuple,
) -> None:
    layout = KVLayout(groups, 4, 1, kv_heads=1, head_size=8, dtype="float32", dtype_bytes=4)
    alone = BlockManager(layout, 40, admission=BySum, **LIMITS)
    full = KVCacheManager(layout, 40, policy=Policy(AdmissionMode.NO_EVICT), eviction="lru", **LIMITS)
    ours, theirs = (run(Scheduler(manager, budget=16), 3) for manager in (alone, full))
    assert ours == theirs
    assert ours[-1][2].hit_tokens > 0 < ours[-1][2].evictions


def test_minimal_block_manager_disables_prefix_caching_for_sliding_windows_only() -> None:
    layout = KVLayout((SLIDING,), 4, 1, kv_heads=1, head_size=8, dtype="float32", dtype_bytes=4)
    assert not BlockManager(layout, 40, admission=BySum, **LIMITS).prefix.enabled
    assert KVCacheManager(layout, 40, **LIMITS).prefix.enabled
