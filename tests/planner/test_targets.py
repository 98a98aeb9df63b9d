"""Tests of ``tonnage plan --request P+O --target-concurrency N``: which GPUs, which flags, at what price."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace

import pytest

from tonnage.cache.replay.step_time import StepTime
from tonnage.planner import plan
from tonnage.planner.command import run
from tonnage.planner.deployment import Deployment
from tonnage.planner.devices.catalogue import Gpu, find_gpu
from tonnage.planner.families.registry import build_architecture
from tonnage.planner.planning.size import Sizer
from tonnage.planner.source.resolve import resolve_model
from tonnage.planner.sweep.grid import Grid, sweep
from tonnage.planner.sweep.offers import FOLD, Offer, pareto
from tonnage.planner.sweep.rows import SweepRow
from tonnage.planner.sweep.speed import OVERHEAD, Speed, Work, speed_of, work_of

GIB = 1 << 30
ASKED = ("--engine-version", "0.33.0", "--request", "4000+500", "--target-concurrency", "200")


@pytest.fixture
def qwen(config_of, folder_with):
    return folder_with(config_of("Qwen/Qwen3-32B"))


def test_concurrency_target_lists_the_smallest_layouts_with_pool_speed_and_price(qwen, capsys):
    assert run([qwen, *ASKED]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0] == "200 requests of 4,000+500 tokens at once, max_model_len 5,120:"
    # 282 blocks of 16 tokens x 64 layers x 8 KV heads x 128 x K and V x 2 bytes; the last token is not stored
    need = 200 * 282 * 16 * 64 * 8 * 128 * 2 * 2
    assert lines[1].startswith(f"KV pool needed: {need / GIB:.2f} GiB (1.10 GiB each); --kv-cache-dtype fp8: ")
    assert "Weights: 61.03 GiB" in lines
    first = lines.index("GPUs needed:") + 1
    needed = dict(line.strip().split(" x ") for line in lines[first : lines.index("", first)])
    assert "h200-141g" in needed["2"]
    assert "a100-80g" in needed["4"]
    table = lines[next(n for n, line in enumerate(lines) if line.startswith("GPUs   ")) :]
    titles = "GPUs -tp -dp KV pool GiB holds at least tok/s ms/tok USD/h"
    assert [title for title in table[0].split() if title != "-pp"] == titles.split()
    rows = table[1 : table.index("")]
    counts = [int(row.split()[0]) for row in rows]
    assert counts == sorted(counts)
    assert counts[0] == 1
    assert "tok/s and ms/tok are rough: a roofline" in out
    assert "vllm serve" in out
    assert all(len(line) <= 80 for line in table[: table.index("")])


def test_plan_with_the_flags_of_each_layout_for_a_target_concurrency_holds_its_requests(qwen, capsys):
    assert run([qwen, *ASKED, "--json"]) == 0
    layouts = json.loads(capsys.readouterr().out)["layouts"]
    assert layouts
    for layout in layouts:
        found = plan(
            qwen, engine_version="0.33.0", gpu=layout["gpu"], max_model_len=5120,
            max_num_seqs=layout["running_per_replica"], kv_cache_dtype=layout["kv_cache_dtype"],
            tensor_parallel_size=layout["tensor_parallel_size"],
            pipeline_parallel_size=layout["pipeline_parallel_size"],
        ).hold(4000, 500)  # fmt: skip
        assert found.bounds[0] * layout["data_parallel_size"] >= 200
        replica = layout["tensor_parallel_size"] * layout["pipeline_parallel_size"]
        assert layout["gpus"] == replica * layout["data_parallel_size"]
        assert layout["rough_tokens_per_second"] > 0


def test_serve_commands_are_printed_only_for_the_first_layout_of_a_target(qwen, capsys):
    assert run([qwen, *ASKED, "--gpu", "a100-80g", "--serve-line"]) == 0
    ours, theirs = capsys.readouterr().out.splitlines()
    assert ours.startswith("tonnage serve ")
    words = shlex.split(theirs)
    values = dict(zip(words[3::2], words[4::2], strict=True))
    assert int(values["--tensor-parallel-size"]) * int(values.get("--data-parallel-size", 1)) == 4
    assert values["--max-model-len"] == "5120"


def test_layouts_for_a_number_of_users_are_planned_without_network(monkeypatch, capsys, tmp_path):
    """200 users, 4k prompts, 500 tokens, Qwen3-32B: which GPUs, which flags, what price, as in the README."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    asked = ["Qwen/Qwen3-32B", "--request", "4000+500", "--target-concurrency", "200"]
    assert run(asked) == 0
    out = capsys.readouterr().out
    # GPUs, -tp, -dp, KV cache ... USD an hour
    assert re.search(r"^\d+ x \S+ +\d+ +\d+ (?:auto|fp8) .* \d+\.\d\d$", out, re.M)
    assert "the config.json that Tonnage carries for Qwen/Qwen3-32B was used" in out
    assert run([*asked, "--gpu", "h100-80g", "--serve-line"]) == 0
    _, theirs = capsys.readouterr().out.splitlines()
    assert theirs.startswith("vllm serve Qwen/Qwen3-32B --max-model-len 5120 --max-num-seqs ")
    assert "--max-num-batched-tokens" not in theirs


def test_sweep_with_a_concurrency_target_also_tries_smaller_quantizations(qwen, capsys):
    assert run([qwen, *ASKED, "--gpu", "h100-80g", "--sweep", "--json"]) == 0
    layouts = json.loads(capsys.readouterr().out)["layouts"]
    assert {layout["quantization"] for layout in layouts} > {"as is"}
    assert min(layout["gpus"] for layout in layouts) == 2  # as is: 4


def test_sweep_counts_the_requests_that_fit_for_each_given_length(qwen, capsys):
    assert run([qwen, "--sweep", "--gpu", "h200", "--request", "4000+500", "--request", "100+20"]) == 0
    titles = capsys.readouterr().out.splitlines()[2]
    assert "4000+500" in titles
    assert "100+20" in titles


def test_concurrency_target_above_one_replicas_capacity_adds_replicas(qwen, capsys):
    assert run([qwen, *ASKED[:-1], "5000", "--gpu", "h100-80g", "--json"]) == 0
    layouts = json.loads(capsys.readouterr().out)["layouts"]
    assert all(layout["data_parallel_size"] > 1 for layout in layouts)
    assert all(layout["running_per_replica"] * layout["data_parallel_size"] >= 5000 for layout in layouts)


def test_request_longer_than_the_model_is_rejected(qwen, capsys):
    assert run([qwen, "--request", "90K+1K", "--target-concurrency", "2"]) == 2
    assert "above max_model_len 40,960" in capsys.readouterr().err


def test_requests_of_a_model_with_compressed_kv_layers_count_as_full_sequences(config_of, folder_with, capsys):
    folder = folder_with(config_of("deepseek-ai/DeepSeek-V4-Flash"))
    assert run([folder, "--engine-version", "0.32.0", *ASKED[2:]]) == 0
    assert "200 sequences of 4,500 tokens at once, max_model_len 4,500:" in capsys.readouterr().out


def test_concurrency_target_beyond_every_gpu_prints_that_no_layout_fits(config_of, folder_with, capsys):
    folder = folder_with(config_of("moonshotai/Kimi-K2-Instruct"))
    assert run([folder, *ASKED, "--gpu", "t4"]) == 1
    assert "No layout of up to 8 GPUs of one type holds a single request" in capsys.readouterr().out


def _offer(gpus: int, usd: float, seconds: float, kv: str = "auto") -> Offer:
    return Offer(SweepRow("g", gpus, "as is", kv, True), 1, 1, usd, Speed(seconds, 1 / seconds))


def test_layout_for_a_concurrency_target_is_left_out_if_a_better_one_is_nearly_equal():
    small, faster, equal = _offer(1, 4, 0.05), _offer(2, 8, 0.02), _offer(2, 4 / (1 + FOLD), 0.05 / (1 + FOLD))
    lossy = _offer(1, 4, 0.05, "fp8")
    assert pareto([small, lossy, faster, equal]) == [small, faster]


def _gpu(**changes) -> Gpu:
    return replace(find_gpu("h100"), bandwidth=1e12, flops=1e14, link=1e11, **changes)


def test_planned_step_time_includes_all_reduces_of_tensor_parallel_ranks():
    """A token's hidden states are all-reduced twice per layer: 3/2 of the bytes on each of four links."""
    work = replace(Work(5 * 10**9), reduced=2 * 32 * 4096 * 2)
    flags = {"weights_bytes": 10**10, "read_bytes": 0, "running": 100, "prompt": 0, "output": 1}
    alone = speed_of(replace(work, reduced=0), _gpu(), tensor=4, **flags)
    four = speed_of(work, _gpu(), tensor=4, **flags)
    assert four.step_seconds - alone.step_seconds == pytest.approx(100 * 2 * 32 * 4096 * 2 * 1.5 / 1e11)
    mesh = speed_of(work, _gpu(mesh=6), tensor=4, **flags)  # 3 of the 6 links lead to the other ranks
    assert mesh.step_seconds - alone.step_seconds == pytest.approx(2 * (four.step_seconds - alone.step_seconds))
    assert speed_of(work, replace(_gpu(), link=None), tensor=4, **flags) is None


def test_planned_step_time_reads_weights_once_per_micro_batch_of_a_pipeline():
    flags = {"weights_bytes": 10**10, "read_bytes": 0, "running": 64, "prompt": 0, "output": 1}
    one = speed_of(Work(5 * 10**9), _gpu(), **flags)
    two = speed_of(Work(5 * 10**9), _gpu(), stages=2, **{**flags, "weights_bytes": 5 * 10**9})
    # Each of two groups of 32 requests reads half of the weights on each of two stages.
    assert two.step_seconds == pytest.approx(one.step_seconds + OVERHEAD)


def test_planned_prefill_time_of_fp8_weights_uses_the_gpus_fp8_peak():
    flags = {"weights_bytes": 1, "read_bytes": 0, "running": 1000, "prompt": 0, "output": 1}
    half, fp8 = (speed_of(Work(10**10), _gpu(fp8_flops=2e14), scheme=name, **flags) for name in ("none", "fp8"))
    assert half.step_seconds - OVERHEAD == pytest.approx(2 * (fp8.step_seconds - OVERHEAD))
    a100 = replace(_gpu(), fp8_flops=None)  # FP8 weights become 16-bit operands
    assert speed_of(Work(10**10), a100, scheme="fp8", **flags) == half


def test_model_larger_than_one_machine_gets_pipeline_stages(config_of, folder_with, capsys):
    """2.4T parameters on H200s: 4.4 TiB of weights on machines of 1.1 TiB."""
    folder = folder_with(config_of("Qwen/Qwen3.8-2.4T-A95B"))
    assert run([folder, *ASKED[:-1], "20", "--gpu", "h200", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)["layouts"][0]
    sizes = first["tensor_parallel_size"], first["pipeline_parallel_size"], first["data_parallel_size"]
    assert sizes == (8, 5, 1)
    assert run([folder, *ASKED[:-1], "20", "--gpu", "h200"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^40 x h200-141g +8 +5 +1 auto ", out, re.M)
    assert "--tensor-parallel-size 8 --pipeline-parallel-size 5" in out
    assert "over 5 machines" in out


def test_each_layout_with_pipeline_stages_equals_its_own_plan(qwen, capsys):
    """The layouts of PCIe GPUs include pipelines; each row has the bytes of its own plan."""
    source = resolve_model(qwen)
    flags = Deployment(engine="vllm", engine_version="0.33.0", max_model_len=5120, max_num_seqs=200)
    gpus = tuple(find_gpu(name) for name in ("a40", "l40s"))
    rows = sweep(source, flags, Grid(gpus, ("as is",), ("auto", "fp8"), (1, 2), (2, 4)), [(4000, 500)])
    assert len(rows) == 16
    for row in rows:
        size = Sizer(source).size(
            replace(
                flags, gpu=row.gpu, kv_cache_dtype=row.kv_cache_dtype, tensor_parallel_size=row.tensor,
                pipeline_parallel_size=row.stages,
            )
        )  # fmt: skip
        assert row.weights_bytes == size.worst.rank.weights_bytes
        assert row.kv_pool_bytes == size.worst.rank.kv_pool_bytes
        assert row.tokens == size.held.tokens
        assert row.fits == (not size.reasons)
        assert row.replica_pool_bytes == sum(stage.rank.kv_pool_bytes for stage in size.stages) * row.tensor


def test_layouts_for_a_concurrency_target_keep_the_given_number_of_pipeline_stages(qwen, capsys):
    assert run([qwen, *ASKED, "--gpu", "a40", "-pp", "2", "--json"]) == 0
    layouts = json.loads(capsys.readouterr().out)["layouts"]
    assert {layout["pipeline_parallel_size"] for layout in layouts} == {2}


def test_planned_speed_equals_the_roofline_that_replay_uses():
    step = StepTime(10**10, 5 * 10**9, 10**5, 1e12, 1e14)
    speed = speed_of(
        Work(5 * 10**9), _gpu(), weights_bytes=10**10, read_bytes=10**5 * 1000, running=64, prompt=0, output=1
    )
    assert speed is not None
    assert speed.step_seconds == pytest.approx(step.seconds(64, 64 * 1000))
    assert step.overhead == OVERHEAD


@pytest.mark.parametrize(
    ("name", "billions"),
    [("Qwen/Qwen3-30B-A3B", 3.0), ("openai/gpt-oss-120b", 5.1), ("deepseek-ai/DeepSeek-V3", 37.0)],
)
def test_parameters_computed_per_token_agree_with_the_model_card(config_of, name, billions):
    """The model cards give 3.3, 5.1 and 37 billion; the embedding, which is only looked up, counts in some."""
    work = work_of(build_architecture(config_of(name)))
    assert work.computed() == pytest.approx(billions * 1e9, rel=0.1)
    assert work.read_share(1) < 0.2 < 0.8 < work.read_share(1000)
