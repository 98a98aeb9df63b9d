"""The chapter docs/mechanism.md runs, and makes the same decisions as the block manager on random steps."""

from __future__ import annotations

import doctest
import random
import re
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import documented
import numpy as np
import pytest

from tonnage.cache.admission import AdmissionMode, Policy
from tonnage.cache.admission.forecast import LengthForecast
from tonnage.cache.blocks.state import Int64Array
from tonnage.cache.manager import KVCacheManager
from tonnage.cache.scheduler import Scheduler, Sequence
from tonnage.planner.model.layout import KVGroup, KVLayout

PAGE = (documented.ROOT / "docs/mechanism.md").read_text()
BLOCK_SIZE, NUM_BLOCKS, BUDGET, MAX_NUM_SEQS, MAX_MODEL_LEN = 4, 24, 24, 8, 96


@pytest.fixture(scope="module")
def mechanism() -> Any:
    module = ModuleType("mechanism")
    sys.modules["mechanism"] = module  # dataclasses look their module up
    for code in re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        exec(code, module.__dict__)
    yield module
    del sys.modules["mechanism"]


def test_documentation_of_the_mechanism_has_at_most_300_lines_of_code() -> None:
    code = "".join(re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
    assert sum(bool(line.strip()) for line in code.splitlines()) <= 300


def test_code_in_the_documentation_of_the_mechanism_prints_the_shown_output(
    mechanism: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    examples = doctest.DocTestParser().get_doctest(PAGE, dict(mechanism.__dict__), "mechanism.md", None, 0)
    assert len(examples.examples) >= 10
    assert doctest.DocTestRunner().run(examples).failed == 0, capsys.readouterr().out


@dataclass(slots=True, eq=False, kw_only=True)
class Known(Sequence):
    """A sequence whose tokens are listed."""

    tokens: list[int]

    def token_ids(self) -> list[int]:
        return self.tokens


def prompt_of(draw: random.Random) -> list[int]:
    """Return a prompt that begins like some others: a system prompt, a document, own tokens."""
    if draw.random() < 0.85:  # equal prompts at the same time: duplicate blocks are merged
        return [draw.randrange(200, 202)] * 21
    system, document = draw.randrange(3), draw.randrange(4)
    tokens = [system] * draw.choice((0, 8, 16)) + [10 + document] * draw.choice((0, 4, 11))
    return tokens + [draw.randrange(100, 104) for _ in range(draw.randrange(1, 40))]


def third_of(output_left: Int64Array) -> Int64Array:
    """Return the chapter's forecast of the remaining output."""
    return np.maximum(1, output_left // 3).astype(np.int64)


@pytest.mark.parametrize("seed", [0, 4])
def test_documented_mechanism_decides_like_the_block_manager_on_1000_random_steps(
    mechanism: Any, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    monkeypatch.setattr(LengthForecast, "left", lambda self, output, left, keys=None: third_of(left))
    layout = KVLayout((KVGroup("full", (0,)),), BLOCK_SIZE, 1, 1, 8, "float32", 4)
    manager = KVCacheManager(
        layout, NUM_BLOCKS, max_num_seqs=MAX_NUM_SEQS, max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=BUDGET, policy=Policy(AdmissionMode.GUARANTEED), eviction="lru",
    )  # fmt: skip
    real: Scheduler[Known] = Scheduler(manager, budget=BUDGET, lookahead=0)
    plain = mechanism.Scheduler(NUM_BLOCKS, BLOCK_SIZE, BUDGET, MAX_NUM_SEQS, MAX_MODEL_LEN)
    exact, exact_counts = mechanism.grant_exactly, []
    monkeypatch.setattr(mechanism, "grant_exactly", lambda *state: exact_counts.append(1) or exact(*state))
    wanted: dict[int, int] = {}
    hits = stalls = rejected = 0
    for number in range(1000):
        for _ in range(draw.choice((0, 0, 0, 0, 3)) if len(plain.waiting) < 20 else 0):
            prompt, most = prompt_of(draw), draw.choice((1, 5, 30, 60))
            sequence = Known(prompt=len(prompt), max_tokens=most, arrival=float(number), tokens=prompt)
            real.add(sequence)
            wanted[sequence.id] = draw.randrange(1, most + 1)
            plain.waiting.append(mechanism.Request(sequence.id, prompt, most))
        step = real.step()
        plain.step()
        decisions = step.decisions()
        assert decisions.chunks == tuple((each.id, chunk) for each, chunk in plain.chunks.items()), number
        assert decisions.admitted == tuple(each.id for each in plain.admitted), number
        assert decisions.refused == tuple(each.id for each in plain.rejected), number
        assert {each.id for each in step.stalled} == {each.id for each in plain.stalled}, number
        assert not decisions.preempted
        hits += sum(each.cached for each in step.admitted)
        stalls += len(step.stalled)
        rejected += len(step.refused)
        new = {each.id: draw.randrange(100, 104) for each in step.drawing}
        real.computed(step.picked)
        real.append(step.drawing, np.array([*new.values()], np.int32))
        for each in step.drawing:
            each.tokens = [*each.tokens, new[each.id]]
        assert {each.id for each in plain.finish(lambda request: new[request.id])} == set(new)  # noqa: B023
        for each in [each for each in step.drawing if each.generated == wanted[each.id]]:
            real.end(each, each.generated)
            plain.end(next(request for request in plain.running if request.id == each.id))
        stats, pool = manager.stats(), plain.pool
        assert (stats.used, stats.cached, stats.free) == (pool.used, pool.cached, len(pool.free)), number
        assert stats.evictions == pool.evictions, number
        for request in plain.running:
            row = manager.tables[0][manager.row(request.id), : len(request.table)]
            assert row.tolist() == request.table, number
    seen = hits, stalls, rejected, pool.evictions, len(exact_counts)
    assert min(seen) > 0, seen
