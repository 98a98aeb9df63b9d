"""Tests of the advice of plans that do not fit, and of examples in errors about parallel sizes."""

from __future__ import annotations

import re

import pytest

from tonnage.planner import plan
from tonnage.planner.command import run
from tonnage.planner.errors import DeploymentError

_LAYOUT = re.compile(r"(?:--tensor-parallel-size (\d+))? ?(?:--pipeline-parallel-size (\d+))? \((\d+) GPUs")


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llama.cpp"])
@pytest.mark.parametrize(
    ("name", "ranks"), [("databricks/dbrx-instruct", 8), ("Qwen/Qwen3-8B", 3), ("transformers-default/opt", 8)]
)
def test_parallel_sizes_suggested_in_an_error_are_accepted(config_of, folder_with, name, ranks, engine):
    """DBRX and OPT have 12 KV heads: 8 and 16 divide neither them nor are multiples of them."""
    folder = folder_with(config_of(name))
    flags = {"gpu": "b300-288g", "engine": engine, "max_model_len": 1024}
    with pytest.raises(DeploymentError) as caught:
        plan(folder, tensor_parallel_size=ranks, **flags)
    assert caught.value.field == "--tensor-parallel-size"
    examples = re.findall(r"\d+", caught.value.hint)
    assert len(examples) > 2
    for example in examples:
        plan(folder, tensor_parallel_size=int(example), **flags)


@pytest.mark.parametrize(
    ("name", "gpu", "words"),
    [
        (
            "Qwen/Qwen3.8-2.4T-A95B", "h200-141g",
            "--tensor-parallel-size 8 --pipeline-parallel-size 5 (40 GPUs, 5 machines of 8, the smallest ",
        ),
        ("meta-llama/Llama-3.1-70B-Instruct", "h100-80g", "--pipeline-parallel-size 3 (3 GPUs, the smallest "),
        ("Qwen/Qwen3-32B", "h100-80g", "--tensor-parallel-size 2 (2 GPUs, the smallest layout)"),
    ],
)  # fmt: skip
def test_advice_for_a_model_that_does_not_fit_names_the_fewest_gpus(
    config_of, folder_with, capsys, name, gpu, words
):
    folder = folder_with(config_of(name))
    assert run([folder, "--gpu", gpu, "--engine-version", "0.32.0"]) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Would fit with ")]
    (line,) = (line for line in lines if "the smallest layout" in line)
    assert words in line
    tensor, stages, gpus = _LAYOUT.search(line).groups()
    sizes = int(tensor or 1), int(stages or 1)
    assert sizes[0] * sizes[1] == int(gpus)
    flags = {"gpu": gpu, "engine_version": "0.32.0"}
    assert plan(folder, tensor_parallel_size=sizes[0], pipeline_parallel_size=sizes[1], **flags).fits
    if sizes[1] > 1:
        assert not plan(
            folder, tensor_parallel_size=sizes[0], pipeline_parallel_size=sizes[1] - 1, **flags
        ).fits


def test_concurrency_target_beyond_one_machine_is_answered_with_a_multi_node_layout(
    config_of, folder_with, capsys
):
    folder = folder_with(config_of("Qwen/Qwen3.8-2.4T-A95B"))
    asked = ["--engine-version", "0.32.0", "--request", "4000+500", "--target-concurrency", "20"]
    assert run([folder, *asked, "--gpu", "h200-141g"]) == 0
    out = capsys.readouterr().out
    assert "GPUs needed:\n  40 x h200-141g\n" in out
    assert "--tensor-parallel-size 8 --pipeline-parallel-size 5" in out
    assert "with --nnodes 5" in out
