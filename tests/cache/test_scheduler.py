"""A scheduler step in which the mode's own law is broken: it raises instead of a silent preemption."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import pytest
from invariants import check_invariants

from tonnage.cache.admission import AdmissionMode, Policy
from tonnage.cache.errors import InvariantViolation
from tonnage.cache.manager import KVCacheManager
from tonnage.cache.scheduler import Scheduler, Sequence
from tonnage.planner.model.layout import KVGroup, KVLayout

LAYOUT = KVLayout((KVGroup("full", (0,)),), 16, 1, 1, 8, "float32", 4)


@dataclass(slots=True, eq=False, kw_only=True)
class Numbered(Sequence):
    def token_ids(self) -> list[int]:
        return [self.id] * self.length


def manager_of(policy: Policy | None) -> KVCacheManager:
    return KVCacheManager(
        LAYOUT, 33, max_num_seqs=4, max_model_len=400, max_num_batched_tokens=64, policy=policy
    )


@pytest.mark.parametrize("mode", list(AdmissionMode))
def test_scheduler_without_progress_preempts_only_in_modes_that_allow_preemption(
    mode: AdmissionMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = manager_of(Policy(mode))
    scheduler: Scheduler[Numbered] = Scheduler(manager, budget=64)
    scheduler.add(Numbered(prompt=20, max_tokens=60, arrival=0.0))
    scheduler.computed(scheduler.step().picked)
    scheduler.append(list(scheduler.running.values()), [5])

    def nothing(sequence_ids: Rows[int], num_tokens: Rows[int]) -> np.ndarray:
        return np.array([scheduler.running[id].computed for id in sequence_ids], np.int64)

    monkeypatch.setattr(manager, "grant", nothing)
    if mode in (AdmissionMode.GUARANTEED, AdmissionMode.NO_EVICT):
        with pytest.raises(InvariantViolation, match=f"all running sequences stall in {mode} mode"):
            scheduler.step()
        assert scheduler.counters.preemptions == 0
    else:
        step = scheduler.step()
        assert ([s.id for s in step.preempted], step.admitted, step.picked) == ([0], [], [])
        assert manager.stats().used == 0
    check_invariants(manager)


def test_default_admission_policy_never_preempts_a_sequence() -> None:
    scheduler: Scheduler[Numbered] = Scheduler(manager_of(None), budget=64)
    admitted: list[int] = []
    for _ in range(2):
        scheduler.add(Numbered(prompt=200, max_tokens=120, arrival=0.0))  # 20 blocks of 32
    for _ in range(4):  # the prompt in chunks of 64; both prompts would fit
        step = scheduler.step()
        admitted += [s.id for s in step.admitted]
        scheduler.computed(step.picked)
    assert (scheduler.mode, admitted) == (AdmissionMode.NO_EVICT, [0])
