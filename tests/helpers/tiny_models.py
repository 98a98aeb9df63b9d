"""Random models of a few layers: saved as any checkpoint is, planned, and held against generate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from hf_steps import finish, publish_and_fork
from invariants import check_invariants
from transformers import AutoModelForCausalLM

from tonnage.planner.deployment import Deployment
from tonnage.planner.planning.build import make_plan
from tonnage.planner.plans import Plan
from tonnage.server.engines.hf.batch import Batch
from tonnage.server.engines.hf.model.runner import ModelRunner
from tonnage.server.engines.hf.sampling.draw import sample
from tonnage.server.engines.hf.scheduler import HFScheduler
from tonnage.server.engines.request import GenerationRequest, SamplingParams

# Families whose output layer reads other states than those of the base model: their prompts are scored with one
# forward for each part.
REPEATED = {"opt"}


def write_tiny(folder: Path, config: transformers.PretrainedConfig) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():  # away from 0: greedy choices must not hang on rounding
            if parameter.ndim > 1:
                parameter.normal_(0, 0.15)
    model.save_pretrained(folder)
    return folder


def tiny_plan(folder: Path, dtype: str = "float32") -> Plan:
    small = Deployment(
        dtype=dtype, kv_cache_memory_bytes=4 << 20, max_model_len=256, max_num_seqs=8, max_num_batched_tokens=40
    )
    return make_plan(str(folder), small)


def requests(prompts: list[list[int]], tokens: int) -> list[GenerationRequest]:
    params = SamplingParams(max_tokens=tokens, temperature=0.0)
    return [GenerationRequest(str(i), tuple(prompt), params) for i, prompt in enumerate(prompts)]


def complete(runner: ModelRunner, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """Return greedy tokens of each prompt, all served at once; check the manager's laws after every step."""
    scheduler = HFScheduler(runner.plan)
    said: dict[str, list[int]] = {str(number): [] for number in range(len(prompts))}
    for request in requests(prompts, tokens):
        scheduler.add(request)
    while not scheduler.idle:
        batch, picked, _ = scheduler.schedule()
        assert batch is not None
        logits = runner.forward(batch)
        draws = publish_and_fork(scheduler, picked)
        sequences = [draw.sequence for draw in draws]
        drawn = sample(logits, [s.params for s in sequences], [s.random for s in sequences])
        for chunk in finish(scheduler, draws, drawn):
            said[chunk.request_id] += chunk.token_ids
        check_invariants(scheduler.manager)
    return list(said.values())


def check_logits_in_parts(runner: ModelRunner) -> None:
    """Compare logits computed in parts with those of one forward, with a forward for each step only."""
    tokens = 40
    blocks = np.arange(1, 1 + tokens // 16 + 1, dtype=np.int32)
    slots = blocks[np.arange(tokens) // 16].astype(np.int64) * 16 + np.arange(tokens) % 16
    groups = len(runner.plan.kv_cache.layout.groups)
    batch = Batch(
        token_ids=np.arange(3, 3 + tokens),
        positions=np.arange(tokens),
        query_start=np.array([0, tokens]),
        kv_len=np.array([tokens]),
        slots=(slots,) * groups,
        tables=(blocks[None],) * groups,
        logits_at=np.arange(tokens),
    )
    whole = runner.forward(batch)
    layers: list[int] = []
    embedding = runner.model.get_input_embeddings()
    hook = embedding.register_forward_hook(lambda *_: layers.append(1))
    parts = list(runner.forward_in_parts(batch))
    hook.remove()
    assert len(parts) > 1
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-4, atol=1e-4)
    assert len(layers) == (len(parts) if runner.model.config.model_type in REPEATED else 1)


def check_tokens_of_generate(runner: ModelRunner, folder: Path, lengths: tuple[int, ...], tokens: int) -> None:
    """Compare the runner's batched tokens with generate's one prompt at a time, on random prompts."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, 300, length).tolist() for length in lengths]
    got = complete(runner, prompts, tokens)
    plain: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    plain.eval().generation_config = transformers.GenerationConfig(
        max_new_tokens=tokens, pad_token_id=0
    )  # no EOS
    for answer, prompt in zip(got, prompts, strict=True):
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = plain.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False)
        assert answer == out[0, len(prompt) :].tolist()
