"""Tests that an invalid number in any flag of ``tonnage plan`` or ``tonnage train`` exits with 2.

The error is one line that names the flag, and no plan is printed.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tonnage.planner import command as plan
from tonnage.planner.deployment import Deployment
from tonnage.planner.engines.vllm.engine import VLLM
from tonnage.planner.errors import DeploymentError
from tonnage.planner.flags import flags_of
from tonnage.planner.planning.build import make_plan
from tonnage.planner.training import command as train
from tonnage.planner.training.setup import TrainingSetup, check_setup

HUGE = str(10**12)
COUNTS = (
    "--max-model-len", "--num-gpu-blocks-override", "--block-size", "--max-num-seqs",
    "--max-num-batched-tokens", "--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size",
    "--decode-context-parallel-size",
)  # fmt: skip
LORA = ("--max-loras", "--max-lora-rank")
LINKS = ("--intra-node", "--inter-node")
PLAN_FLAGS = [
    *((flag, value, ()) for flag in COUNTS for value in ("0", "-1", HUGE)),
    *((flag, value, ("--enable-lora",)) for flag in LORA for value in ("0", "-1", HUGE)),
    *(("--num-speculative-tokens", value, ("--speculative-model", "mtp")) for value in ("-1", HUGE)),
    *(("--gpu-memory-utilization", value, ()) for value in ("0", "-1", HUGE, "nan")),
    *(("--cpu-offload-gb", value, ()) for value in ("-1", HUGE, "nan")),
    *(
        (flag, value, ("--engine", "sglang"))
        for flag in ("--mem-fraction-static", "--swa-full-tokens-ratio")
        for value in ("0", "-1", HUGE, "nan")
    ),
    *((flag, value, ()) for flag in ("--device-memory", "--kv-cache-memory-bytes") for value in ("0", "-1")),
    *(("--target-concurrency", value, ()) for value in ("0", "-1")),
    *(("--engine-version", value, ()) for value in ("0.0.0", "0", "-1", HUGE)),
]  # fmt: skip
TRAIN_FLAGS = [
    *(
        (flag.option, value)
        for flag in flags_of(TrainingSetup).values()
        if flag.kind == "int" and not flag.unit
        for value in ("0", "-1", HUGE)
    ),
    ("--fsdp-version", "3"),
    *(("--" + name, value) for name in ("device-memory", "cpu-memory", "nvme") for value in ("0", "-1")),
    *((flag, value) for flag in LINKS for value in ("0", "-1", HUGE, "0GB/s", "-1GB/s")),
    *(("--network-share", value) for value in ("0", "-1", HUGE, "nan")),
    ("--checkpoint-segments", "1000"),
    *(("--target-modules", value) for value in ("", ",", " , ")),
]  # fmt: skip


def refused(capsys, flag: str, code: int) -> None:
    said = capsys.readouterr()
    assert code == 2, said.out
    assert flag in said.err
    assert said.err.count("\n") == 1
    assert not said.out


@pytest.mark.parametrize(("flag", "value", "others"), PLAN_FLAGS, ids=str)
def test_plan_command_rejects_an_invalid_number_in_a_flag(flag, value, others, tiny_llama, folder_with, capsys):
    argv = [folder_with(tiny_llama), "--gpu", "h100-80g", *others, flag, value]
    refused(capsys, flag, plan.run(argv))


@pytest.mark.parametrize(("flag", "value"), TRAIN_FLAGS, ids=str)
def test_train_command_rejects_an_invalid_number_in_a_flag(flag, value, tiny_llama, folder_with, capsys):
    strategy = ["--strategy", "fsdp-hybrid", "--gpus", "2"] if flag == "--shard-size" else []
    method = ["--method", "lora"] if flag in ("--rank", "--target-modules") else []
    refused(capsys, flag, train.run([folder_with(tiny_llama), *strategy, *method, flag, value]))


def test_train_command_accepts_any_positive_lora_rank(tiny_llama, folder_with, capsys):
    assert train.run([folder_with(tiny_llama), "--method", "lora", "--rank", "7"]) == 0


@pytest.mark.parametrize("field", ["device_memory", "cpu_memory", "nvme", "intra_node", "inter_node"])
def test_training_setup_with_a_memory_size_or_link_speed_of_zero_is_rejected(field):
    with pytest.raises(DeploymentError) as caught:
        check_setup(TrainingSetup(**{field: 0}))
    assert caught.value.field == "--" + field.replace("_", "-")


def test_zero_device_memory_is_rejected_instead_of_gpu_default(tiny_llama, folder_with):
    with pytest.raises(DeploymentError) as caught:
        make_plan(folder_with(tiny_llama), Deployment(engine="vllm", gpu="h100-80g", device_memory=0))
    assert caught.value.field == "--device-memory"


def test_vllm_plan_accepts_only_the_lora_ranks_that_vllm_supports(tiny_llama, folder_with, capsys):
    folder = folder_with(tiny_llama)
    argv = [folder, "--gpu", "h100-80g", "--enable-lora", "--max-lora-rank"]
    assert plan.run([*argv, "7"]) == 2
    assert "8, 16, 32, 64, 128, 256, 320, 512" in capsys.readouterr().err
    assert [plan.run([*argv, str(rank)]) for rank in VLLM.lora_ranks] == [0] * len(VLLM.lora_ranks)
    assert plan.run([*argv, "7", "--engine", "sglang"]) == 0


def test_lora_ranks_match_installed_vllm_source():
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed here")
    source = (Path(spec.origin).parent / "config" / "lora.py").read_text()
    found = re.search(r"^MaxLoRARanks = Literal\[([\d, ]+)\]$", source, re.MULTILINE)
    assert found is not None
    assert tuple(map(int, found[1].split(","))) == VLLM.lora_ranks


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"engine": "vllm", "engine_version": "99.0.0"}, "vllm 99.0.0 is newer .* rules of 0.33.0 are used"),
        ({"engine": "vllm", "engine_version": "0.34.0rc1"}, "newer"),
        ({"engine": "vllm", "engine_version": "0.3.0"}, "older .* rules of 0.5.4 are used"),
        ({"engine": "vllm", "engine_version": "0.32.4"}, None),
        ({"engine": "vllm", "engine_version": "0.5.4"}, None),
        ({"engine": "sglang", "engine_version": "0.5.6"}, None),
        ({"engine": "sglang", "engine_version": "0.6.0"}, "newer .* rules of 0.5.23 are used"),
        ({"engine": "sglang"}, None),
        ({"engine": "llama.cpp", "engine_version": "1.2.3"}, "no rule of llama.cpp depends"),
        ({"engine": "hf"}, None),
    ],
)
def test_plan_for_an_unknown_engine_version_adds_a_note(flags, says, tiny_llama, folder_with):
    notes = make_plan(folder_with(tiny_llama), Deployment(gpu="h100-80g", **flags)).notes
    assert [bool(re.search(says or "rules? of", note)) for note in notes] == ([True] if says else [])
