"""Limits on what one request's grammar may do to the engine and to other requests, on the hf engine.

tests/server/vllm/served/test_grammars.py has the remaining tests of vLLM's trials. The engine's loop runs in
the test, step by step; grammars are compiled in their own process, as in a server.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from hostile_grammars import CHAIN, HOSTILE
from invariants import check_invariants
from serving import PATIENCE

from tonnage.planner.deployment import Deployment
from tonnage.planner.planning.build import make_plan
from tonnage.server.demo.model import ensure_demo
from tonnage.server.engines.base import Capabilities
from tonnage.server.engines.chunk import Chunk
from tonnage.server.engines.errors import EngineDead
from tonnage.server.engines.fake import FakeEngine
from tonnage.server.engines.grammars import cache, masks, memory
from tonnage.server.engines.grammars.library import GrammarError
from tonnage.server.engines.hf.child import EngineLoop
from tonnage.server.engines.hf.grammars import GrammarCompiler
from tonnage.server.engines.hf.messages import Abort
from tonnage.server.engines.request import GenerationRequest, SamplingParams
from tonnage.server.engines.vllm.checked_grammar import CheckedGrammar
from tonnage.server.engines.vllm.grammar_checks import GrammarChecks
from tonnage.server.text.grammar import MAX_BYTES, Grammar

SETTINGS = Deployment(
    dtype="float32",  # no kernels to compile
    kv_cache_memory_bytes=64 << 20,
    max_model_len=512,
    max_num_seqs=8,
    max_num_batched_tokens=64,
)
needs_xgrammar = pytest.mark.skipif(not find_spec("xgrammar"), reason="xgrammar is not installed (extra vllm)")
DIGITS = Grammar("regex", "[0-9]{30}")


def request(name: str, grammar: Grammar | None = None, *, n: int = 1, tenant: str = "", tokens: int = 4):
    params = SamplingParams(max_tokens=tokens, temperature=0.0, stop_token_ids=(2,), grammar=grammar)
    return GenerationRequest(name, (5, 6, 7), params, n=n, tenant=tenant)


def until(loop: EngineLoop, done: Callable[[list[Chunk]], bool]) -> list[Chunk]:
    chunks: list[Chunk] = []
    deadline = time.monotonic() + PATIENCE
    while not done(chunks):
        assert time.monotonic() < deadline
        chunks += loop.step()
        check_invariants(loop.scheduler.manager)
    return chunks


def tokens_of(chunks: list[Chunk], name: str) -> int:
    return sum(len(chunk.token_ids) for chunk in chunks if chunk.request_id == name)


@pytest.fixture(scope="module")
def loop() -> Iterator[EngineLoop]:
    ensure_demo()
    ours, theirs = Pipe()
    with ours, theirs:
        yield EngineLoop(make_plan("demo", SETTINGS), theirs, 1)


@pytest.fixture
def trial(loop: EngineLoop) -> psutil.Process:
    """Return the process that compiles grammars on trial."""
    return psutil.Process(loop.grammars.pid)


@pytest.mark.parametrize("name", HOSTILE)
def test_grammar_that_exhausts_time_or_memory_does_not_stop_the_engine(loop: EngineLoop, name: str) -> None:
    """It is served within the step's budget, or refused as its client's fault; others are served."""
    assert loop.add(request("hostile", HOSTILE[name], n=4)) == []
    loop.add(request("victim", tokens=20))
    chunks = until(loop, lambda chunks: loop.idle)
    ended = [chunk for chunk in chunks if chunk.request_id == "hostile" and chunk.finish_reason]
    assert len(ended) == 4
    assert all(chunk.finish_reason != "error" or (chunk.refused and chunk.error) for chunk in ended)
    assert tokens_of(chunks, "victim") == 20
    loop.add(request("digits", DIGITS))
    assert tokens_of(until(loop, lambda chunks: loop.idle), "digits") == 4


def test_grammar_compilation_blocks_no_other_request_and_stops_on_disconnect(
    loop: EngineLoop, trial: psutil.Process
) -> None:
    """However long that takes: here for ever, because the process that does it is stopped."""
    loop.add(request("first", DIGITS))
    until(loop, lambda chunks: loop.idle)
    trial.suspend()
    try:
        grammar = Grammar("regex", "[0-9]{29}")
        loop.add(request("asks", grammar, n=2))
        loop.add(request("known", DIGITS, tokens=8))
        loop.add(request("victim", tokens=20))
        chunks = until(loop, lambda chunks: tokens_of(chunks, "victim") == 20)
        assert {chunk.request_id for chunk in chunks} <= {"victim", "known"}
        assert not loop.idle
        assert [(c.index, c.finish_reason) for c in loop.abort(Abort("asks"))] == [(0, "abort"), (1, "abort")]
        until(loop, lambda chunks: loop.idle)
    finally:
        trial.resume()
    loop.add(request("again", grammar))
    assert tokens_of(until(loop, lambda chunks: loop.idle), "again") == 4


def test_only_sequences_whose_grammar_masks_exceed_the_time_budget_of_a_step_are_ended(
    loop: EngineLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masks, "STEP_SECONDS", -1.0)
    loop.add(request("slow", DIGITS, n=3, tokens=20))
    loop.add(request("victim", tokens=20))
    chunks = until(loop, lambda chunks: loop.idle)
    ended = [chunk for chunk in chunks if chunk.request_id == "slow" and chunk.finish_reason]
    assert [(chunk.finish_reason, chunk.refused) for chunk in ended] == [("error", True)] * 3
    assert all("too slow" in (chunk.error or "") for chunk in ended)
    assert tokens_of(chunks, "slow") == 3  # the first mask of each came with the grammar
    assert tokens_of(chunks, "victim") == 20


def test_only_sequences_whose_grammars_exceed_the_memory_limit_are_ended(
    loop: EngineLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masks, "HELD_BYTES", -1)
    loop.add(request("large", DIGITS, tokens=20))
    loop.add(request("victim", tokens=20))
    chunks = until(loop, lambda chunks: loop.idle)
    (ended,) = [chunk for chunk in chunks if chunk.request_id == "large" and chunk.finish_reason]
    assert (ended.finish_reason, ended.refused) == ("error", True)
    assert "MiB" in (ended.error or "")
    assert tokens_of(chunks, "victim") == 20


@dataclass
class Timed:
    """A matcher whose mask takes ``seconds``."""

    seconds: float
    due: bool = True
    compiled: object = None
    filled: bool = False

    def fill(self) -> None:
        self.filled = True


def test_tenants_share_the_grammar_mask_budget_of_a_step_in_rotation() -> None:
    held = replace_held()
    slow = [Timed(masks.STEP_SECONDS * 0.6, compiled=held) for _ in range(6)]
    quick = [Timed(masks.STEP_SECONDS * 0.01, compiled=held) for _ in range(3)]
    drawing = [("one", matcher) for matcher in slow] + [("other", matcher) for matcher in quick]
    errors = masks.fill(drawing)  # type: ignore[arg-type]
    assert all(matcher.filled for matcher in quick)
    assert [matcher.filled for matcher in slow] == [True, True, False, False, False, False]
    assert sorted(errors) == [2, 3, 4, 5]


@dataclass
class Waits:
    """llguidance's matcher, where other processes have the processor for a while."""

    matcher: Any

    def compute_bitmask(self) -> bytes:
        time.sleep(0.06)
        found: bytes = self.matcher.compute_bitmask()
        return found

    def is_error(self) -> bool:
        return bool(self.matcher.is_error())


def test_grammar_budget_counts_cpu_time_not_wall_time(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masks, "STEP_SECONDS", 0.05)
    compiler.ask(request("digits", DIGITS))
    assert told(compiler, 1) == ["digits"]
    drawing = [("one", compiler.matcher(DIGITS, (2,))) for _ in range(3)]
    for _, matcher in drawing:
        matcher._bits, matcher._matcher = None, Waits(matcher._matcher)
    assert masks.fill(drawing) == {}
    assert not any(matcher.due for _, matcher in drawing)


def replace_held() -> object:
    @dataclass
    class Held:
        held: int = 0

    return Held()


@pytest.fixture
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(ensure_demo(), 49152)
    yield made
    made.close()


def told(compiler: GrammarCompiler, count: int) -> list[str]:
    """Names of the next so many requests whose grammar is compiled or refused."""
    names: list[str] = []
    while len(names) < count:
        assert wait([compiler.fileno()], PATIENCE)
        names += [outcome.request_id for outcome in compiler.outcomes()]
    return names


def test_slow_grammars_of_one_tenant_do_not_delay_another(compiler: GrammarCompiler) -> None:
    for letter in "abc":
        compiler.ask(request(f"slow {letter}", Grammar("grammar", CHAIN.format(letter)), tenant="one"))
    compiler.ask(request("simple", DIGITS, tenant="other"))
    names = told(compiler, 2)
    assert "simple" in names
    for letter in "bc":  # a disconnected client is not waited for
        compiler.cancel(f"slow {letter}")
    compiler.ask(request("last", Grammar("regex", "[a-f]"), tenant="one"))
    assert told(compiler, 1) == ["last"]


def test_rejected_grammar_is_not_compiled_again(compiler: GrammarCompiler) -> None:
    compiler.ask(request("first", Grammar("grammar", CHAIN.format("a"))))
    assert told(compiler, 1) == ["first"]
    trial = psutil.Process(compiler.pid)
    trial.suspend()  # whatever is tried now is not answered
    compiler.ask(request("second", Grammar("grammar", CHAIN.format("a"))))
    assert told(compiler, 1) == ["second"]
    trial.resume()


def tag(name: str) -> Grammar:
    """Return the structural tag of a strict function, in the form that vLLM's hermes tool parser requests."""
    arguments = {"type": "object", "properties": {name: {"type": "string"}}, "required": [name]}
    begin = '<tool_call>\n{"name": "f", "arguments": '
    content = {"type": "json_schema", "json_schema": arguments}
    tags = [{"type": "tag", "begin": begin, "content": content, "end": "}\n</tool_call>"}]
    form = {"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": tags}
    return Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": form}))


@needs_xgrammar
def test_number_of_cached_structural_tags_is_bounded(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "CACHE_BYTES", 200_000)  # one takes 45,000
    gc.collect()  # grammars of earlier tests
    before = memory.held_bytes()
    for at in range(12):
        compiler.ask(request(f"asks {at}", tag(f"field{at}")))
    told(compiler, 12)
    assert 40_000 < memory.held_bytes() - before <= 200_000
    compiler.matcher(tag("field0"), (2,)).mask(torch.zeros(49152))


@needs_xgrammar
def test_compile_error_of_a_structural_tag_is_reported_with_its_field(tmp_path: Path) -> None:
    compiler = GrammarCompiler(folder_with(tmp_path, **{"tokenizer_config.json": "[]"}), 49152)
    compiler.ask(request("asks", tag("field")))
    assert wait([compiler.fileno()], PATIENCE)
    (outcome,) = compiler.outcomes()
    assert isinstance(outcome.error, GrammarError)
    assert outcome.error.field == "structural_tag"
    compiler.close()


def strict(schema: object) -> Grammar:
    """Return a structural tag with a strict function whose parameters are ``schema``."""
    found = json.loads(tag("field").text)
    found["format"]["tags"][0]["content"]["json_schema"] = schema
    return Grammar("structural_tag", json.dumps(found))


async def test_every_grammar_is_compiled_in_a_separate_process_before_vllm_gets_it() -> None:
    """The API process's side, without vLLM."""
    checks = GrammarChecks(ensure_demo())
    assert await checks.check(request("plain")) is None
    checked = await checks.check(request("digits", DIGITS, tenant="one"))
    assert checked is not None
    assert CheckedGrammar.decode(checked.encode()) == checked
    assert (checked.grammar.kind, checked.tenant) == ("regex", "one")
    for grammar in (
        Grammar("regex", "((("),
        HOSTILE["properties"],
        strict(json.loads(HOSTILE["properties"].text)),
    ):
        with pytest.raises(GrammarError) as told:
            await checks.check(request("at fault", grammar))
        assert told.value.field == grammar.kind
    assert (await checks.check(request("strict", tag("field")))) is not None
    checks.close()


async def test_trial_compilation_of_a_grammar_stops_on_disconnect_and_reports_a_kill() -> None:
    checks = GrammarChecks(ensure_demo())
    trial = psutil.Process(checks.pid)
    trial.suspend()
    task = asyncio.create_task(checks.check(request("hangs up", Grammar("grammar", CHAIN.format("a")))))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    trial.resume()
    assert await checks.check(request("next", DIGITS)) is not None
    trial.suspend()
    lost = asyncio.create_task(checks.check(request("lost", Grammar("regex", "[a-f]"))))
    await asyncio.sleep(0.1)
    trial.kill()
    with contextlib.suppress(EngineDead):  # it came to the one that was killed, or to the next
        await lost
    assert await checks.check(request("after", Grammar("regex", "[a-e]"))) is not None
    trial = psutil.Process(checks.pid)
    trial.suspend()
    waits = asyncio.create_task(checks.check(request("waits", Grammar("regex", "[a-d]"))))
    await asyncio.sleep(0.1)
    checks.close()  # the engine is stopped, or started again
    with pytest.raises(EngineDead):
        await waits
    with pytest.raises(EngineDead):
        await checks.check(request("late", DIGITS))
    await asyncio.to_thread(trial.wait, PATIENCE)  # no process is left, stopped as it is


def test_killed_process_of_trial_grammar_compilation_is_replaced(compiler: GrammarCompiler) -> None:
    compiler.ask(request("before", DIGITS))
    assert told(compiler, 1) == ["before"]
    trial = psutil.Process(compiler.pid)
    trial.suspend()
    compiler.ask(request("during", Grammar("regex", "[a-f]")))
    trial.kill()
    assert wait([compiler.fileno()], PATIENCE)
    (outcome,) = compiler.outcomes()
    assert outcome.request_id == "during"
    # It came to the one that was killed, or to the next.
    assert outcome.error is None or "try again" in str(outcome.error)
    compiler.ask(request("after", Grammar("regex", "[a-e]")))
    assert wait([compiler.fileno()], PATIENCE)
    assert [each.error for each in compiler.outcomes()] == [None]


def folder_with(tmp_path: Path, **changed: str) -> Path:
    """Return a copy of the demo model's folder in which some files have other content."""
    for file in ensure_demo().iterdir():
        if file.name not in changed:
            (tmp_path / file.name).symlink_to(file)
    for name, text in changed.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_custom_tokenizer_code_is_not_executed(tmp_path: Path) -> None:
    config = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", "mine.Mine"]}}
    code = f"open({str(tmp_path / 'was_here')!r}, 'w').close()\nclass Mine: ...\n"
    folder = folder_with(tmp_path, **{"tokenizer_config.json": json.dumps(config), "mine.py": code})
    compiler = GrammarCompiler(folder, 49152)
    compiler.ask(request("asks", DIGITS))
    assert wait([compiler.fileno()], PATIENCE)
    assert [outcome.error for outcome in compiler.outcomes()] == [None]
    matcher = compiler.matcher(DIGITS, (2,))
    logits = torch.zeros(49152)
    matcher.mask(logits)
    assert 0 < int(logits.isfinite().sum()) < 100
    assert not (tmp_path / "was_here").exists()
    compiler.close()


def test_broken_tokenizer_rejects_grammars_without_stopping_the_engine(tmp_path: Path) -> None:
    """Reject every request with a grammar as a client error; the engine serves the other requests."""
    folder = folder_with(
        tmp_path, **{"tokenizer.json": "{}", "tokenizer_config.json": '{"tokenizer_class": "M"}'}
    )
    ours, theirs = Pipe()
    with ours, theirs:
        loop = EngineLoop(make_plan(str(folder), SETTINGS), theirs, 1)
        for _ in range(3):
            loop.add(request("asks", DIGITS))
            (chunk,) = until(loop, lambda chunks: loop.idle)
            assert (chunk.finish_reason, chunk.refused) == ("error", True)
            assert "tokenizer, which does not load" in (chunk.error or "")
        loop.add(request("plain"))
        assert tokens_of(until(loop, lambda chunks: loop.idle), "plain") == 4


class Matching(FakeEngine):
    """It takes grammars, and heeds none."""

    @property
    def capabilities(self) -> Capabilities:
        found = super().capabilities
        return replace(found, honours=found.honours | {"grammar"})


async def test_oversized_grammar_is_rejected_before_it_reaches_the_engine(run_server, small_plan) -> None:
    engine = Matching(small_plan())
    async with run_server(engine) as server:
        wishes = {
            "json_schema": {"json": {"enum": ["x" * 100] * (MAX_BYTES // 100)}},
            "choice": {"choice": ["x" * 1000] * 200},
            "grammar": {"grammar": 'root ::= "' + "\u00e9" * (MAX_BYTES // 2) + '"'},
        }
        for kind, wish in wishes.items():
            response: httpx.Response = await server.complete(structured_outputs=wish, max_tokens=1)
            error = response.json()["error"]
            assert (response.status_code, error["code"], error["param"]) == (400, "invalid_value", kind)
            assert f"at most {MAX_BYTES:,}" in error["message"]
        fits = {"json": {"enum": ["x" * 100] * (MAX_BYTES // 200)}}
        assert (await server.complete(structured_outputs=fits, max_tokens=1)).status_code == 200
