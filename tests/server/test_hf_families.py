"""Every decoder family on the list, as a random model of a few layers, against transformers' own code.

Left out here: those that test_hf_runner.py already holds to more.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from tonnage.planner.deployment import Deployment
from tonnage.planner.planning.build import make_plan
from tonnage.planner.plans import Plan
from tonnage.server.engines.hf.model.runner import ModelRunner
from tonnage.server.engines.hf.model.selfcheck import TOLERANCE, self_check
from tonnage.server.engines.hf.model.support import served
from tonnage.server.engines.hf.sampling.draw import sample
from tonnage.server.engines.hf.scheduler import Scheduler
from tonnage.server.engines.request import GenerationRequest, SamplingParams

LAYERS = 4
SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "sliding_window": 24,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# What a family wants beside SIZES.
FAMILIES: dict[str, dict[str, Any]] = {
    "apertus": {},
    "arcee": {},
    "biogpt": {},
    "bitnet": {},
    "cohere": {},
    "cohere2": {},
    "ctrl": {},
    "cwm": {},
    "doge": {},
    "ernie4_5": {},
    "exaone4": {},
    "flex_olmo": {},
    "glm": {},
    "glm4": {},
    "glm4_moe": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "gpt2": {},
    "granite": {},
    "helium": {},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hyperclovax": {},
    "jais2": {},
    "ministral": {"head_dim": 16, "sliding_window": 24},
    "ministral3": {},
    "modernbert-decoder": {},
    "nanochat": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": {},
    "olmoe": {},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "persimmon": {},
    "phi": {},
    "phi3": {},
    "qwen2_moe": {},
    "qwen3_moe": {},
    "seed_oss": {},
    "smollm3": {},
    "starcoder2": {},
    "vaultgemma": {"query_pre_attn_scalar": 16},
}
ELSEWHERE = {
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "gpt_neox", "gpt_bigcode",
}  # fmt: skip


def write_tiny(folder: Path, model_type: str) -> Path:
    """A random model of the family, saved as any checkpoint is."""
    changes = FAMILIES[model_type]
    known = AutoConfig.for_model(model_type)
    settings = {name: value for name, value in SIZES.items() if getattr(known, name, None) is not None}
    config = AutoConfig.for_model(model_type, **{**settings, **changes})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():  # away from 0: greedy choices must not hang on rounding
            if parameter.ndim > 1:
                parameter.normal_(0, 0.15)
    model.save_pretrained(folder)
    return folder


def tiny_plan(folder: Path, dtype: str) -> Plan:
    small = Deployment(
        dtype=dtype, kv_cache_memory_bytes=4 << 20, max_model_len=256, max_num_seqs=8, max_num_batched_tokens=40
    )
    return make_plan(str(folder), small)


def answers(runner: ModelRunner, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    scheduler = Scheduler(runner.plan)
    said: dict[str, list[int]] = {str(number): [] for number in range(len(prompts))}
    params = SamplingParams(max_tokens=tokens, temperature=0.0)
    for number, prompt in enumerate(prompts):
        scheduler.add(GenerationRequest(str(number), tuple(prompt), params))
    while not scheduler.idle:
        batch, picked, _ = scheduler.schedule()
        assert batch is not None
        logits = runner.forward(batch)
        drawing = scheduler.fork(picked)
        drawn = sample(logits, [s.params for s in drawing], [s.random for s in drawing])
        for chunk in scheduler.finish(drawing, drawn):
            said[chunk.request_id] += chunk.token_ids
    return list(said.values())


def test_every_family_on_the_list_is_tried() -> None:
    assert FAMILIES.keys() | ELSEWHERE == set(served())


@pytest.mark.parametrize("model_type", FAMILIES)
def test_tokens_are_those_of_generate_and_bytes_those_of_the_plan(model_type: str, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, model_type)
    runner = ModelRunner(tiny_plan(folder, "float32"))
    assert self_check(runner) < 1e-4
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, 300, length).tolist() for length in (1, 17, 33, 120)]
    got = answers(runner, prompts, 8)
    plain = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    plain.generation_config = transformers.GenerationConfig(max_new_tokens=8, pad_token_id=0)  # no EOS
    for number, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = plain.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False)
        assert got[number] == out[0, len(prompt) :].tolist()
    served = ModelRunner(tiny_plan(folder, "bfloat16"))  # through the kernels, on a CPU that has them
    assert served.weights_bytes == served.plan.rank.weights_bytes
    # Random weights of 0.15 amplify rounding more than a trained model does.
    assert self_check(served) < TOLERANCE[torch.bfloat16]
