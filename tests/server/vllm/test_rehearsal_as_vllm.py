"""Tests of rehearsals against vLLM's own scheduler and block pool, with the same requests and clock."""

from __future__ import annotations

import random

import numpy as np
import pytest
from vllm.v1.core.sched.scheduler import Scheduler
from vllm_steps import World, config, request, scheduler

from tonnage.cache.admission.cost import StepCost
from tonnage.cache.admission.policy import VLLM
from tonnage.cache.admission.rehearsal import Engine, Load, rehearse

BLOCKS, BLOCK, BATCHED, SEATS, MOST = 120, 16, 512, 64, 300
COST = StepCost(0.017, 0.001, 0.001, 0.0)


def served(prompts: list[int], outputs: list[int], clients: int) -> tuple[int, int, float]:
    """Serve the requests with vLLM's scheduler; return its steps, preemptions and seconds by ``COST``."""
    made = config(BLOCKS + 1, length=1024, sequences=SEATS, batched=BATCHED, asynchronous=False)
    world, seconds, added = World(scheduler(Scheduler, made)), 0.0, 0
    while len(world.ended) < len(outputs):
        while added < len(outputs) and added - len(world.ended) < clients:
            draw = random.Random(added)
            prompt = [draw.randrange(50_000) for _ in range(prompts[added])]
            world.add(request(f"r{added}", prompt, MOST), outputs[added])
            added += 1
        step = world.step()
        tokens, sequences = step.total_num_scheduled_tokens, len(step.num_scheduled_tokens)
        seconds += COST.seconds(tokens - sequences, sequences, 0)
    return world.steps, world.preemptions, seconds


@pytest.mark.parametrize("seed", range(3))
def test_simulation_of_vllms_admission_rule_equals_vllms_real_scheduler(seed: int) -> None:
    draw = random.Random(seed)
    prompts = [draw.randrange(10, 150) for _ in range(150)]
    outputs = [1 + min(MOST - 1, int(draw.expovariate(1 / 80))) for _ in prompts]
    _, preemptions, seconds = served(prompts, outputs, 40)
    load = Load(np.array(prompts), np.array(outputs), np.full(len(prompts), MOST), 40)
    outcome = rehearse(load, Engine(BLOCKS, BLOCK, BATCHED, SEATS), COST, VLLM)
    assert preemptions > 20
    assert outcome.preemptions == pytest.approx(preemptions, rel=0.1)
    assert outcome.tokens_per_second == pytest.approx(sum(outputs) / seconds, rel=0.02)
