"""Serving of prompts by the engine's scheduler and model runner in this process, with the time of each step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tonnage.cache.admission.cost import CostFit
from tonnage.server.engines.hf.attention.interface import NAME
from tonnage.server.engines.hf.model.fuse import plain
from tonnage.server.engines.hf.model.runner import ModelRunner
from tonnage.server.engines.hf.sampling.draw import most_likely
from tonnage.server.engines.hf.scheduler import HFScheduler
from tonnage.server.engines.hf.sequence import draws_of
from tonnage.server.engines.request import GenerationRequest, SamplingParams


@dataclass(slots=True)
class Served:
    """The answers to a batch of prompts.

    Attributes:
        tokens: output tokens of each prompt.
        cached: prompt tokens of each prompt that were found in the prefix cache.
        seconds: time from the first step to the last.
    """

    tokens: list[list[int]]
    cached: list[int]
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Output tokens per second."""
        return sum(map(len, self.tokens)) / self.seconds


def prompts_of(lengths: list[int], vocabulary: int, seed: int = 3) -> list[list[int]]:
    """Return random prompts of the given lengths."""
    draw = np.random.default_rng(seed)
    return [draw.integers(3, vocabulary, length).tolist() for length in lengths]


def serve(
    runner: ModelRunner,
    prompts: list[list[int]],
    tokens: int,
    scheduler: HFScheduler | None = None,
    fit: CostFit | None = None,
) -> Served:
    """Serve all prompts at once, greedily, ``tokens`` output tokens each.

    Args:
        runner: model and pool.
        prompts: token ids of each prompt.
        tokens: output tokens of each prompt.
        scheduler: scheduler of an earlier call, with its prefix cache; None means a new one.
        fit: cost model that learns the seconds of each step.
    """
    scheduler = scheduler or HFScheduler(runner.plan)
    found = Served([[] for _ in prompts], [0] * len(prompts))
    params = SamplingParams(max_tokens=tokens, temperature=0.0)
    for number, prompt in enumerate(prompts):
        scheduler.add(GenerationRequest(str(number), tuple(prompt), params))
    begin = time.perf_counter()
    while not scheduler.idle:
        start = time.perf_counter()
        batch, picked, _ = scheduler.schedule()
        if batch is None:
            raise RuntimeError("requests wait, but the scheduler computes nothing")
        logits = runner.forward(batch)
        draws = draws_of(picked)
        drawn, _ = most_likely(logits)
        scheduler.publish(picked)
        for draw in draws:
            draw.token = drawn[draw.row]
        for chunk in scheduler.finish(scheduler.fork(draws)):
            found.tokens[int(chunk.request_id)] += chunk.token_ids
            found.cached[int(chunk.request_id)] = chunk.cached_tokens
        if fit is not None:
            context = int(batch.kv_len.sum())
            fit.observe(len(batch.token_ids), len(picked), context, time.perf_counter() - start)
    found.seconds = time.perf_counter() - begin
    return found


@torch.inference_mode()
def generated(runner: ModelRunner, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """Return the tokens that transformers' ``generate`` produces for each prompt alone, greedily."""
    found = []
    with own_attention(runner, "eager"):
        for prompt in prompts:
            ids = torch.tensor([prompt], device=runner.device)
            mask = torch.ones_like(ids)
            model: Any = runner.model
            out = model.generate(
                ids, attention_mask=mask, do_sample=False, max_new_tokens=tokens, pad_token_id=0
            )
            found.append(out[0, len(prompt) :].tolist())
    return found


@contextmanager
def own_attention(runner: ModelRunner, name: str) -> Iterator[None]:
    """Give the model transformers' own forward methods and attention ``name`` while the context is open."""
    model: Any = runner.model
    model.set_attn_implementation(name)
    try:
        with plain(runner.model):
            yield
    finally:
        model.set_attn_implementation(NAME)
