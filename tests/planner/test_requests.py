"""Tests of ``tonnage plan --request``: concurrent requests of given lengths, in text, JSON, table and page."""

from __future__ import annotations

import json
import re

import pytest

from tonnage.cache import admission
from tonnage.cache.manager import Admitted, KVCacheManager
from tonnage.planner import plan
from tonnage.planner.command import run
from tonnage.planner.errors import DeploymentError, UnsupportedArchitecture
from tonnage.planner.model.capacity import capacity_by_growth

MIB = 1 << 20


@pytest.fixture
def model(config_of, folder_with):
    """Return a function that writes a model's config with changes and returns its folder."""

    def write(name: str, **changes) -> str:
        config = config_of(name)
        config.pop("quantization_config", None)
        return folder_with({**config, **changes})

    return write


@pytest.fixture
def hybrid(model):
    return model("Qwen/Qwen3.5-35B-A3B")


def lines_of(capsys, *arguments: str) -> list[str]:
    assert run(list(arguments)) == 0
    return capsys.readouterr().out.splitlines()


def test_plan_of_a_hybrid_model_prints_bytes_per_request(hybrid, capsys):
    lines = lines_of(capsys, hybrid, "--gpu", "h100-80g", "--quantization", "fp8", "--engine-version", "0.32.0")
    (law,) = (line for line in lines if line.startswith("A request takes"))
    # three groups of states; ten layers of 2 KV heads x 256 x K and V x 2 bytes; a block of 1,056 tokens
    block = 10 * 2 * 256 * 2 * 2 * 1056
    assert law == (
        f"A request takes {3 * block:,} bytes at any length + 20,480 bytes per token, in blocks of 1,056 "
        f"tokens; one more state in each group where a block ends; at least {4 * block:,} bytes (4 blocks)"
    )
    (hits,) = (line for line in lines if line.startswith("Prefix hits"))
    (pool,) = (line for line in lines if line.startswith("KV cache: about"))
    usable = int(re.search(r"([\d,]+) usable", pool)[1].replace(",", ""))
    most = f"at most {usable // 4:,} requests of any length, --max-num-seqs 1,024"
    assert hits == f"Prefix hits: multiples of 1,056 tokens; {most}"


def test_number_of_requests_that_fit_is_equal_in_text_json_table_and_page(hybrid, capsys, tmp_path):
    flags = (hybrid, "--gpu", "h100-80g", "--quantization", "fp8", "--engine-version", "0.32.0")
    asked = ("--request", "2000+300", "--request", "100+20")
    out = json.loads("\n".join(lines_of(capsys, *flags, *asked, "--json", "--explain")))
    first, second = out["requests"]
    usable = out["kv_cache"]["usable_blocks"]
    assert first["blocks"] == {"arrival": 8, "peak": 9, "started": 5, "fullest": 9, "last": 6}
    assert first["at_once"] == usable // 9
    assert first["at_last"] == capacity_by_growth(usable, 9, 6)
    low, high = out["intervals"]["num_blocks"]
    assert first["bounds"] == [(low - 1) // 9, (high - 1) // 9]
    assert second["at_once"] == usable // 4 == second["running"]
    law = out["kv_cache"]["per_request"]
    assert (law["floor_blocks"], law["prefix_hit_tokens"], law["bytes_per_token"]) == (4, 1056, 20480)
    assert law["fixed_bytes"] * 4 == law["floor_bytes"] * 3
    terms = {term["name"]: term["value"] for term in out["terms"]}
    assert terms["requests[2000+300].at_once"] == first["at_once"]
    page = tmp_path / "plan.html"
    lines = lines_of(capsys, *flags, *asked, "--html", str(page))
    said = [line for line in lines if line.startswith("Requests of")]
    assert said[0].startswith(f"Requests of 2,000+300 tokens: about {first['at_once']} at once, ")
    assert f"; {first['at_last']} at their last token (6 blocks)" in said[0]
    assert all(f"<p>{line}</p>" in page.read_text() for line in said)
    rows = lines_of(capsys, *flags, *asked, "--csv")
    assert f"requests of 100+20,{second['at_once']},{' to '.join(map(str, second['bounds']))}" in rows


def test_plan_of_a_dense_model_prints_requests_that_fit_only_with_the_request_flag(model, capsys):
    flags = (model("meta-llama/Llama-3.2-1B"), "--engine", "vllm", "--engine-version", "0.32.0")
    flags += ("--kv-cache-memory-bytes", "1GiB", "--device-memory", "64GiB", "--max-model-len", "8192")
    assert not [line for line in lines_of(capsys, *flags) if line.startswith(("A request", "Requests"))]
    lines = lines_of(capsys, *flags, "--request", "1K+129", "--max-num-seqs", "3")
    (law,) = (line for line in lines if line.startswith("A request takes"))
    assert (
        law
        == "A request takes 32,768 bytes per token, in blocks of 128 tokens; at least 4,194,304 bytes (1 block)"
    )
    # 1,152 tokens fit 9 blocks; the last one of 1,153 is never computed
    assert (
        "Requests of 1,024+129 tokens: 28 at once (9 blocks each, 36.0 MiB); --max-num-seqs lets 3 run" in lines
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--request", "2000"), "--request: '2000' is not PROMPT+OUTPUT"),
        (("--request", "0+5"), "--request: '0' is not a positive integer"),
        (("--request", "5+0"), "--request: '0' is not a positive integer"),
        (("--request", "1+2+3"), "is not PROMPT+OUTPUT"),
        (("--max-model-len", "512", "--request", "500+13"), "500+13 is 513 tokens, above max_model_len 512"),
        (
            ("--target-concurrency", "2", "--request", "5+5", "--request", "6+6"),
            "--request: --target-concurrency counts requests of one length",
        ),
    ],
)
def test_invalid_request_flag_is_rejected(arguments, words, capsys):
    assert run(["demo", "--device-memory", "16GiB", *arguments]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1, said


def test_request_flag_is_rejected_for_an_unsupported_cache_layout(model):
    found = plan(
        model("deepseek-ai/DeepSeek-V4-Flash"), gpu="h200", tensor_parallel_size=8, engine_version="0.32.0"
    )
    assert found.kv_cache.law is None
    with pytest.raises(UnsupportedArchitecture, match="layers that compress tokens"):
        found.hold(100, 10)
    found = plan(model("google/gemma-2-2b"), engine="sglang", device_memory=24 << 30)
    with pytest.raises(UnsupportedArchitecture, match="SGLang's pool of sliding layers"):
        found.hold(100, 10)


def test_requests_that_fit_are_rejected_for_an_encoder_without_kv_cache(model):
    found = plan(model("BAAI/bge-large-en"), engine="vllm", device_memory=24 << 30)
    with pytest.raises(UnsupportedArchitecture, match="an encoder keeps no KV cache between steps"):
        found.hold(100, 10)


def test_lower_bound_of_concurrent_requests_is_0_if_the_kv_pool_may_have_no_blocks(model):
    found = plan(model("meta-llama/Llama-3.1-70B-Instruct"), gpu="h100-80g", quantization="fp8").hold(2000, 300)
    assert found.bounds[0] == 0 <= found.at_once <= found.bounds[1]


def test_prompt_during_prefill_holds_more_blocks_than_its_sliding_window(model):
    flags = {"engine": "vllm", "engine_version": "0.32.0", "max_model_len": 4096, "device_memory": 64 << 30}
    folder = model("mistralai/Mistral-7B-v0.1", sliding_window=256)
    found = plan(folder, kv_cache_memory_bytes=1 << 30, max_num_batched_tokens=2048, **flags)
    held = found.hold(500, 30)
    # four prompts of 4 blocks in a step, and one that began in the step before; 3 in the window's 256 tokens
    assert (held.blocks.arrival, held.blocks.fullest, held.together) == (4, 3, 5)
    assert held.at_once == 5 + (found.kv_cache.usable_blocks - 5 * 4) // 3


@pytest.mark.parametrize(
    ("name", "version", "words"),
    [
        ("Qwen/Qwen3.5-35B-A3B", "0.33.0", None),
        ("Qwen/Qwen3.5-35B-A3B", "0.31.0", "that of 0.31.0 keeps states at other block borders"),
        ("meta-llama/Llama-3.2-1B", "0.31.0", None),
        ("meta-llama/Llama-3.2-1B", "0.19.0", "that of 0.19.0 was not read"),
    ],
)
def test_plan_notes_the_vllm_version_of_the_block_manager_used_for_requests(
    name, version, words, model, capsys
):
    flags = (model(name), "--gpu", "h200", "--engine-version", version, "--max-model-len", "4096")
    lines = lines_of(capsys, *flags, "--request", "100+10")
    notes = [line for line in lines if "block manager of vLLM 0.32" in line]
    assert len(notes) == (words is not None)
    assert words is None or words in notes[0]


def test_hold_method_of_a_plan_object_rejects_invalid_request_lengths(model):
    found = plan(model("meta-llama/Llama-3.2-1B"), engine="vllm", max_model_len=4096, device_memory=24 << 30)
    assert found.hold(4000, 96).blocks.last == 4095 // 128 + 1
    for lengths in ((4000, 97), (0, 1), (1, 0)):
        with pytest.raises(DeploymentError, match="--request"):
            found.hold(*lengths)


def test_concurrent_requests_follow_slots_in_llama_cpp_and_pool_tokens_in_sglang(model):
    folder = model("meta-llama/Llama-3.2-1B")
    slots = plan(folder, engine="llama.cpp", max_model_len=4096, max_num_seqs=4, device_memory=24 << 30)
    assert slots.hold(10, 10).at_once == slots.hold(4000, 90).at_once == 4
    tokens = plan(folder, engine="sglang", device_memory=24 << 30, gpu=None, device="cuda")
    assert tokens.hold(1000, 25).at_once == tokens.kv_cache.tokens // 1024


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.2-1B", "google/gemma-2-2b"])
def test_planned_number_of_requests_equals_what_the_block_manager_admits(name, model):
    changes = {"sliding_window": 100} if "gemma" in name else {}
    found = plan(
        model(name, **changes), engine="hf", dtype="bfloat16", max_model_len=2048, max_num_batched_tokens=513,
        max_num_seqs=512, kv_cache_memory_bytes=256 * MIB, device_memory=64 << 30,
    )  # fmt: skip
    cache = found.kv_cache
    for prompt, output in ((1, 1), (15, 1), (16, 1), (99, 30), (161, 160), (1000, 24)):
        manager = KVCacheManager(
            cache.layout, cache.num_blocks, max_num_seqs=512, max_model_len=2048, max_num_batched_tokens=513,
            policy=admission.Policy(admission.AdmissionMode.NO_EVICT),
        )  # fmt: skip
        count = 0
        while isinstance(manager.admit(count, [count, *range(1, prompt)], output), Admitted):
            count += 1
        assert found.hold(prompt, output).running == count
