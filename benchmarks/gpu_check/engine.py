"""Step `engine`: tokens per second beside transformers, and the cost of a step as admission fits it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers

from tonnage.cache.admission.cost import CostFit
from tonnage.server.engines.hf.model.runner import ModelRunner
from tonnage.server.engines.hf.model.selfcheck import checked_attention

from .models import Target, spec, write
from .rows import Row, skipped
from .serving import own_attention, prompts_of, serve

# Sequences at once, prompt tokens and output tokens of each, by device.
_LOADS = {"cuda": ((1, 16, 64, 256), 128, 128), "cpu": ((1, 4), 16, 16)}
# Requests of different lengths, whose steps differ enough to separate the four costs of a step.
_MIXED = 48


def run(target: Target) -> Iterator[Row]:
    """Yield the throughput of each number of sequences, then the fitted cost of a step."""
    counts, prompt, tokens = _LOADS[target.device]
    folder = write(spec("large", target.device), target.folder, "bfloat16")
    runner = ModelRunner(
        target.plan(
            folder, "bfloat16", max_num_seqs=max(counts), max_num_batched_tokens=2048,
            kv_cache_memory_bytes=(8 << 30) if target.device == "cuda" else (64 << 20),
        )
    )  # fmt: skip
    checked_attention(runner)
    serve(runner, prompts_of([prompt], runner.vocab_size), 4)  # the first steps compile and allocate
    for count in counts:
        prompts = prompts_of([prompt] * count, runner.vocab_size, seed=count)
        found = serve(runner, prompts, tokens)
        peers = [_rate(name, call, runner, prompts, tokens) for name, call in _PEERS.items()]
        name = f"{count} x ({prompt} + {tokens}) tokens, {runner.attention}"
        yield Row(name, found.rate, "tokens/s", note=", ".join(peers))
    fit = CostFit()
    for at in range(_MIXED // 4):  # a few requests at a time, so that many steps have prompts
        lengths = [prompt + 5 * at * of for of in range(4)]
        serve(runner, prompts_of(lengths, runner.vocab_size, seed=at), 12 + at, fit=fit)
    yield _cost(fit)


def first_step(target: Target) -> Iterator[Row]:
    """Yield the seconds until a first answer: weights, compiled loops of the block manager, and kernels."""
    begin = time.perf_counter()
    plan = target.plan(write(spec("small", target.device), target.folder, "bfloat16"), "bfloat16")
    runner = ModelRunner(plan)
    loaded = time.perf_counter() - begin
    yield Row("model written, planned and loaded", loaded, "s")
    serve(runner, prompts_of([8], runner.vocab_size), 2)
    note = "with compilation, where no machine code is kept"
    yield Row("first answer", time.perf_counter() - begin - loaded, "s", note=note)


def _rate(
    name: str, call: Callable[..., int], runner: ModelRunner, prompts: list[list[int]], tokens: int
) -> str:
    """Return the throughput of one of transformers' functions on the same prompts, in words."""
    try:
        with own_attention(runner, "sdpa"):
            call(runner.model, prompts[:1], 2)  # the first call prepares buffers
            begin = time.perf_counter()
            made = call(runner.model, prompts, tokens)
            if made != len(prompts) * tokens:
                raise RuntimeError(f"{made} tokens")
            return f"{name} {made / (time.perf_counter() - begin):,.0f}"
    except Exception as error:  # a comparison that fails must not end the step
        return f"{name} failed ({type(error).__name__}: {str(error)[:80]})"


@torch.inference_mode()
def _generate(model: Any, prompts: list[list[int]], tokens: int) -> int:
    ids = torch.tensor(prompts, device=model.device)
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens, pad_token_id=0
    )
    return int(out.shape[0] * (out.shape[1] - ids.shape[1]))


def _generate_batch(model: Any, prompts: list[list[int]], tokens: int) -> int:
    settings = transformers.GenerationConfig(
        max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    # A cache for these prompts; by default it takes 90 % of the free memory, which our pool shares.
    needed = len(prompts) * (1 + (len(prompts[0]) + tokens) // 256)
    batching = transformers.ContinuousBatchingConfig(num_blocks=needed + 8, max_batch_tokens=2048)
    answers = model.generate_batch(
        inputs=prompts,
        generation_config=settings,
        continuous_batching_config=batching,
        progress_bar=False,
        warmup=False,
    )
    return sum(len(answer.generated_tokens) for answer in answers.values())


_PEERS = {"generate": _generate, "generate_batch": _generate_batch}


def _cost(fit: CostFit) -> Row:
    """Return the fitted cost in the form of ``vllm_admission.py --matrix --cost NAME=...``, in milliseconds."""
    cost = fit.cost
    if cost is None:
        return skipped("cost of a step", f"{fit.steps} steps are too few for a fit")
    terms = (cost.fixed, cost.prefill, cost.sequence, 1000 * cost.context)
    written = ",".join(f"{1000 * term:.4g}" for term in terms)
    return Row(
        "cost of a step",
        f"--cost here={written}",
        note="ms per step, prompt token, sequence, 1,000 tokens of context",
    )
