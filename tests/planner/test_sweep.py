"""Tests of sweeps, target concurrency, advice, serve lines, tables and HTML pages."""

from __future__ import annotations

import csv
import io
import json
import re
import shlex
import shutil
import struct
from dataclasses import replace
from pathlib import Path

import pytest
from demo_file import demo_gguf

from tonnage.planner.command import run
from tonnage.planner.deployment import Deployment
from tonnage.planner.devices.catalogue import catalogue, find_gpu
from tonnage.planner.errors import DeploymentError, TonnageError
from tonnage.planner.planning.advice import advise, serve_lines
from tonnage.planner.planning.build import make_plan, plan_source
from tonnage.planner.source.resolve import resolve_model
from tonnage.planner.sweep.grid import Grid, sweep
from tonnage.planner.sweep.order import cheapest
from tonnage.planner.sweep.rows import SweepRow

CONFIGS = Path(__file__).parent.parent / "data" / "configs"
FLAGS = Deployment(engine="vllm", max_model_len=8192, max_num_seqs=64)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    shutil.copy(CONFIGS / "meta-llama__Meta-Llama-3.1-8B.json", folder / "config.json")
    return str(folder)


def test_sweep_row_equals_plan_of_its_flags(llama):
    """The sweep's optimizations change nothing: each row equals a complete plan."""
    grid = Grid((find_gpu("h100"), find_gpu("a40")), ("as is",), ("auto", "fp8"), (1, 2))
    source = resolve_model(llama)
    rows = sweep(source, FLAGS, grid)
    assert len(rows) == len(grid) == 8
    for row in rows:
        flags = replace(FLAGS, gpu=row.gpu, kv_cache_dtype=row.kv_cache_dtype, tensor_parallel_size=row.gpus)
        plan = plan_source(source, flags)
        assert row.fits == plan.fits
        assert row.weights_bytes == plan.rank.weights_bytes
        assert (row.kv_pool_bytes, row.tokens) == (plan.rank.kv_pool_bytes, plan.kv_cache.tokens)
        assert row.max_concurrency == plan.kv_cache.max_concurrency


def test_sweep_row_with_a_disk_tier_counts_its_index_as_the_plan_does(llama):
    source, tier = resolve_model(llama), {"kv_offloading_bytes": 8 << 30, "kv_offloading_disk": "/kv,100GiB"}
    flags = Deployment(engine="hf", device_memory=64 << 30, max_model_len=4096, **tier)
    cpu = replace(find_gpu("cpu"), memory_bytes=64 << 30)
    (row,) = sweep(source, replace(flags, device_memory=None), Grid((cpu,), ("as is",), ("auto",), (1,)))
    rank = plan_source(source, flags).rank
    assert row.runtime_bytes == rank.activation_bytes + rank.framework_bytes
    assert row.free_bytes == rank.free_bytes


@pytest.mark.parametrize(
    "added",
    [
        {"enable_lora": True, "max_loras": 4},
        {"speculative_model": "DRAFT", "num_speculative_tokens": 4},
        {"speculative_model": "DRAFT", "enable_lora": True},
        {"cpu_offload_bytes": 4 << 30},
    ],
    ids=["LoRA", "draft", "both", "offload"],
)
def test_sweep_row_with_lora_and_draft_equals_plan(added, llama, tmp_path):
    if "speculative_model" in added:
        shutil.copy(CONFIGS / "meta-llama__Llama-3.2-1B.json", tmp_path / "config.json")
        added = added | {"speculative_model": str(tmp_path)}
    source, wanted = resolve_model(llama), replace(FLAGS, **added)
    for row in sweep(source, wanted, Grid((find_gpu("h100"),), ("as is",), ("auto",), (1, 2))):
        plan = plan_source(source, replace(wanted, gpu=row.gpu, tensor_parallel_size=row.gpus))
        rank = plan.rank
        assert (row.weights_bytes, row.kv_pool_bytes) == (rank.weights_bytes, rank.kv_pool_bytes)
        assert row.added_bytes == rank.lora_bytes + rank.draft_bytes
        assert (row.tokens, row.free_bytes) == (plan.kv_cache.tokens, rank.free_bytes)


@pytest.mark.parametrize(
    "name",
    [
        "openai__gpt-oss-20b",
        "google__gemma-2-2b",
        "deepseek-ai__DeepSeek-V4-Flash",
        "Qwen__Qwen3-VL-8B-Instruct",
        "zai-org__GLM-5.1-FP8",
    ],
)
def test_sweep_row_with_gpu_specific_formats_equals_plan(name, tmp_path):
    """The cases are MXFP4 padded by kernel, GPUs without bfloat16, and configs without a dtype.

    One config has a cache format of its own, two have buffers for the tokens of a step.
    """
    shutil.copy(CONFIGS / f"{name}.json", tmp_path / "config.json")
    source = resolve_model(str(tmp_path))
    gpus = tuple(map(find_gpu, ("t4", "a100-80g", "h100", "b200", "rtx5090", "gb10")))
    for row in sweep(source, FLAGS, Grid(gpus, ("as is",), ("auto", "fp8"), (1, 8))):
        flags = replace(FLAGS, gpu=row.gpu, kv_cache_dtype=row.kv_cache_dtype, tensor_parallel_size=row.gpus)
        if row.refused:
            with pytest.raises(TonnageError):
                plan_source(source, flags)
            continue
        plan = plan_source(source, flags)
        assert (row.fits, row.weights_bytes) == (plan.fits, plan.rank.weights_bytes)
        assert (row.kv_pool_bytes, row.tokens) == (plan.rank.kv_pool_bytes, plan.kv_cache.tokens)


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("Qwen__Qwen3.5-27B", Deployment(engine="sglang", max_model_len=32768)),
        ("Qwen__Qwen3-0.6B", Deployment(engine="sglang", max_model_len=4096)),
        ("Qwen__Qwen3.5-27B", Deployment(engine="sglang", max_model_len=4096, mamba_full_memory_ratio=0.01)),
        ("Qwen__Qwen3.5-27B", Deployment(engine="vllm", max_model_len=2048, max_num_seqs=4000,
                                         max_num_batched_tokens=8192)),
    ],
    ids=["SGLang's states", "SGLang's limit", "SGLang without slots", "vLLM without blocks for states"],
)  # fmt: skip
def test_sweep_row_with_values_that_depend_on_the_pool_size_equals_the_plan(name, flags, tmp_path):
    """State slots, max_num_seqs and start failures are known only after the pool's size."""
    shutil.copy(CONFIGS / f"{name}.json", tmp_path / "config.json")
    source, asked = resolve_model(str(tmp_path)), (1000, 200)
    gpus = (find_gpu("h100-80g"), find_gpu("b200"))
    for row in sweep(source, flags, Grid(gpus, ("as is",), ("auto",), (1, 2)), [asked]):
        plan = plan_source(source, replace(flags, gpu=row.gpu, tensor_parallel_size=row.gpus))
        rank = plan.rank
        assert (row.fits, row.tokens, row.max_num_seqs) == (
            plan.fits, plan.kv_cache.tokens, plan.deployment.max_num_seqs
        )  # fmt: skip
        assert (row.kv_pool_bytes, row.free_bytes) == (rank.kv_pool_bytes, rank.free_bytes)
        assert row.max_concurrency == plan.kv_cache.max_concurrency
        found = plan.hold(*asked)
        assert (row.requests, row.requests_held) == ((found.running,), (found.at_once,))
        assert row.least_sequences == min(found.bounds[0], found.limit)
        least, _ = plan.intervals.get("max_concurrency", (plan.kv_cache.max_concurrency, 0))
        assert round(row.least_concurrency, 4) == round(least, 4)
        assert not row.stops or row.stops in plan.reasons
        assert bool(row.stops) == (plan.stops_with is not None and plan.reasons[-1] == row.stops)


def test_sweep_row_of_gguf_file_equals_plan(tmp_path):
    """llama.cpp keeps the file's types; other engines unpack them."""
    path = tmp_path / "m.gguf"
    path.symlink_to(demo_gguf())
    source = resolve_model(str(path))
    for engine in ("llama.cpp", "vllm"):
        flags = Deployment(engine=engine, max_model_len=2048)
        for row in sweep(source, flags, Grid((find_gpu("l4-24g"),), ("as is",), ("auto",), (1,))):
            plan = plan_source(source, replace(flags, gpu=row.gpu))
            assert (row.weights_bytes, row.free_bytes) == (plan.rank.weights_bytes, plan.rank.free_bytes)


def test_sweep_rejects_a_broken_checkpoint_with_the_error_of_the_plan_command(llama, tmp_path, capsys):
    shutil.copy(Path(llama) / "config.json", tmp_path / "config.json")
    header = b'{"a":{"dtype":"BF16","shape":[1],"data_offsets":[0,2]}}'
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(2))
    assert run([str(tmp_path), "--gpu", "h100-80g"]) == 2
    told = capsys.readouterr().err
    assert run([str(tmp_path), "--gpu", "h100-80g,l40s"]) == 2
    assert capsys.readouterr().err == told
    assert run([str(tmp_path), llama, "--gpu", "h100-80g"]) == 0
    assert told.removeprefix("tonnage: ").strip() in capsys.readouterr().out


def test_sweep_row_limited_by_draft_length_equals_plan(llama, tmp_path, capsys):
    """vLLM 0.33 limits the length to the draft's own context."""
    draft = json.loads((CONFIGS / "meta-llama__Llama-3.2-1B.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(draft | {"max_position_embeddings": 2048}))
    flags = replace(FLAGS, engine_version="0.33.0", speculative_model=str(tmp_path), num_speculative_tokens=4)
    source = resolve_model(llama)
    (row,) = sweep(source, flags, Grid((find_gpu("h100"),), ("as is",), ("auto",), (1,)))
    plan = plan_source(source, replace(flags, gpu=row.gpu))
    assert (row.max_model_len, row.max_concurrency) == (2048, plan.kv_cache.max_concurrency)
    assert (row.weights_bytes, row.free_bytes) == (plan.rank.weights_bytes, plan.rank.free_bytes)
    (note,) = row.notes
    assert note in plan.notes
    words = [
        llama,
        "--engine-version",
        "0.33.0",
        "--speculative-model",
        str(tmp_path),
        "--max-model-len",
        "8192",
    ]
    assert run([*words, "--gpu", "h100-80g,h200-141g"]) == 0
    assert capsys.readouterr().out.count(f"Note: {note}\n") == 1
    assert run([*words, "--gpu", "h100-80g", "--target-concurrency", "8"]) == 0
    assert "8 sequences of 2,048 tokens at once" in capsys.readouterr().out


def test_sweep_table_marks_rows_whose_start_would_fail(tmp_path, capsys):
    shutil.copy(CONFIGS / "Qwen__Qwen3.5-27B.json", tmp_path / "config.json")
    page = tmp_path / "page.html"
    flags = ["--max-num-seqs", "4000", "--max-model-len", "2048", "--max-num-batched-tokens", "8192"]
    assert run([str(tmp_path), *flags, "--gpu", "h100-80g,a100-80g", "--html", str(page)]) == 1
    out = capsys.readouterr().out
    assert out.count("no run") == 2
    assert "so would --enforce-eager" in out
    assert "so would --enforce-eager" in page.read_text()


def test_sweep_row_states_that_its_parallel_size_does_not_divide_the_model(llama):
    (row,) = sweep(resolve_model(llama), FLAGS, Grid((find_gpu("h100"),), ("as is",), ("auto",), (3,)))
    assert not row.fits
    assert "tensor-parallel-size" in row.refused


def test_cheapest_offers_meet_target_concurrency(llama):
    rows = sweep(resolve_model(llama), FLAGS, Grid(catalogue(), ("as is",), ("auto",), (1, 2, 4)))
    offers = cheapest(rows, 64)
    assert offers
    assert all(row.fits and row.max_concurrency >= 64 for row in offers)
    assert [row.cost for row in offers] == sorted(row.cost for row in offers)
    assert offers[0].usd_per_hour is not None


def test_plan_with_its_advice_applied_fits(llama):
    source = resolve_model(llama)
    flags = replace(FLAGS, gpu="t4", max_model_len=None)
    assert not plan_source(source, flags).fits
    advice = advise(source, flags)
    assert advice
    flag, value = advice[0].split(":")[0].split()
    names = {"--tensor-parallel-size": "tensor_parallel_size", "--max-model-len": "max_model_len"}
    assert plan_source(source, replace(flags, **{names[flag]: int(value)})).fits


def test_advice_for_long_context_is_largest_length_that_fits(llama):
    source = resolve_model(llama)
    flags = replace(FLAGS, device="cuda", device_memory=24 << 30, max_model_len=131072)
    advice = advise(source, flags)
    assert advice[0].startswith("--max-model-len ")
    length = int(advice[0].split(":")[0].split()[1])
    assert plan_source(source, replace(flags, max_model_len=length)).fits
    assert not plan_source(source, replace(flags, max_model_len=length + 512)).fits


def test_advice_suggests_a_larger_gpu_memory_utilization_if_it_is_too_small(llama):
    source, flags = resolve_model(llama), replace(FLAGS, gpu="h100", gpu_memory_utilization=5e-324)
    assert advise(source, flags)[0].startswith("--gpu-memory-utilization ")


def test_printed_vllm_serve_command_reproduces_the_plan(llama):
    """vLLM's serve line, read back as our flags, gives the same plan."""
    plan = make_plan(llama, replace(FLAGS, gpu="h100", tensor_parallel_size=2, kv_cache_dtype="fp8"))
    ours, theirs = serve_lines(plan)
    assert ours.startswith("tonnage serve ")
    words = shlex.split(theirs)
    assert words[:3] == ["vllm", "serve", llama]
    values = dict(zip(words[3::2], words[4::2], strict=True))
    assert values["--tensor-parallel-size"] == "2"
    back = Deployment(
        engine="vllm", gpu="h100", max_model_len=int(values["--max-model-len"]),
        max_num_seqs=int(values["--max-num-seqs"]), kv_cache_dtype=values["--kv-cache-dtype"],
        tensor_parallel_size=int(values["--tensor-parallel-size"]),
    )  # fmt: skip
    assert make_plan(llama, back).kv_cache == plan.kv_cache


def test_plan_command_writes_csv_and_html(llama, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert run([llama, "--gpu", "h100-80g", "--max-model-len", "8192", "--csv", "--html", str(page)]) == 0
    rows = list(csv.reader(io.StringIO(capsys.readouterr().out)))
    assert rows[0] == ["component", "bytes", "bounds"]
    assert int(next(row for row in rows if row[0] == "weights")[1]) > 16e9
    text = page.read_text()
    assert text.startswith("<!doctype html>")
    assert "http:" not in text  # no outside resource
    assert "https:" not in text
    assert (
        run([llama, "--sweep", "--gpu", "h100", "--json", "--max-model-len", "4096", "--html", str(page)]) == 0
    )
    out = json.loads(capsys.readouterr().out)
    assert {row["gpus"] for row in out["rows"]} == {1, 2, 4, 8}
    assert "class=bar" in page.read_text()
    assert run([llama, "--target-concurrency", "64", "--max-model-len", "8192"]) == 0
    assert "vllm serve" in capsys.readouterr().out
    assert run([llama, "--gpu", "h100", "--max-model-len", "8192", "--markdown"]) == 0
    assert capsys.readouterr().out.startswith("| component | bytes |")


def test_plan_that_does_not_fit_prints_advice(llama, capsys):
    assert run([llama, "--gpu", "t4", "--max-model-len", "8192"]) == 1
    out = capsys.readouterr().out
    assert "Does not fit" in out
    assert "Would fit with" in out


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        (["--gpu", "h1000"], "--gpu"),
        (["--engine", "trtllm"], "--engine"),
        (["--engine", "vllm", "--engine-version", "latest"], "--engine-version"),
        (["--gpu", "h100", "--tensor-parallel-size", "3"], "--tensor-parallel-size"),
        (["--gpu", "h100", "--decode-context-parallel-size", "2"], "--decode-context-parallel-size"),
        (["--tensor-parallel-size", "2"], "--tensor-parallel-size"),
        (["--gpu", "h100", "--pipeline-parallel-size", "99"], "--pipeline-parallel-size"),
        (["--engine", "llama.cpp", "--kv-cache-dtype", "q3_k"], "--kv-cache-dtype"),
        (["--cpu-offload-gb", "-1"], "--cpu-offload-gb"),
        (["--json", "--csv"], "--csv"),
    ],
)
def test_invalid_plan_flag_is_named_in_error(llama, capsys, flags, field):
    assert run([llama, *flags]) == 2
    assert field in capsys.readouterr().err


def test_lora_slot_bytes_equal_peft_shapes(llama):
    """The case is 2 slots of rank 8: A [8, in] and B [out, 8] in bf16.

    They exist for all seven projections, the embedding and the head. tests/server/vllm/served/test_adapters.py
    checks that vLLM allocates exactly these.
    """
    hidden, inner, kv, layers, vocabulary = 4096, 14336, 1024, 32, 128256
    projections = [(hidden, hidden), (hidden, kv), (hidden, kv), (hidden, hidden)]
    projections += [(hidden, inner), (hidden, inner), (inner, hidden)]
    expected = 2 * layers * sum(8 * (into + out) for into, out in projections) * 2
    expected += 2 * 2 * 8 * (vocabulary + hidden) * 2
    flags = replace(FLAGS, gpu="h100", enable_lora=True, max_loras=2, max_lora_rank=8)
    assert make_plan(llama, flags).rank.lora_bytes == expected


def test_cpu_offload_reduces_device_weights(llama):
    plain, moved = (
        make_plan(llama, replace(FLAGS, gpu="h100", cpu_offload_bytes=size)) for size in (0, 4 << 30)
    )
    assert plain.rank.weights_bytes - moved.rank.weights_bytes == 4 << 30
    assert moved.kv_cache.num_blocks > plain.kv_cache.num_blocks


def test_plan_notes_an_environment_variable_that_changes_vllms_memory(llama, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "3")
    plan = make_plan(llama, replace(FLAGS, kv_cache_memory_bytes=1 << 30, device_memory=64 << 30))
    assert any("VLLM_CPU_KVCACHE_SPACE=3" in note for note in plan.notes)


def test_draft_model_weights_and_kv_layers_are_counted(llama, tmp_path):
    """The draft adds its weights and 16 cache layers of half the head size."""
    folder = tmp_path / "draft"
    folder.mkdir()
    shutil.copy(CONFIGS / "meta-llama__Llama-3.2-1B.json", folder / "config.json")
    flags = replace(FLAGS, gpu="h100", speculative_model=str(folder), num_speculative_tokens=4)
    plan, alone = make_plan(llama, flags), make_plan(llama, replace(FLAGS, gpu="h100"))
    draft = make_plan(str(folder), replace(FLAGS, gpu="h100"))
    assert plan.rank.draft_bytes == draft.rank.weights_bytes
    per_block = plan.kv_cache.layout.bytes_per_block
    assert per_block == sum(p.kv_cache.layout.bytes_per_block for p in (alone, draft))
    shutil.copy(CONFIGS / "Qwen__Qwen3-0.6B.json", folder / "config.json")
    with pytest.raises(DeploymentError, match="vocabulary"):
        make_plan(llama, flags)


def test_pipeline_stages_have_the_same_number_of_kv_blocks(llama):
    """Two stages hold 16 layers with the embedding, and 16 layers with the head."""
    plan = make_plan(llama, replace(FLAGS, gpu="h100", pipeline_parallel_size=2))
    first, last = plan.ranks
    assert first.kv_pool_bytes == last.kv_pool_bytes == plan.kv_cache.num_blocks * 16 * 2 * 16 * 8 * 128 * 2
    whole = make_plan(llama, replace(FLAGS, gpu="h100"))
    tables = whole.rank.weights_bytes - first.weights_bytes - last.weights_bytes
    assert abs(tables) <= 131072 * 128 * 2  # the rotary table is on both


@pytest.fixture(scope="module")
def models(llama, tmp_path_factory):
    """Return the folders of Llama 3.1 8B and Qwen 3 0.6B."""
    folder = tmp_path_factory.mktemp("qwen")
    shutil.copy(CONFIGS / "Qwen__Qwen3-0.6B.json", folder / "config.json")
    return [llama, str(folder)]


BESIDE = [
    "--gpu", "h100-80g,l40s,2xa100-80g", "--quantization", "none,fp8,w4a16", "--kv-cache-dtype", "auto,fp8",
    "--max-model-len", "8192",
]  # fmt: skip


def test_sweep_of_models_and_gpus_keeps_requested_order(models, capsys):
    """Each row is the plan of its flags."""
    assert run([*models, *BESIDE, "--json", "--request", "2000+300", "--request", "8000+100"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert len(rows) == 2 * 3 * 3 * 2
    assert [row["model"] for row in rows] == [models[0]] * 18 + [models[1]] * 18
    assert [(row["gpus"], row["gpu"]) for row in rows[:18:6]] == [
        (1, "h100-80g"), (1, "l40s-48g"), (2, "a100-80g")
    ]  # fmt: skip
    for row in rows[::7]:
        scheme = None if row["quantization"] == "as is" else row["quantization"]
        found = plan_source(
            resolve_model(row["model"]),
            Deployment(
                engine="vllm", gpu=row["gpu"], tensor_parallel_size=row["gpus"], quantization=scheme,
                kv_cache_dtype=row["kv_cache_dtype"], max_model_len=8192,
            ),
        )  # fmt: skip
        assert (row["weights_bytes"], row["tokens"]) == (found.rank.weights_bytes, found.kv_cache.tokens)
        asked = [found.hold(2000, 300), found.hold(8000, 100)]
        assert row["requests"] == [request.running for request in asked]
        assert row["sequences"] == asked[0].running
        assert row["least_sequences"] == min(asked[0].bounds[0], asked[0].limit)
        assert row["usd_per_sequence"] == row["usd_per_hour"] / row["least_sequences"]


@pytest.mark.parametrize(("least", "each"), [(0.9, None), (1.0, 2.0), (1.6, 1.25), (4.0, 0.5)])
def test_price_per_sequence_needs_a_lower_bound_of_one_sequence(least, each) -> None:
    row = SweepRow("h100-80g", 1, "as is", "auto", True, usd_per_hour=2.0, least_sequences=least)
    assert row.usd_per_sequence == each
    assert replace(row, usd_per_hour=None).usd_per_sequence is None
    assert replace(row, fits=False).usd_per_sequence is None


def test_sweep_table_prints_the_sequence_length(models, capsys):
    """Without the length, the model with the shortest sequences would look cheapest."""
    llama, other = models
    two = [llama, other, "--gpu", "h100-80g"]
    run(two)
    assert f"Sequences have each model's own length: {llama} 131,072, {other} 40,960 tokens" in stdout(capsys)
    run([*two, "--max-model-len", "8192"])
    assert "Sequences have 8,192 tokens\n" in stdout(capsys)
    run([*two, "--request", "2000+300"])
    assert "equences are of" not in stdout(capsys)
    run([*two, "--request", "2000+300", "--request", "500+100"])
    assert '"at least" and "each" count requests of 2,000+300 tokens, the first length\n' in stdout(capsys)


def test_sweep_lists_a_gpu_given_by_two_names_once(llama, capsys):
    run([llama, "--gpu", "h100,h100-80g,2xh100,2xh100-80g", "--json"])
    assert [row["gpus"] for row in json.loads(stdout(capsys))["rows"]] == [1, 2]


def test_sweep_lists_a_model_given_twice_once(llama, capsys):
    run([llama, llama, "--gpu", "h100,l40s", "--json"])
    assert len(json.loads(stdout(capsys))["rows"]) == 2


def stdout(capsys):
    return capsys.readouterr().out


def test_sweep_table_sorted_by_price_in_text_and_html(models, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    page = tmp_path / "page.html"
    assert run([*models, *BESIDE, "--sort", "price-per-sequence", "--top", "5", "--html", str(page)]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert lines[0].split() == [
        *("model", "GPU", "format", "KV", "weights", "pool", "tokens", "sequences", "at", "least"),
        *("USD/h", "each"),
    ]  # fmt: skip
    each = [float(line.split()[-1]) for line in lines[1:6]]
    assert each == sorted(each)
    assert lines[6] == "... the first 5 of 36 by price-per-sequence (--sort, --top; --json lists all)"
    assert any("on demand" in line for line in lines)  # where the prices are from
    assert page.read_text().count("class=bar") == 5


def test_sweep_with_top_but_without_sort_states_the_number_of_all_rows(llama, capsys):
    assert run([llama, "--gpu", "h100-80g,l40s,a100-80g", "--max-model-len", "8192", "--top", "2"]) == 0
    assert "... the first 2 of 3 (--sort, --top; --json lists all)" in capsys.readouterr().out.splitlines()


def test_price_flag_overrides_the_price_list_and_a_missing_price_is_none(llama, capsys):
    flags = [llama, "--gpu", "h100-80g,gaudi3", "--max-model-len", "8192"]
    assert run([*flags, "--price", "h100=2.10", "--json"]) == 0
    own, none = json.loads(capsys.readouterr().out)["rows"]
    assert (own["usd_per_hour"], own["price_source"]) == (2.1, "--price")
    assert (none["usd_per_hour"], none["price_source"]) == (None, "")
    assert run(flags) == 0
    out = capsys.readouterr().out
    assert "no price: gaudi3-128g (--price gaudi3-128g=USD)" in out
    assert "Hyperstack, on demand, 2026-08-26" in out


def test_sweep_row_of_a_missing_model_has_an_error_instead_of_figures(models, capsys):
    assert run([models[1], "no-such-model", "--gpu", "h100", "--max-model-len", "4096", "--json"]) == 0
    found, missing = json.loads(capsys.readouterr().out)["rows"]
    assert found["fits"]
    assert (missing["model"], missing["fits"]) == ("no-such-model", False)
    assert "neither a folder" in missing["refused"]


def test_several_models_without_gpu_are_planned_for_cpu(models, capsys):
    assert run([*models, "--max-model-len", "512", "--kv-cache-memory-bytes", "128MiB"]) in (0, 1)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("For this machine's CPU, as no GPU was named")
    assert lines[3:7:2] == [f"{model}:" for model in models]
    assert [line.split()[0] for line in lines[4:7:2]] == ["cpu", "cpu"]


def test_sweep_table_fits_the_terminal_width(models, capsys, monkeypatch):
    """A narrow terminal gets the models as titles, then fewer columns; values that never differ have a line."""
    flags = [*models, "--gpu", "h100-80g,l40s,2xa100-80g", "--max-model-len", "8192"]
    for width in (80, 60, 400):
        monkeypatch.setenv("COLUMNS", str(width))
        assert run(flags) == 0
        lines = capsys.readouterr().out.splitlines()
        table = [line for line in lines if line.startswith(("GPU", "h100", "l40s", "2 x "))]
        assert len(table) == 7 if width < 400 else len(table) == 0
        assert all(len(line) <= width for line in table)
        assert "All rows: format as is, KV auto" in lines
        assert ("Not shown for width: tokens" in "\n".join(lines)) == (width == 60)
    monkeypatch.setenv("COLUMNS", "80")
    assert run([models[0], "--sweep", "--gpu", "rtx-pro-6000-96g", "--max-model-len", "8192"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines if " x rtx" in line)


def test_gpu_count_in_gpu_flag_sets_tensor_parallel_size(llama, capsys):
    assert run([llama, "--gpu", "2xa100-80g", "--max-model-len", "8192", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["deployment"]["tensor_parallel_size"] == 2


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        (["--gpu", "h100,l40s", "--explain"], "--explain"),
        (["--gpu", "h100,", "--json"], "--gpu"),
        (["--gpu", "0xh100"], "--gpu"),
        (["--gpu", "2xh100", "--tensor-parallel-size", "4"], "--gpu"),
        (["--gpu", "h100,h1000"], "--gpu"),
        (["--gpu", "h100", "--quantization", "fp8,fp9"], "--quantization"),
        (["--gpu", "h100,l40s", "--sort", "name"], "--sort"),
        (["--gpu", "h100,l40s", "--compare", "0.30.0", "0.32.0"], "--gpu"),
        (["--gpu", "h100", "--sort", "price"], "--sort"),
        (["--gpu", "h100,l40s", "--pipeline-parallel-size", "2"], "--pipeline-parallel-size"),
        (["--gpu", "h100,l40s", "--data-parallel-size", "2"], "--data-parallel-size"),
        (["--gpu", "h100,l40s", "--device-memory", "80GiB"], "--device-memory"),
        (["--gpu", "h100", "--price", "h100=2"], "--price"),
        (["--gpu", "h100,l40s", "--top", "0"], "--top"),
        (["--gpu", "h100,2xa100", "--tensor-parallel-size", "4"], "--gpu"),
        (["--gpu", "h100", "--compare", "0.19.0", "0.33.0", "--sort", "nope"], "--sort"),
        (["--gpu", "h100", "--compare", "0.19.0", "0.33.0", "--top", "x"], "--top"),
        (["--gpu", "h100", "--compare", "0.19.0", "0.33.0", "--price", "bogus"], "--price"),
        (["--target-concurrency", "8", "--sort", "price"], "--sort"),
    ],
)
def test_sweep_rejects_invalid_or_incompatible_flags(llama, capsys, flags, field):
    assert run([llama, *flags]) == 2
    assert f"{field}: " in capsys.readouterr().err


def test_plan_prints_the_concurrency_of_the_pool_and_max_num_seqs_if_that_is_lower(tmp_path, capsys):
    """LFM2's state is small: its pool holds ten times --max-num-seqs, and the plan prints both."""
    shutil.copy(CONFIGS / "LiquidAI__LFM2-1.2B.json", tmp_path / "config.json")
    flags = replace(FLAGS, gpu="h100-80g", max_model_len=512, max_num_seqs=None)
    plan = plan_source(resolve_model(str(tmp_path)), flags)
    assert plan.kv_cache.max_concurrency > 1024 == plan.running
    line = next(line for line in plan.capacity_lines() if line.startswith("Concurrency"))
    assert f"{plan.kv_cache.max_concurrency:.2f}x" in line
    assert line.endswith("; --max-num-seqs lets 1,024 run")
    (row,) = sweep(resolve_model(str(tmp_path)), flags, Grid((find_gpu("h100"),), ("as is",), ("auto",), (1,)))
    assert (row.sequences, row.max_concurrency) == (1024, plan.kv_cache.max_concurrency)
    assert run([str(tmp_path), "--gpu", "h100", "--max-model-len", "512", "--json"]) == 0
    cache = json.loads(capsys.readouterr().out)["kv_cache"]
    assert cache["max_running"] == 1024 < cache["max_concurrency"]
    assert run([str(tmp_path), "--gpu", "h100,l40s", "--request", "100+100"]) == 0
    assert re.search(r" 1,024 of \d+,\d{3} ", capsys.readouterr().out)
    few = cheapest([row], 2000)
    assert few == []  # the pool would hold them, but --max-num-seqs limits the running sequences
