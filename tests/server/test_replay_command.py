"""The command ``tonnage replay``, called as by a user."""

from __future__ import annotations

import json
import shlex
import threading
from pathlib import Path
from typing import Any

import pytest
from html_pages import Document

from tonnage.cache.admission import auto
from tonnage.cache.admission.policy import VLLM
from tonnage.cache.admission.rehearsal import rehearse
from tonnage.planner.deployment import Deployment
from tonnage.planner.planning.build import make_plan
from tonnage.server.cli import main
from tonnage.server.commands.replay import _plan, _step_time, parser

DATA = Path(__file__).parents[1] / "data"
TRACE = str(DATA / "traces" / "azure_conversation_300.csv")


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text((DATA / "configs" / "meta-llama__Meta-Llama-3.1-8B.json").read_text())
    return str(folder)


def test_replay_prints_table_json_and_html(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [TRACE, "--model", model, "--gpu", "h100-80g", "--limit", "40", "--max-model-len", "8192"]
    page = tmp_path / "page.html"
    assert main(["replay", *flags, "--html", str(page)]) == 0
    table = capsys.readouterr().out
    assert "40 finished, 0 refused" in table
    assert page.read_text().count("<svg") == 4
    shown = Document(page.read_text())
    assert shown.command == shlex.join(["tonnage", "replay", *flags, "--html", str(page)])
    assert (shown.facts["trace"], shown.facts["device"]) == (Path(TRACE).name, "h100-80g")
    assert main(["replay", *flags, "--json", "--policy", "predictive"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["finished"], record["preemptions"], record["policy"]) == (40, 0, "predictive")


def test_replay_of_auto_mode_runs_its_simulations_in_the_main_thread(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replay's clock is simulated, so a rehearsal in a thread would end late and at a random step."""
    rehearsed = []

    def counted(*args: Any) -> Any:
        assert threading.current_thread() is threading.main_thread()
        rehearsed.append(args[-1])
        return rehearse(*args)

    monkeypatch.setattr(auto, "rehearse", counted)
    flags = [TRACE, "--model", model, "--gpu", "l4-24g", "--max-model-len", "8192", "--max-num-seqs", "64"]
    assert main(["replay", *flags, "--json", "--policy", "auto"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["finished"], record["policy"]) == (300, "auto")
    assert set(rehearsed) == {VLLM, *auto.RULES}


@pytest.mark.parametrize("name", ["meta-llama__Meta-Llama-3.1-8B", "zai-org__GLM-5.1"])
def test_simulated_step_time_counts_the_kv_bytes_of_all_ranks_once(name: str, tmp_path: Path) -> None:
    """Eight ranks read the K/V of all of them in an eighth of the time.

    The models include GLM, whose blocks hold pages of two sizes: latents and the keys of its indexer.
    """
    (tmp_path / "config.json").write_text((DATA / "configs" / f"{name}.json").read_text())
    on = Deployment(engine="vllm", gpu="h200", tensor_parallel_size=8, num_gpu_blocks_override=1000)
    plan = make_plan(str(tmp_path), on)
    times = _step_time(parser().parse_args([TRACE, "--model", str(tmp_path), "--gpu", "h200-141g"]), plan)
    assert times.devices == 8
    assert times.kv_bytes_per_token == 8 * plan.kv_cache.layout.bytes_per_token
    assert times.weights_bytes == 8 * plan.rank.weights_bytes
    assert times.parameters == plan.model.active_parameters
    assert (times.parameters < plan.model.parameters / 10) is ("GLM" in name)  # 8 of 256 experts


@pytest.mark.parametrize("where", [(), ("--gpu", "h100-80g"), ("--gpu-memory-utilization", "0.5")])
def test_replay_and_plan_use_the_same_default_gpu_memory_utilization(
    where: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """On a GPU, both use vLLM's default; on this CPU, the default of the hf engine."""
    replayed = _plan(parser().parse_args([TRACE, "--model", "demo", *where]))
    assert main(["plan", "demo", *where, "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert replayed.deployment.gpu_memory_utilization == planned["deployment"]["gpu_memory_utilization"]
    assert replayed.kv_cache.usable_blocks == planned["kv_cache"]["usable_blocks"]


def test_trace_with_custom_columns_is_replayed(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "own.csv"
    own.write_text("t,in,out\n0,100,5\n0.5,200,5\n2,50,5\n")
    flags = [str(own), "--columns", "arrival=t,prompt_tokens=in,output_tokens=out", "--max-model-len", "8192"]
    assert main(["replay", *flags, "--model", model, "--gpu", "h100-80g", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["finished"] == 3
    assert main(["plan", model, "--gpu", "h100-80g", "--trace", *flags, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["trace"]["requests"] == 3
    assert main(["replay", *flags[:2], "arival=t", "--model", model, "--gpu", "h100-80g"]) == 2
    assert "did you mean arrival?" in capsys.readouterr().err


def test_replay_of_hybrid_model_reports_state_caching(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text((DATA / "configs" / "Qwen__Qwen3.5-35B-A3B.json").read_text())
    flags = [TRACE, "--model", str(tmp_path), "--gpu", "h200-141g", "--limit", "20", "--max-model-len", "8192"]
    assert main(["replay", *flags]) == 0
    table = capsys.readouterr().out
    assert "20 finished, 0 refused" in table
    assert "recurrent states are cached at ends of blocks, 1,056 tokens" in table
    assert main(["replay", *flags, "--no-enable-prefix-caching"]) == 0
    assert "recurrent states" not in capsys.readouterr().out


def test_replay_with_search_gpus_returns_the_number_of_gpus_for_the_wait_target(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [TRACE, "--model", model, "--gpu", "h100-80g", "--max-model-len", "8192", "--limit", "60"]
    assert main(["replay", *flags, "--search-gpus", "--wait-target", "1s", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["gpus"] == 1
    assert main(["replay", *flags, "-tp", "2", "--search-gpus", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["gpus"], list(found["waits_p99"])) == (2, ["2"])


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--gpu", "h100-80g", "--search-gpus", "--wait-target", "soon"], "--wait-target"),
        (["--gpu", "h100-80g", "--policy", "greedy", "--length-quantile", "0.5"], "length_quantile"),
        (["--gpu", "h100-80g", "--scale", "0"], "--scale"),
        (["--kv-cache-memory-bytes", "1GiB"], "--memory-bandwidth"),
        (["--gpu", "h100-80g", "--watermark", "2"], "watermark"),
        (["--gpu", "h100-80g", "--limit", "0"], "--limit"),
        (["--gpu", "h100-80g", "--max-tokens", "0"], "--max-tokens"),
        (["--gpu", "h100-80g", "--memory-bandwidth", "0"], "--memory-bandwidth"),
        (["--gpu", "h100-80g", "--memory-bandwidth", "nan"], "--memory-bandwidth"),
        (["--gpu", "h100-80g", "--flops", "0"], "--flops"),
        (["--gpu", "h100-80g", "--flops", "inf"], "--flops"),
        *(
            (["--gpu", "h100-80g", flag, value], flag)
            for flag in (
                "--max-model-len",
                "--max-num-seqs",
                "--max-num-batched-tokens",
                "--kv-cache-memory-bytes",
                "--gpu-memory-utilization",
                "--scale",
                "--limit",
                "--max-tokens",
                "--memory-bandwidth",
                "--flops",
            )
            for value in ("0", "-1")
        ),
        *(
            (["--gpu", "h100-80g", flag, str(10**12)], flag)
            for flag in (
                "--max-model-len",
                "--max-num-seqs",
                "--max-num-batched-tokens",
                "--gpu-memory-utilization",
            )
        ),
        (["--gpu", "h100-80g", "--length-quantile", "0"], "length_quantile"),
        (["--gpu", "h100-80g", "--watermark", "-1"], "watermark"),
    ],
)
def test_error_for_an_invalid_replay_flag_names_the_flag(
    model: str, flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", TRACE, "--model", model, "--max-model-len", "2048", *flags]) == 2
    assert says in capsys.readouterr().err


def test_error_for_an_invalid_trace_line_names_the_line_number(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.csv"
    bad.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,10,5\n2023-11-16 18:15:47,x,5\n"
    )
    flags = ["replay", str(bad), "--model", model, "--gpu", "h100-80g", "--max-model-len", "8192"]
    assert main(flags) == 2
    assert "line 3" in capsys.readouterr().err
    assert main([*flags, "--skip-bad-lines", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["skipped_lines"] == 1


@pytest.mark.parametrize(
    "name",
    ["LiquidAI__LFM2-1.2B", "Qwen__Qwen3.5-27B", "meta-llama__Llama-4-Scout-17B-16E-Instruct"],
    ids=["short convolutions", "gated delta, blocks of 784", "chunked"],
)
def test_models_with_recurrent_states_or_chunked_attention_are_replayed(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text((DATA / "configs" / f"{name}.json").read_text())
    flags = [TRACE, "--model", str(tmp_path), "--gpu", "b300", "--kv-cache-memory-bytes", "20GiB"]
    flags += ["--max-num-seqs", "256"]  # with its default of 1,024 vLLM does not start: a state needs a block
    speed = ["--memory-bandwidth", "8000", "--flops", "1000", "--max-model-len", "8192", "--limit", "40"]
    assert main(["replay", *flags, *speed, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["finished"], record["preemptions"]) == (40, 0)
