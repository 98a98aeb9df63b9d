"""The model runner: families with paged attention, the pool's bytes, and changes without effect on output."""

from __future__ import annotations

import dataclasses
import gc
import json
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hf_steps import finish, publish_and_fork
from invariants import check_invariants
from tiny_models import (
    check_logits_in_parts,
    check_tokens_of_generate,
    complete,
    requests,
    tiny_plan,
    write_tiny,
)
from torch._subclasses.fake_tensor import FakeTensor
from transformers import AutoModelForCausalLM, DynamicCache

from tonnage.planner.deployment import Deployment
from tonnage.planner.errors import UnsupportedArchitecture
from tonnage.planner.families.registry import families
from tonnage.planner.planning.build import make_plan
from tonnage.server.demo.model import ensure_demo
from tonnage.server.engines.hf.batch import Batch
from tonnage.server.engines.hf.child import EngineLoop
from tonnage.server.engines.hf.model.loading import storage_bytes
from tonnage.server.engines.hf.model.runner import ModelRunner
from tonnage.server.engines.hf.model.selfcheck import TOLERANCE, self_check
from tonnage.server.engines.hf.model.support import require_supported, served
from tonnage.server.engines.hf.sampling.draw import most_likely
from tonnage.server.engines.hf.scheduler import HFScheduler
from tonnage.server.engines.request import GenerationRequest, SamplingParams

pytestmark = pytest.mark.usefixtures("two_threads")

SMALL: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
GROUPED = {**SMALL, "num_key_value_heads": 2, "head_dim": 16}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", GROUPED),
    "mistral-window": ("MistralConfig", {**GROUPED, "sliding_window": 24}),
    "qwen2": ("Qwen2Config", {**SMALL, "num_key_value_heads": 4}),
    "qwen3": ("Qwen3Config", GROUPED),
    "gemma": ("GemmaConfig", {**GROUPED, "num_key_value_heads": 1}),
    "gemma2": ("Gemma2Config", {**GROUPED, "sliding_window": 24, "query_pre_attn_scalar": 16}),
    "gemma3": (
        "Gemma3TextConfig",
        {**GROUPED, "num_hidden_layers": 6, "sliding_window": 24, "query_pre_attn_scalar": 16},
    ),
    "gpt_neox": ("GPTNeoXConfig", SMALL),
    "gpt_bigcode": (
        "GPTBigCodeConfig",
        {"vocab_size": 300, "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 512, "multi_query": True},
    ),
}


def tiny(folder: Path, family: str) -> Path:
    name, settings = FAMILIES[family]
    return write_tiny(folder, getattr(transformers, name)(**settings))


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_of_tiny_models_of_each_family_equal_transformers_generate(family: str, tmp_path: Path) -> None:
    folder = tiny(tmp_path, family)
    runner = ModelRunner(tiny_plan(folder))
    assert self_check(runner) < 1e-4
    check_logits_in_parts(runner)
    check_tokens_of_generate(runner, folder, (1, 5, 17, 33, 70, 120), 20)


@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_bfloat16_models_pass_self_check_with_fused_kernels(family: str, tmp_path: Path) -> None:
    runner = ModelRunner(tiny_plan(tiny(tmp_path, family), "bfloat16"))
    assert runner.attention == "in place"
    if not family.startswith("gpt"):
        layers = runner.model.config.num_hidden_layers
        assert runner.fused["gated mlp"] == layers
        assert runner.fused["linear"] >= 7 * layers
        assert runner.fused["rms norm"] >= 2 * layers + 1
    before = runner.weights_bytes
    # Random weights of 0.15 amplify rounding more than a trained model does.
    assert self_check(runner) < TOLERANCE[torch.bfloat16]
    assert storage_bytes(runner.model) == before == runner.plan.rank.weights_bytes  # nothing is kept twice


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("gemma2", "gemma3")])
def test_kv_bytes_per_token_equal_transformers_dynamic_cache(family: str, tmp_path: Path) -> None:
    folder = tiny(tmp_path, family)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = 20  # below the window, where a sliding layer holds every token too
    cache = DynamicCache()
    with torch.inference_mode():
        model(input_ids=torch.ones((1, tokens), dtype=torch.long), past_key_values=cache, use_cache=True)
    held = sum(
        tensor.untyped_storage().nbytes() for layer in cache.layers for tensor in (layer.keys, layer.values)
    )
    assert tiny_plan(folder).kv_cache.layout.bytes_per_token == held // tokens
    assert held % tokens == 0


def test_repeated_prompt_of_sliding_model_hits_cache_and_gets_equal_tokens(tmp_path: Path) -> None:
    runner = ModelRunner(tiny_plan(tiny(tmp_path, "mistral-window")))
    scheduler = HFScheduler(runner.plan)
    prompt, said, cached = list(range(3, 123)), [], []
    for prompt_ids in ([5, *prompt[1:]], prompt, prompt):  # the first differs before the window only
        (request,) = requests([prompt_ids], 20)
        scheduler.add(request)
        tokens: list[int] = []
        while not scheduler.idle:
            batch, picked, _ = scheduler.schedule()
            assert batch is not None
            (drawn, _) = most_likely(runner.forward(batch))
            for chunk in finish(scheduler, publish_and_fork(scheduler, picked), drawn):
                tokens += chunk.token_ids
                hit = chunk.cached_tokens
            check_invariants(scheduler.manager)
        said.append(tokens)
        cached.append(hit)
    assert cached == [0, 0, 112]  # whole blocks below the last token
    assert said[1] == said[2]


def tensors() -> list[torch.Tensor]:
    """Return all live tensors except the fake tensors of torch.compile, which have no bytes."""
    gc.collect()
    # By type: what a dead weak reference points to cannot be asked.
    alive = [held for held in gc.get_objects() if issubclass(type(held), torch.Tensor)]
    return [held for held in alive if not isinstance(held, FakeTensor)]


@pytest.fixture(scope="module")
def before_demo() -> list[torch.Tensor]:
    """Return the live tensors of earlier tests; the references keep their addresses from being reused."""
    return tensors()


@pytest.fixture(scope="module")
def demo_runner(before_demo: list[torch.Tensor]) -> ModelRunner:
    ensure_demo()
    plan = make_plan(
        "demo",
        Deployment(
            dtype="float32",
            kv_cache_memory_bytes=64 << 20,
            max_model_len=512,
            max_num_seqs=8,
            max_num_batched_tokens=64,
        ),
    )
    return ModelRunner(plan)


PROMPTS = [[9, 8, 7], list(range(100, 190)), list(range(400, 433)), [77] * 64]


def test_self_check_error_of_the_demo_model_is_far_below_the_tolerance(demo_runner: ModelRunner) -> None:
    assert self_check(demo_runner) < TOLERANCE[torch.float32] / 20


def test_kv_pool_is_the_only_kv_tensor_and_has_the_planned_size(
    demo_runner: ModelRunner, before_demo: list[torch.Tensor]
) -> None:
    plan = demo_runner.plan
    assert demo_runner.pool.nbytes == plan.rank.kv_pool_bytes
    complete(demo_runner, PROMPTS, 8)
    model = demo_runner.model
    expected = [*model.parameters(), *model.buffers(), demo_runner.pool.tensor, *before_demo]
    known = {tensor.untyped_storage().data_ptr() for tensor in expected}
    storages = [tensor.untyped_storage() for tensor in tensors()]
    others = {each.data_ptr(): each.nbytes() for each in storages if each.data_ptr() not in known}
    # Less than the K/V of a single token: nothing else keeps K or V alive between steps.
    assert max(others.values(), default=0) < plan.kv_cache.layout.bytes_per_token


def test_nan_values_in_free_kv_blocks_change_no_generated_token(demo_runner: ModelRunner) -> None:
    demo_runner.pool.tensor.zero_()
    clean = complete(demo_runner, PROMPTS, 12)
    demo_runner.pool.tensor.fill_(float("nan"))
    assert complete(demo_runner, PROMPTS, 12) == clean


def test_moving_kv_blocks_within_the_pool_changes_no_logit(demo_runner: ModelRunner) -> None:
    """Repeat a step after moving every block elsewhere in the pool, with its contents and tables."""
    plan = demo_runner.plan
    scheduler = HFScheduler(plan)
    for request in requests(PROMPTS, 12):
        scheduler.add(request)
    for _ in range(5):
        batch, picked, _chunks = scheduler.schedule()
        assert batch is not None
        before = demo_runner.pool.tensor.clone()
        logits = demo_runner.forward(batch)
        draws = publish_and_fork(scheduler, picked)
        finish(scheduler, draws, logits.argmax(-1).tolist()[: len(draws)])
        after = demo_runner.pool.tensor.clone()
        moved = np.random.default_rng(1).permutation(plan.kv_cache.num_blocks)
        size = plan.kv_cache.layout.block_size
        other = dataclasses.replace(
            batch,
            tables=tuple(moved[table].astype(np.int32) for table in batch.tables),
            slots=tuple(moved[slots // size] * size + slots % size for slots in batch.slots),
        )
        demo_runner.pool.tensor[torch.from_numpy(moved)] = before
        assert torch.equal(demo_runner.forward(other), logits)
        demo_runner.pool.tensor.copy_(after)


def test_unsupported_model_families_are_rejected_by_name() -> None:
    for name in families().keys() - set(served()):
        with pytest.raises(UnsupportedArchitecture, match=name):
            require_supported(name)
    with pytest.raises(UnsupportedArchitecture, match="not on the reviewed list"):
        require_supported("brand_new")
    for name in served():
        require_supported(name)


def test_self_check_rejects_a_model_if_some_of_its_layers_bypass_paged_attention(tmp_path: Path) -> None:
    folder = tiny(tmp_path, "llama")
    runner = ModelRunner(tiny_plan(folder))
    layers = runner.model.model.layers
    kept = layers[1].self_attn.config
    other = type(kept).from_dict(kept.to_dict())
    other._attn_implementation = "sdpa"
    layers[1].self_attn.config = other
    with pytest.raises(UnsupportedArchitecture, match="3 of its 4 layers"):
        self_check(runner)


def test_self_check_rejects_a_model_whose_logits_with_paged_attention_differ_from_the_reference(
    tmp_path: Path,
) -> None:
    folder = tiny(tmp_path, "mistral-window")
    plan = tiny_plan(folder)  # the plan knows a window of 24 tokens ...
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "sliding_window": 4}))  # ... the model one of 4
    with pytest.raises(UnsupportedArchitecture, match="other logits"):
        self_check(ModelRunner(plan))


def test_nan_logits_fail_only_their_own_request(tmp_path: Path) -> None:
    ours, theirs = Pipe()
    with ours, theirs:
        loop = EngineLoop(tiny_plan(tiny(tmp_path, "llama")), theirs, 1)
        forward = loop.runner.forward

        def broken(batch: Batch) -> torch.Tensor:
            logits = forward(batch).clone()
            logits[0, 5] = float("nan")
            return logits

        loop.runner.forward = broken  # type: ignore[method-assign]
        for request in requests([[1, 2, 3], [4, 5, 6, 7]], 5):
            loop.scheduler.add(request)
        first, second = sorted(loop.step(), key=lambda chunk: chunk.request_id)
        assert (first.finish_reason, second.finish_reason) == ("error", None)
        assert first.error == "the model produced NaN or infinite logits"
        assert len(second.token_ids) == 1
        assert len(loop.scheduler.running) == 1
        check_invariants(loop.scheduler.manager)


def test_blocks_of_failed_request_are_not_reused_from_prefix_cache(tmp_path: Path) -> None:
    """NaN must not spread through the prefix cache or the rest of a block; each sequence ends once."""
    ours, theirs = Pipe()
    with ours, theirs:
        loop = EngineLoop(tiny_plan(tiny(tmp_path, "llama")), theirs, 1)
        prompt = tuple(range(5, 38))
        params = SamplingParams(max_tokens=2, temperature=0.0)
        forward = loop.runner.forward

        def broken(batch: Batch) -> torch.Tensor:
            logits = forward(batch)
            size = loop.plan.kv_cache.layout.block_size
            blocks, offsets = torch.from_numpy(batch.slots[0] // size), torch.from_numpy(batch.slots[0] % size)
            loop.runner.pool.tensor[blocks, :, :, offsets] = float("nan")
            return torch.full_like(logits, float("nan"))

        loop.runner.forward = broken  # type: ignore[method-assign]
        assert not loop.add(GenerationRequest("x", prompt, params, n=3))
        assert sorted(chunk.index for chunk in loop.step()) == [0, 1, 2]
        assert loop.scheduler.idle
        assert loop.runner.pool.tensor.isfinite().all()
        loop.runner.forward = forward  # type: ignore[method-assign]
        assert not loop.add(GenerationRequest("y", prompt, params))
        (chunk,) = loop.step()
        assert (chunk.cached_tokens, chunk.finish_reason) == (0, None)
