"""A flag of ``tonnage plan`` means the same in every command: declared once, left out everywhere alike."""

from __future__ import annotations

import argparse
import ast
import json
import shlex
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from tonnage.planner.api import plan
from tonnage.planner.command import SEVERAL
from tonnage.planner.deployment import Deployment
from tonnage.planner.engines.log import LogFigures
from tonnage.planner.errors import DeploymentError
from tonnage.planner.fitlog.log_flags import deployment_of
from tonnage.planner.flags import flags_of
from tonnage.planner.planning.advice import serve_lines
from tonnage.planner.planning.build import make_plan
from tonnage.planner.plans import Plan
from tonnage.planner.training.setup import TrainingSetup
from tonnage.server.cli import COMMANDS, main
from tonnage.server.commands import replay, replicas
from tonnage.server.commands.launch import _made_by_vllm, make_engine, settings_from
from tonnage.server.engines.vllm.arguments import engine_arguments
from tonnage.server.settings import PLANNED, Settings, load_settings

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"
GPU = "h100-80g"
OURS, TRAINING = flags_of(Deployment), flags_of(TrainingSetup)


def parsers() -> dict[str, argparse.ArgumentParser]:
    """Of every command that has one."""
    modules = {name: import_module(home) for name, (home, _) in COMMANDS.items()} | {"replicas": replicas}
    found = {name: module.parser() for name, module in modules.items() if hasattr(module, "parser")}
    assert found.keys() >= {"plan", "train", "fit-log", "replay", "serve", "verify", "replicas"}
    return found


PARSERS = parsers()


def test_model_commands_accept_a_hub_token_and_exclude_it_from_settings() -> None:
    takes = {name for name, found in PARSERS.items() if "--hf-token" in found._option_string_actions}
    assert takes == {"plan", "replicas", "train", "fit-log", "replay", "serve", "verify", "watch", "doctor"}
    action = PARSERS["serve"]._option_string_actions["--hf-token"]
    assert (action.dest, action.default) == (argparse.SUPPRESS, argparse.SUPPRESS)


@pytest.mark.parametrize("command", PARSERS)
def test_options_of_the_plan_command_are_generated_from_the_deployment_fields(command: str) -> None:
    """Reader, help and default: nothing of it is the command's own."""
    known = OURS | TRAINING if command == "train" else OURS
    options = {flag.option: flag for flag in known.values()}
    shared = 0
    for action in PARSERS[command]._actions:
        for flag in {options[option] for option in action.option_strings if option in options}:
            assert action.dest == flag.name
            several = SEVERAL.get(flag.name, "") if command in ("plan", "replicas") else ""
            assert action.help == flag.help_line + several
            assert action.type == (None if flag.kind == "bool" else flag.read)
            assert action.default in (None, argparse.SUPPRESS)
            assert action.choices is None
            shared += 1
    least = {"plan": len(OURS), "replicas": len(OURS), "train": len(TRAINING), "fit-log": 4, "replay": 7}
    assert shared >= least.get(command, len(PLANNED) if command in ("serve", "verify") else 0)


def test_flags_of_the_plan_are_declared_in_one_place() -> None:
    """No option, field of a model or default is written where the field of Deployment could be read."""
    options = {flag.option for flag in OURS.values()}
    found = []
    for package in ("planner", "server", "cache"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    said = {arg.value for arg in node.args if isinstance(arg, ast.Constant)}
                    if node.func.attr == "add_argument" and said & options:
                        found.append(f"{path.name}:{node.lineno} {said}")
                if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Call):
                    maker = ast.unparse(node.value.func)
                    if maker == "Field" and ast.unparse(node.target) in OURS:
                        found.append(f"{path.name}:{node.lineno} {ast.unparse(node.target)}")
    assert found == []


def test_plan_settings_of_the_server_equal_the_fields_of_the_plan() -> None:
    for name in PLANNED:
        field = Settings.model_fields[name]
        assert field.default == OURS[name].default, name
        assert field.description == OURS[name].help_line
    for name in Settings.model_fields.keys() & OURS.keys():
        assert name in PLANNED
    assert not BaseModel.model_fields.keys() & OURS.keys()


@pytest.fixture(params=["meta-llama__Meta-Llama-3.1-8B", "Qwen__Qwen3.5-27B", "LiquidAI__LFM2-1.2B"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text((DATA / "configs" / f"{request.param}.json").read_text())
    return str(tmp_path)


def completed(made: Plan) -> dict[str, Any]:
    """Return the options that a plan chose, except the name of the GPU."""
    return {name: getattr(made.deployment, name) for name in OURS if name != "gpu"}


def test_plan_flags_have_equal_defaults_in_every_command(model: str) -> None:
    """Compare the defaults of plan, plan --replicas, replay, serve, fit-log and Python on one GPU."""
    large = "h200-141g"  # on a smaller one the hybrid does not start with vLLM's default of 1,024 sequences
    asked = plan(model, gpu=large, max_model_len=8192)
    where = ["--gpu", large, "--max-model-len", "8192"]
    trace = str(next((DATA / "traces").glob("azure*.csv")))
    replayed = replay._plan(PARSERS["replay"].parse_args([trace, "--model", model, *where]))
    arguments = PARSERS["replicas"].parse_args(
        [model, *where, "--replicas", "auto", "--rate", "1", "--trace", trace]
    )
    many = make_plan(model, replicas.deployment_from(arguments))
    memory = asked.deployment.device_memory
    settings = load_settings(
        model=model, backend="vllm", device="cuda", device_memory=memory, max_model_len=8192
    )
    served = make_plan(model, settings.deployment())
    read = LogFigures(engine="vllm", figures={"max_model_len": 8192})  # a log that says no more
    logged = make_plan(model, deployment_of(read, PARSERS["fit-log"].parse_args(["a.log", "--gpu", large])))
    for other in (replayed, many, served, logged):
        assert completed(other) == completed(asked)
    for other in (replayed, many, logged):
        assert other.kv_cache == asked.kv_cache
        assert other.plan_id == asked.plan_id
    assert asked.deployment.gpu_memory_utilization == 0.92


def test_replay_and_plan_compute_equal_numbers_of_kv_blocks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """27,515 against 28,326 for Llama 3.1 8B on an H100, when replay had a default of its own."""
    (tmp_path / "config.json").write_text((DATA / "configs" / "meta-llama__Meta-Llama-3.1-8B.json").read_text())
    assert main(["plan", str(tmp_path), "--gpu", GPU, "--json"]) == 0
    blocks = json.loads(capsys.readouterr().out)["kv_cache"]["usable_blocks"]
    assert blocks == 28_364
    trace = str(DATA / "traces" / "azure_conversation_300.csv")
    assert main(["replay", trace, "--model", str(tmp_path), "--gpu", GPU, "--limit", "5"]) == 0
    assert f"KV blocks            {blocks:,} of 16 tokens" in capsys.readouterr().out


def test_vllm_arguments_equal_the_planned_deployment() -> None:
    """Every flag that serve takes reaches vLLM as the plan has it."""
    odd: dict[str, Any] = {
        "dtype": "float16", "kv_cache_dtype": "fp8", "max_model_len": 512, "max_num_seqs": 3,
        "max_num_batched_tokens": 600, "block_size": 64, "gpu_memory_utilization": 0.5,
        "enable_prefix_caching": False, "enforce_eager": True, "enable_lora": True, "max_loras": 2,
        "max_lora_rank": 8, "tensor_parallel_size": 3, "pipeline_parallel_size": 2, "data_parallel_size": 2,
    }  # fmt: skip
    for given in ({}, odd):
        settings = load_settings(model="demo", backend="vllm", device="cuda", device_memory="80GiB", **given)
        made = make_plan("demo", settings.deployment())
        arguments = engine_arguments(made, enforce_eager=made.deployment.enforce_eager)
        chosen = {name: getattr(made.deployment, name) for name in PLANNED}
        chosen["kv_cache_memory_bytes"] = made.rank.kv_pool_bytes
        if not given:
            chosen["kv_cache_dtype"] = "auto"  # vLLM's name for the model's own
        for name in PLANNED:
            # make_engine refuses a KV tier with vLLM (tests/server/test_hf_kv_tier.py)
            if name.startswith("kv_offloading"):
                continue
            if name not in ("device", "gpu", "device_memory", "quantization", "runner"):
                assert arguments[name] == chosen[name], name
        assert {name: chosen[name] for name in given} == given


@pytest.mark.parametrize(
    "flags",
    [
        {"engine": "vllm", "gpu": GPU},
        {"engine": "vllm", "gpu": "a100-40g", "tensor_parallel_size": 3, "pipeline_parallel_size": 2},
        {"engine": "vllm", "gpu": GPU, "enable_lora": True, "max_loras": 4, "max_lora_rank": 32},
        {"engine": "vllm", "gpu": GPU, "enforce_eager": True, "quantization": "fp8"},
        {"engine": "vllm", "gpu": GPU, "gpu_memory_utilization": 0.8, "enable_prefix_caching": False},
        {"engine": "vllm", "kv_cache_memory_bytes": 1 << 30},
        {"engine": "hf", "kv_cache_memory_bytes": 1 << 30, "quantization": "nf4"},
    ],
)
def test_printed_serve_command_reproduces_the_plan(flags: dict[str, Any]) -> None:
    """What plan prints, read by serve, is the same plan."""
    asked = plan("demo", **flags)
    words = shlex.split(serve_lines(asked)[0])
    assert words[:2] == ["tonnage", "serve"]
    settings = settings_from(PARSERS["serve"].parse_args(words[2:]))
    served = make_plan(settings.model, settings.deployment())
    left_out = {"gpu", "device_memory"} if asked.deployment.device == "cpu" else {"gpu"}
    assert {name: value for name, value in completed(served).items() if name not in left_out} == {
        name: value for name, value in completed(asked).items() if name not in left_out
    }
    assert served.kv_cache == asked.kv_cache


def test_planned_quantization_is_passed_to_vllm_or_rejected(tmp_path: Path) -> None:
    """On load, vLLM quantizes to nf4 and fp8. Any other format is rejected before loading."""
    assert _made_by_vllm("demo", None) is None
    assert (_made_by_vllm("demo", "nf4"), _made_by_vllm("demo", "fp8")) == ("bitsandbytes", "fp8")
    assert _made_by_vllm("demo", "fp8_per_channel") == "fp8_per_channel"
    made = make_plan("demo", Deployment(engine="vllm", quantization="fp8"))
    arguments = engine_arguments(made, enforce_eager=True, quantization="fp8")
    assert arguments["quantization"] == "fp8"
    assert engine_arguments(made, enforce_eager=True)["quantization"] is None
    for given in ("int8", "gptq"):
        settings = load_settings(model="demo", backend="vllm", quantization=given)
        with pytest.raises(DeploymentError, match=f"does not quantize to {given}") as caught:
            make_engine(settings, make_plan("demo", settings.deployment()))
        assert caught.value.field == "quantization"
    config = json.loads((DATA / "configs" / "meta-llama__Meta-Llama-3.1-8B.json").read_text())
    stored = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": stored}))
    assert _made_by_vllm(str(tmp_path), "gptq") is None  # the checkpoint says it itself


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        ("max_model_len", "8K", 8192),
        ("kv_cache_memory_bytes", "512MiB", 512 << 20),
        ("gpu_memory_utilization", "0.5", 0.5),
        ("enable_prefix_caching", "false", False),
        ("dtype", "float32", "float32"),
        ("tensor_parallel_size", "2", 2),
    ],
)
def test_deployment_settings_are_read_from_the_environment(
    variable: str, text: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"TONNAGE_{variable.upper()}", text)
    settings = load_settings(model="demo", backend="vllm")
    assert getattr(settings, variable) == value
    assert getattr(settings.deployment(), variable) == value


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"device": "tpu"}, "device"),
        ({"dtype": "float8"}, "dtype"),
        ({"max_num_seqs": True}, "max_num_seqs"),
        ({"tensor_parallel_size": 5000}, "tensor_parallel_size"),
        ({"gpu_memory_utilization": "lots"}, "gpu_memory_utilization"),
    ],
)
def test_environment_values_are_validated_like_flags(given: dict[str, Any], field: str) -> None:
    with pytest.raises(DeploymentError) as caught:
        load_settings(model="demo", **given)
    assert caught.value.field == field


def test_setting_without_the_other_setting_that_it_requires_is_rejected() -> None:
    settings = load_settings(model="demo", backend="vllm", max_loras=2)
    with pytest.raises(DeploymentError, match="requires --enable-lora") as caught:
        settings.deployment()
    assert caught.value.field == "--max-loras"
