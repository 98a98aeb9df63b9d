"""Tests of flags, which are declared once as dataclass fields for every command, setting and check."""

from __future__ import annotations

import json

import pytest

from tonnage.planner.command import run
from tonnage.planner.deployment import Deployment
from tonnage.planner.engines.registry import ENGINES, engine_of
from tonnage.planner.errors import DeploymentError
from tonnage.planner.fitlog.read import parse_log
from tonnage.planner.flags import Flag, flags_of
from tonnage.planner.planning.build import make_plan
from tonnage.planner.training.command import run as train
from tonnage.planner.training.setup import ADAPTERS, TrainingSetup, check_setup
from tonnage.planner.training.sweep import parse_axis

FLAGS = [flag for record in (Deployment, TrainingSetup) for flag in flags_of(record).values()]


def names(flags: list[Flag]) -> list[str]:
    return [flag.option for flag in flags]


@pytest.mark.parametrize("record", [Deployment, TrainingSetup])
def test_every_field_of_the_settings_classes_has_a_flag(record):
    assert list(flags_of(record)) == list(record.__annotations__)
    for name, flag in flags_of(record).items():
        assert flag.name == name
        flag.check(flag.default)  # the default must be a valid value of the flag
        for other in filter(None, (flag.needs,)):
            assert other in flags_of(record)
        assert all(engine in ENGINES for engine in filter(None, flag.engine.split(", ")))


@pytest.mark.parametrize("flag", FLAGS, ids=names(FLAGS))
def test_flag_parses_valid_text_and_rejects_invalid_text(flag):
    """Each flag reads one valid value as text and rejects invalid values."""
    text, value = {
        "bytes": ("1KiB", 1024), "GiB": ("0.5", 1 << 29), "MiB": ("0.5", 1 << 19), "share": ("0.25", 0.25),
    }.get(flag.unit, ("x", "x"))  # fmt: skip
    wrong = ["0", "-1", "nan", "", "1e400"] if flag.unit else []
    if flag.reader is not None:
        text, value, wrong = "8GB/s", 8 * 10**9, ["fast", "0GB/s"]
        if flag.option == "--kv-offloading-disk":
            text, value, wrong = "/mnt/kv,1GiB", "/mnt/kv,1GiB", ["/mnt/kv", ",1GiB", "/mnt/kv,much", ""]
        elif flag.kind == "str":
            text, value, wrong = "8.0", "8.0", ["8", "new.er", ""]
    elif flag.choices:
        text, value, wrong = flag.choices[-1], flag.choices[-1], ["", "nothing"]
    elif flag.kind == "bool":
        text, value, wrong = "true", True, ["yes", ""]
    elif flag.kind.startswith("tuple"):
        text, value, wrong = " a,b ", ("a", "b"), ["", " , "]
    elif flag.kind == "int" and not flag.unit:
        text, value = str(flag.most), flag.most
        wrong = [str(flag.least - 1), str(flag.most + 1), "1.5", "one", ""]
    elif flag.kind == "float" and not flag.unit:
        text, value, wrong = "2.5", 2.5, ["one", "", "nan", "1e400"]
    if flag.unit in ("GiB", "MiB"):
        wrong.remove("0")  # 0 means that nothing is offloaded or kept
    assert flag.read(text) == value
    assert flag.read(flag.read(text) if flag.kind == "str" else text) == value
    for bad in wrong:
        with pytest.raises(DeploymentError) as caught:
            flag.read(bad)
        assert caught.value.field == flag.option
        with pytest.raises(DeploymentError) as caught:
            flag.read(bad, "elsewhere")
        assert caught.value.field == "elsewhere"


@pytest.mark.parametrize("flag", FLAGS, ids=names(FLAGS))
def test_flag_rejects_a_value_of_another_type(flag):
    for value in (object(), b"x", 1.5 if flag.kind == "int" else 5, None):
        if (value is None and flag.optional) or (value == 5 and flag.kind == "float"):
            continue
        with pytest.raises(DeploymentError, match="is not ") as caught:
            flag.check(value)
        assert caught.value.field == flag.option


def test_help_text_contains_engine_defaults():
    """Two help texts contain the figures that the engines use."""
    for name in ENGINES:
        engine = engine_of(name)
        share = engine.default_utilization(engine.newest)
        assert f"{share:g}" in flags_of(Deployment)["gpu_memory_utilization"].help_line
        for size in engine.blocks.values():
            assert str(size) in flags_of(Deployment)["block_size"].help_line
    vllm = engine_of("vllm")
    assert (vllm.default_utilization((0, 19, 1)), vllm.default_utilization((0, 20, 0))) == (0.9, 0.92)
    assert "vllm from 0.20 on 0.92" in flags_of(Deployment)["gpu_memory_utilization"].help_line


@pytest.mark.parametrize("size", [1, 16, 64])
def test_sglang_plan_takes_the_block_size_from_the_page_size_flag(size, capsys):
    """The option is --page-size; token counts are rounded down to whole pages."""
    whole = make_plan("demo", Deployment(engine="sglang", gpu="h100-80g"))
    plan = make_plan("demo", Deployment(engine="sglang", gpu="h100-80g", block_size=size, max_model_len=1001))
    assert plan.deployment.block_size == plan.kv_cache.layout.block_size == size
    assert plan.kv_cache.tokens == whole.kv_cache.tokens // size * size == plan.kv_cache.num_blocks * size
    assert plan.kv_cache.bytes_per_sequence == -(-1001 // size) * plan.kv_cache.layout.bytes_per_block
    assert plan.kv_cache.layout.bytes_per_token == whole.kv_cache.layout.bytes_per_token
    assert run(["demo", "--engine", "sglang", "--gpu", "h100-80g", "--block-size", "16", "--serve-line"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("--page-size 16")


def test_sglang_log_page_size_is_read_as_block_size():
    line = "server_args=ServerArgs(model_path='m', page_size=64, tp_size=2)"
    assert parse_log(line).flags["block_size"] == "64"


def test_llama_cpp_rejects_block_size_above_1(capsys):
    assert run(["demo", "--engine", "llama.cpp", "--gpu", "h100-80g", "--block-size", "16"]) == 2
    assert "--block-size" in capsys.readouterr().err
    assert run(["demo", "--engine", "llama.cpp", "--gpu", "h100-80g", "--block-size", "1", "--json"]) == 0


def test_values_of_a_sweep_axis_are_parsed_like_flag_values(folder_with, config_of, capsys):
    assert parse_axis("target-modules=q_proj,k_proj+v_proj") == (
        "target_modules",
        (("q_proj",), ("k_proj", "v_proj")),
    )
    assert parse_axis("device-memory=80GiB,1000") == ("device_memory", (80 << 30, 1000))
    assert parse_axis("network-share=0.8,1") == ("network_share", (0.8, 1.0))
    assert parse_axis("inter-node=ndr") == ("inter_node", (50 * 10**9,))
    assert parse_axis("packing=true,false") == ("packing", (True, False))
    for wrong in ("gpu=h100-80g", "strategy=zero9", "rank=0", "micro-batch=", "micro-batch"):
        with pytest.raises(DeploymentError, match="--sweep"):
            parse_axis(wrong)
    folder = folder_with(config_of("meta-llama/Meta-Llama-3.1-8B"))
    axis = ["--sweep", "target-modules=q_proj,q_proj+v_proj,all-linear"]
    assert train([folder, "--method", "lora", *axis, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["values"] for row in rows] == [[["q_proj"]], [["q_proj", "v_proj"]], [["all-linear"]]]
    sizes = [row["gpu_bytes"] for row in rows]
    assert sizes[0] < sizes[1] < sizes[2]
    assert train([folder, "--method", "lora", "--target-modules", "q_proj,v_proj", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["gpu_bytes"] == sizes[1]
    assert train([folder, "--method", "lora", *axis]) == 0
    assert capsys.readouterr().out.splitlines()[2].split()[0] == "q_proj+v_proj"


@pytest.mark.parametrize("method", flags_of(TrainingSetup)["method"].choices)
def test_training_flag_target_modules_needs_an_adapter_method(method):
    setup = TrainingSetup(method=method, target_modules=("q_proj",))
    if method in ADAPTERS:
        check_setup(setup)
        return
    with pytest.raises(DeploymentError, match=f"--method {method} adds no adapters") as caught:
        check_setup(setup)
    assert caught.value.field == "--target-modules"
