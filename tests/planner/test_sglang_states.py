"""Tests of SGLang's pools of hybrid models, against its own functions.

The functions are of 0.5.23, unpacked in the folder TONNAGE_SGLANG.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from oracle import Oracle

from tonnage.planner import Deployment, DeploymentError, UnsupportedArchitecture
from tonnage.planner.engines.sglang import ENGINE
from tonnage.planner.planning.build import make_plan
from tonnage.planner.units import GiB

DATA = Path(__file__).parent.parent / "data" / "configs"
ORACLE = Oracle("sglang_states", sglang="0.5.23")
QWEN, NEMOTRON = "Qwen__Qwen3.5-35B-A3B", "nvidia__NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"
KIMI = "transformers-default__kimi_linear"
FILES = {QWEN: "configs/qwen3_next.py", NEMOTRON: "configs/nemotron_h.py", KIMI: "configs/kimi_linear.py"}
# bytes of a token's keys and values on one rank, by ranks
TOKEN = {
    QWEN: lambda ranks: 10 * max(1, 2 // ranks) * 2 * 256 * 2,
    NEMOTRON: lambda ranks: 6 * max(1, 2 // ranks) * 2 * 128 * 2,
    KIMI: lambda ranks: 6 * 576 * 2,
}
CASES = [
    (name, ranks, rest, asked, radix, ratio, 0)
    for name in FILES
    for ranks, rest, asked, radix, ratio in (
        (1, 40 * GiB, None, True, 0.9), (2, 61_234_567_890, None, True, 0.9), (4, 7 * GiB, None, True, 0.5),
        (1, 20 * GiB, 48, True, 0.9), (1, 20 * GiB, 64, False, 0.9), (2, 3 * GiB, None, False, 0.2),
    )
] + [  # with the checkpoint's own draft
    (QWEN, 1, 40 * GiB, None, True, 0.9, 3), (QWEN, 2, 9 * GiB, 16, True, 0.9, 1),
    (QWEN, 1, 20 * GiB, 64, False, 0.9, 3),
]  # fmt: skip


def linear_layers(config):
    if "layer_types" in config:
        return [i for i, kind in enumerate(config["layer_types"]) if kind == "linear_attention"]
    return [i for i, kind in enumerate(config["hybrid_override_pattern"]) if kind == "M"]


def asked_of(name, ranks, rest, asked, radix, ratio, drafts):
    config = json.loads((DATA / f"{name}.json").read_text())
    config = config.get("text_config", config)
    if name == KIMI:  # the spelling of its repository
        heads, size, kernel = (config[f"linear_{key}"] for key in ("num_heads", "head_dim", "conv_kernel_dim"))
        delta = {"num_heads": heads, "head_dim": size, "short_conv_kernel_size": kernel}
        config |= {"linear_attn_config": delta}
    token = TOKEN[name](ranks)
    return {
        "file": FILES[name], "config": config, "layers": linear_layers(config), "ranks": ranks, "rest": rest,
        "requests": asked, "radix": radix, "ratio": ratio, "extra_buffer": True, "length": 16384,
        # DefaultPoolConfigurator: a draft's layer is as large as one of the model's ten
        "token_bytes": token + (token // 10 if drafts else 0), "verified": drafts + 1 if drafts else 0,
    }  # fmt: skip


@cache
def answers():
    """Return SGLang's answers to all cases from one process, which imports PyTorch."""
    folder = os.environ["TONNAGE_SGLANG"]
    script = Path(__file__).with_name("sglang_states_child.py")
    cases = json.dumps([asked_of(*case) for case in CASES])
    done = subprocess.run(
        [sys.executable, script, folder], input=cases, capture_output=True, text=True, timeout=600
    )
    assert done.stdout.startswith("RESULT "), done.stderr[-2000:]
    return json.loads(done.stdout.removeprefix("RESULT "))


@pytest.fixture
def folder(tmp_path):
    def make(name):
        shutil.copy(DATA / f"{name}.json", tmp_path / "config.json")
        return str(tmp_path)

    return make


@pytest.mark.oracle
@pytest.mark.parametrize("number", range(len(CASES)))
def test_planned_mamba_state_slots_tokens_and_requests_equal_sglang(number, folder):
    name, ranks, rest, asked, radix, ratio, drafts = CASES[number]
    case = asked_of(*CASES[number])
    key = " ".join(map(str, CASES[number]))
    says = ORACLE.says(key, case, lambda: answers()[number])
    flags = Deployment(
        engine="sglang", gpu="h100-80g", dtype="bfloat16", tensor_parallel_size=ranks, max_num_seqs=asked,
        kv_cache_memory_bytes=rest, enable_prefix_caching=radix, mamba_full_memory_ratio=ratio,
        max_model_len=16384,
        **({"speculative_model": "mtp", "num_speculative_tokens": drafts} if drafts else {}),
    )  # fmt: skip
    plan = make_plan(folder(name), flags)
    assert f"{says['slots']:,} slots of {says['slot_bytes']:,} bytes" in " ".join(plan.notes)
    blocks = plan.kv_cache.num_blocks * plan.kv_cache.layout.bytes_per_block
    # its bytes are GiB in floating point
    assert abs(plan.rank.kv_pool_bytes - blocks - (rest - says["left"])) < 100
    assert abs(plan.kv_cache.tokens - says["tokens"]) <= 1
    assert plan.deployment.max_num_seqs == says["running"]
    assert plan.kv_cache.max_concurrency <= says["slots"]


def test_sglang_version_decides_the_number_of_mamba_state_slots(folder):
    """Padding slots exist from 0.5.23 on; before 0.5.15 a running request has three slots.

    0.5.4 is the first known version.
    """
    found = {}
    for version in ("0.5.4", "0.5.9", "0.5.15", "0.5.23"):
        asked = Deployment(engine="sglang", engine_version=version, gpu="h100-80g", tensor_parallel_size=2)
        plan = make_plan(folder(QWEN), asked)
        found[version] = int(next(note for note in plan.notes if "slots" in note).split()[7]), plan
    assert [each for each, _ in found.values()] == [3, 3, 5, 5]
    old, new = found["0.5.15"][1], found["0.5.23"][1]
    assert old.deployment.max_num_seqs > 0 < new.deployment.max_num_seqs
    with pytest.raises(UnsupportedArchitecture, match=r"from 0\.5\.4 on"):
        make_plan(folder(QWEN), Deployment(engine="sglang", engine_version="0.5.3", gpu="h100-80g"))


def test_sglang_hybrid_request_takes_tokens_and_state_slots(folder):
    """Tokens follow the pool's law; the number of state slots limits the running requests."""
    plan = make_plan(folder(NEMOTRON), Deployment(engine="sglang", gpu="h100-80g", max_model_len=8192))
    law = plan.kv_cache.law
    assert (law.bytes_per_block, law.hit_tokens) == (TOKEN[NEMOTRON](1), None)
    assert plan.deployment.max_num_seqs == 13 == plan.kv_cache.max_concurrency


def test_sglang_plan_does_not_fit_if_no_request_gets_slots_for_its_recurrent_states(folder):
    asked = Deployment(engine="sglang", gpu="h100-80g", kv_cache_memory_bytes=GiB // 2)
    plan = make_plan(folder(QWEN), asked)
    assert not plan.fits
    assert "no request has slots for its states" in " ".join(plan.reasons)
    assert "too small to serve any requests" in plan.stops_with


@pytest.mark.parametrize(
    ("name", "flags", "said"),
    [
        (QWEN, {"pipeline_parallel_size": 2}, "pipeline stages"),
        ("transformers-default__recurrent_gemma", {}, "recurrent states of a model with sliding windows"),
        ("transformers-default__jamba", {}, "states like ssm"),
        ("transformers-default__mamba2", {}, "whose layers all have recurrent states"),
    ],
)
def test_unsupported_sglang_states_are_rejected(name, flags, said, folder):
    with pytest.raises(UnsupportedArchitecture, match=said):
        make_plan(folder(name), Deployment(engine="sglang", gpu="h100-80g", **flags))


def test_sglang_draft_weights_reduce_the_pool(folder):
    """Draft layers are budgeted like the model's, draft weights reduce the pool, and 48 requests run.

    Versions before 0.5.15 do not, and are rejected.
    """
    name = "deepseek-ai__DeepSeek-V3"
    asked = {"engine": "sglang", "gpu": "b200", "tensor_parallel_size": 8, "max_model_len": 8192}
    plain = make_plan(folder(name), Deployment(**asked))
    drafted = make_plan(folder(name), Deployment(**asked, speculative_model="mtp", num_speculative_tokens=3))
    size = plain.kv_cache.layout.bytes_per_block
    assert drafted.kv_cache.layout.bytes_per_block == size + size // 61
    assert drafted.rank.draft_bytes > 1 << 30
    lost = plain.rank.kv_pool_bytes - drafted.rank.kv_pool_bytes
    assert abs(lost - drafted.rank.draft_bytes) <= size + size // 61
    assert drafted.deployment.max_num_seqs == 48
    (line,) = ENGINE.serve_lines(drafted)
    assert "--speculative-algorithm NEXTN --speculative-num-steps 3 --speculative-eagle-topk 1" in line
    with pytest.raises(DeploymentError, match=r"from 0\.5\.15 on"):
        make_plan(folder(name), Deployment(**asked, speculative_model="mtp", engine_version="0.5.9"))


def test_sglang_limit_of_running_requests_follows_context_length_and_max_num_seqs(folder):
    """resolve_max_num_reqs allows 512 per context that fits, from 2,048 to 4,096, and at most the flag."""
    name = "meta-llama__Meta-Llama-3.1-8B"
    for flags, running in (
        ({"max_model_len": 131072}, 2048), ({"max_model_len": 8192}, 4096), ({"max_num_seqs": 48}, 48),
        ({"max_num_seqs": 48, "kv_cache_memory_bytes": 64 << 17}, 32),
    ):  # fmt: skip
        plan = make_plan(folder(name), Deployment(engine="sglang", gpu="h100-80g", **flags))
        assert plan.deployment.max_num_seqs == running


# names in arg_groups/fields of 0.5.23 -> fields of Deployment
_OWN = {
    "--context-length": "max_model_len", "--dtype": "dtype", "--tp-size": "tensor_parallel_size",
    "--pp-size": "pipeline_parallel_size", "--dp-size": "data_parallel_size",
    "--mem-fraction-static": "mem_fraction_static", "--max-running-requests": "max_num_seqs",
    "--chunked-prefill-size": "max_num_batched_tokens", "--page-size": "block_size",
    "--kv-cache-dtype": "kv_cache_dtype", "--swa-full-tokens-ratio": "swa_full_tokens_ratio",
    "--mamba-full-memory-ratio": "mamba_full_memory_ratio", "--max-loras-per-batch": "max_loras",
    "--max-lora-rank": "max_lora_rank",
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("meta-llama__Meta-Llama-3.1-8B", {}),
        ("meta-llama__Meta-Llama-3.1-8B",
         {"kv_cache_dtype": "fp8_e4m3", "mem_fraction_static": 0.7, "max_num_seqs": 48,
          "max_num_batched_tokens": 4096, "pipeline_parallel_size": 2, "tensor_parallel_size": 2,
          "data_parallel_size": 2, "block_size": 64}),
        ("google__gemma-3-27b-it", {"swa_full_tokens_ratio": 0.5, "dtype": "float16"}),
        ("Qwen__Qwen3.5-27B", {"mamba_full_memory_ratio": 0.5}),
        ("meta-llama__Meta-Llama-3.1-8B", {"enable_lora": True, "max_loras": 4, "max_lora_rank": 32}),
    ],
)  # fmt: skip
def test_printed_sglang_serve_command_reproduces_the_plan(name, flags, folder):
    """SGLang's serve line, read back as our flags, gives the same plan."""
    base = {"engine": "sglang", "gpu": "h100-80g", "engine_version": "0.5.23"}
    plan = make_plan(folder(name), Deployment(**base, max_model_len=8192, **flags))
    words = shlex.split(ENGINE.serve_lines(plan)[0])[5:]
    back = {}
    while words:
        option = words.pop(0)
        if option == "--enable-lora":
            back["enable_lora"] = True
        elif option == "--lora-target-modules":
            assert words.pop(0) == "all"
        else:
            field, text = _OWN[option], words.pop(0)
            default = getattr(plan.deployment, field)
            back[field] = text if isinstance(default, str) else type(default)(text)
    again = make_plan(folder(name), Deployment(**base, **back))
    assert (again.kv_cache, again.rank) == (plan.kv_cache, plan.rank)
    assert again.deployment.max_num_batched_tokens == plan.deployment.max_num_batched_tokens


def test_printed_sglang_serve_command_contains_boolean_flags(folder):
    asked = {"engine": "sglang", "gpu": "h100-80g", "max_model_len": 8192, "enforce_eager": True}
    name = "meta-llama__Meta-Llama-3.1-8B"
    flags = Deployment(
        **asked, enable_prefix_caching=False, cpu_offload_bytes=4 << 30, kv_cache_dtype="fp8",
        engine_version="0.5.23",
    )  # fmt: skip
    (line,) = ENGINE.serve_lines(make_plan(folder(name), flags))
    for part in (
        "--disable-radix-cache", "--kv-cache-dtype fp8_e4m3", "--cpu-offload-gb 4",
        "--cuda-graph-backend-decode disabled --cuda-graph-backend-prefill disabled",
    ):  # fmt: skip
        assert part in line
    (line,) = ENGINE.serve_lines(make_plan(folder(name), Deployment(**asked, engine_version="0.5.9")))
    assert line.endswith("--disable-cuda-graph")
    (line,) = ENGINE.serve_lines(make_plan(folder("Qwen__Qwen3-30B-A3B"), Deployment(
        **asked, tensor_parallel_size=2, enable_expert_parallel=True
    )))  # fmt: skip
    assert "--tp-size 2 --ep-size 2" in line


def test_plan_notes_the_settings_that_the_printed_sglang_serve_command_cannot_contain(folder):
    flags = Deployment(
        engine="sglang", gpu="h100-80g", max_model_len=8192, kv_cache_memory_bytes=8 << 30, dtype="bfloat16",
        gpu_memory_utilization=0.5, cpu_offload_bytes=3 << 29,
    )  # fmt: skip
    plan = make_plan(folder("meta-llama__Meta-Llama-3.1-8B"), flags)
    assert f"--max-total-tokens {plan.kv_cache.tokens}" in ENGINE.serve_lines(plan)[0]
    untold = ("--kv-cache-memory-bytes", "--gpu-memory-utilization", "whole GiB")
    for word in untold:
        assert any(word in note for note in plan.notes)


@pytest.mark.parametrize("stages", [1, 2])
def test_sglang_plan_rejects_layers_with_compress_ratios_naming_the_field(stages):
    flags = Deployment(engine="sglang", gpu="b200-180g", pipeline_parallel_size=stages)
    with pytest.raises(UnsupportedArchitecture, match="compress tokens") as refused:
        make_plan(str(DATA / "deepseek-ai__DeepSeek-V4-Flash.json"), flags)
    assert refused.value.field == "compress_ratios"
