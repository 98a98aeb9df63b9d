"""Random worlds over vLLM's scheduler, in each mode: blocks are conserved, each request has one answer.

``TONNAGE_WORLDS`` is the number of worlds in each mode: ``make test-worlds`` runs 1,000.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from vllm_steps import World, blocks_conserve, config, full, request, scheduler, sliding

from tonnage.cache.admission.policy import VLLM, Rule
from tonnage.server.engines.vllm.scheduler import TonnageScheduler

WORLDS = int(os.environ.get("TONNAGE_WORLDS", "12"))
CHUNK = 4  # worlds of one test
MODES = ("auto", "guaranteed", "predictive", "no_evict", "greedy")
GROUPS = ([full()], [full(), sliding(64)], [full(), sliding(64), sliding(32)])
MOST = 120  # tokens of an answer


@dataclass(frozen=True)
class Shape:
    """The shape of one random world: its groups, pool, mode and requests."""

    blocks: int
    groups: int
    asynchronous: bool
    priorities: bool
    adapters: int
    drafts: int
    caching: bool
    batched: int
    sequences: int

    @classmethod
    def drawn(cls, draw: random.Random) -> Shape:
        """Draw a shape; drafts come with full attention alone, as their windows are another bound in vLLM."""
        groups = draw.choice([0, 0, 1, 2])
        return cls(
            draw.choice([30, 50, 90]) * (groups + 1), groups, draw.random() < 0.5, draw.random() < 0.5,
            draw.choice([0, 0, 2]), draw.choice([0, 3, 7]) if groups == 0 else 0, draw.random() < 0.8,
            draw.choice([64, 100, 512]), draw.choice([4, 64]),
        )  # fmt: skip


def run_world(mode: str, seed: int) -> World:
    """Serve random requests, some aborted, and return the world after the last has ended."""
    draw = random.Random(f"worlds {mode} {seed}")
    shape = Shape.drawn(draw)
    made = config(
        shape.blocks + 1, mode=mode, length=1024, sequences=shape.sequences, batched=shape.batched,
        caching=shape.caching, asynchronous=shape.asynchronous, loras=shape.adapters, drafts=shape.drafts,
        policy="priority" if shape.priorities else "fcfs",
    )  # fmt: skip
    world = World(scheduler(TonnageScheduler, made, GROUPS[shape.groups]), law=blocks_conserve)
    if shape.drafts:
        world.drafts = draw
    if mode == "auto":  # all its rules, in any order
        rules = (VLLM, Rule(0.5), Rule(0.8))

        def any_rule(in_system: int, running: Callable[[], Any]) -> Rule:
            assert (running() >= 0).all()
            return draw.choice(rules)

        world.scheduler.admission.auto.rule = any_rule
    documents = [[draw.randrange(50_000) for _ in range(draw.randrange(20, 200))] for _ in range(3)]
    expected: dict[str, int] = {}
    aborted: set[str] = set()
    for number in range(24):
        id = f"r{number}"
        prompt = list(draw.choice(documents)) if draw.random() < 0.5 else []
        prompt += [draw.randrange(50_000) for _ in range(draw.randrange(1, 120))]
        expected[id] = 1 + min(MOST - 1, int(draw.expovariate(1 / 30)))
        adapter = draw.randrange(shape.adapters + 1)
        world.add(
            request(id, prompt, MOST, priority=draw.randrange(3), arrival=number, adapter=adapter), expected[id]
        )
        for _ in range(draw.choice([0, 0, 1, 5])):
            world.step()
        other = draw.choice(sorted(expected))
        if draw.random() < 0.1 and other in world.scheduler.requests:
            world.abort(other)
            aborted.add(other)
    world.run()
    assert world.scheduler.fallbacks == 0
    assert set(world.ended) | aborted == set(expected)
    for id, ended in world.ended.items():
        refused = ended.stop_reason is not None and str(ended.stop_reason).startswith("the request needs ")
        assert refused or world.produced[id] == expected[id] or id in aborted
    return world


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("first", range(0, WORLDS, CHUNK))
def test_each_request_ends_exactly_once_in_random_runs_of_tonnages_scheduler_in_vllm(
    mode: str, first: int
) -> None:
    for seed in range(first, min(first + CHUNK, WORLDS)):
        world = run_world(mode, seed)
        if mode in ("guaranteed", "no_evict"):
            assert world.preemptions == 0, f"world {seed} of {mode}"
