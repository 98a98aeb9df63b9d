"""Tests of training stacks against torchtune, galore-torch and torchao, and against published totals.

None of the three is in the dev extra; their figures are stored in tests/data/training/stacks.json. These are
the bytes that autograd keeps of a forward pass of torchtune's llama3 and lora_llama3 (CPU, SDPA), the bytes of
GaLoreAdamW's and GaLoreAdamW8bit's states and projections after a step of tiny models, and the bytes of the
parts of an NF4Tensor.
"""

from __future__ import annotations

import json
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from shown import how_exact
from training_models import training_model

from tonnage.planner.errors import DeploymentError
from tonnage.planner.families.registry import build_architecture
from tonnage.planner.training.build import Planner
from tonnage.planner.training.command import run
from tonnage.planner.training.emit import emit
from tonnage.planner.training.model import model_from
from tonnage.planner.training.setup import TrainingSetup
from tonnage.planner.training.stacks import STACKS, nf4_torchao_bytes, with_defaults

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data" / "training"
SAID = json.loads((DATA / "stacks.json").read_text())
SCALARS = 64  # torchtune's chunked loss keeps the counts of its chunks, 36 bytes
TORCHTUNE = {"stack": "torchtune", "precision": "bf16", "attention": "sdpa"}


@pytest.mark.parametrize("row", SAID["kept"], ids=lambda row: "-".join(map(str, list(row.values())[:4])))
def test_planned_activations_equal_those_of_torchtune(row):
    asked = SAID["torchtune"]
    config = {"model_type": "llama", "hidden_act": "silu", "max_position_embeddings": 128, "rms_norm_eps": 1e-5}
    lora = ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    setup = TrainingSetup(
        **{**TORCHTUNE, "precision": row["precision"]}, method=row["method"], loss=row["loss"],
        packing=row["packing"], rank=asked["rank"], target_modules=lora if row["method"] == "lora" else None,
        micro_batch=asked["batch"], sequence_length=asked["length"],
    )  # fmt: skip
    acts = Planner(model_from("tiny", build_architecture({**config, **asked["config"]}))).activations(setup)
    total = acts.shared + acts.embedding.total + acts.head.total + acts.loss
    for _, count, kept in acts.layers:
        total = total + kept.total.times(count)
    assert abs(total.at(asked["batch"], asked["length"]) - row["kept"]) <= SCALARS


def test_planned_galore_state_bytes_equal_galore_torch():
    """AdamW's states are exact; bitsandbytes keeps a counter of 4 more bytes per tensor."""
    assert len(SAID["galore"]) == 16
    for row in SAID["galore"]:
        model = training_model(row["row"], hidden_size=128, intermediate_size=320)
        setup = TrainingSetup(
            stack="transformers",
            precision=row["precision"],
            optimizer=row["optimizer"],
            galore_rank=row["rank"],
        )
        counters = 4 * len(model.architecture.tensors) if "8bit" in row["optimizer"] else 0
        found = Planner(model).states(setup, 0).optimizer
        assert row["bytes"] - counters <= found <= row["bytes"], row


def test_planned_nf4_bytes_equal_torchao():
    for row in SAID["nf4"]:
        rows, columns = row["shape"]
        assert nf4_torchao_bytes(rows * columns) == row["bytes"]


def ask(monkeypatch, capsys, path: Path) -> tuple[int, dict]:
    monkeypatch.setattr(sys, "argv", ["training_accuracy.py", "--stacks", str(path), "--json"])
    code = runpy.run_path(str(ROOT / "benchmarks" / "training_accuracy.py"))["main"]()
    return code, json.loads(capsys.readouterr().out.splitlines()[-1])


def test_published_training_totals_lie_within_intervals(monkeypatch, capsys, tmp_path):
    """Torchtune's totals on one GPU are within 2 % on average; a wrong total is above its interval."""
    published = DATA / "published_stacks.tsv"
    code, found = ask(monkeypatch, capsys, published)
    assert (code, found["scored"], found["covered"], found["above_the_interval"]) == (0, 31, 31, 0)
    assert how_exact("training") == ("31 published totals", "31 inside their intervals")
    assert set(found["stacks"]) == {"torchtune", "torchtune, 8 GPUs", "unsloth", "transformers"}
    assert found["stacks"]["torchtune"]["rows"] == 14
    assert found["stacks"]["torchtune"]["mean_error"] < 0.02
    assert found["stacks"]["unsloth"]["worst_error"] < 0.03
    lines = published.read_text().splitlines()
    wrong = tmp_path / "wrong.tsv"
    wrong.write_text("\n".join([lines[0], lines[4].replace("24.9", "26.9")]) + "\n")
    code, found = ask(monkeypatch, capsys, wrong)
    assert (code, found["scored"], found["covered"]) == (1, 1, 0)


@pytest.mark.parametrize(
    ("setup", "field", "words"),
    [
        ({**TORCHTUNE, "precision": "bf16-mixed"}, "--precision", ["autocast", "bf16"]),
        ({**TORCHTUNE, "attention": "eager"}, "--attention", ["SDPA"]),
        ({**TORCHTUNE, "strategy": "zero2", "gpus": 2}, "--strategy", ["FSDP2", "fsdp"]),
        ({**TORCHTUNE, "method": "ia3"}, "--method", ["ia3", "lora"]),
        ({**TORCHTUNE, "method": "qlora", "base_quantization": "int8"}, "--base-quantization", ["nf4-double"]),
        ({"loss": "chunked"}, "--loss", ["torchtune", "fused"]),
        ({"stack": "lightning"}, "--stack", ["'lightning'", "torchtune"]),
        ({"optimizer_in_backward": True, "method": "lora"}, "--optimizer-in-backward", ["--method full"]),
        ({"optimizer_in_backward": True, "gradient_accumulation": 2}, "--optimizer-in-backward",
         ["--gradient-accumulation 1"]),
        ({"optimizer_in_backward": True, "gpus": 8, "strategy": "fsdp"}, "--optimizer-in-backward",
         ["one GPU"]),
    ],
)  # fmt: skip
def test_error_for_a_setting_that_the_training_stack_lacks_names_the_setting(planner, setup, field, words):
    with pytest.raises(DeploymentError) as caught:
        planner.plan(TrainingSetup(**setup))
    assert all(word in str(caught.value) for word in [field, *words])


def test_training_stack_that_lacks_the_model_family_is_rejected():
    with pytest.raises(DeploymentError, match="gpt_neox"):
        Planner(training_model("gpt_neox")).plan(TrainingSetup(**TORCHTUNE))


def test_defaults_of_a_training_stack_apply_to_unset_flags(folder, capsys):
    assert (
        run([folder, "--stack", "torchtune", "--method", "qlora", "--rank", "32", "--json", "--explain"]) == 0
    )
    found = json.loads(capsys.readouterr().out)
    setup = found["setup"]
    assert (setup["precision"], setup["checkpointing"], setup["loss"], setup["rank"]) == (
        "bf16", "full", "chunked", 32,
    )  # fmt: skip
    assert found["stack"]["name"] == "torchtune"
    assert "flex_attention" in found["stack"]["decisions"]["attention"]
    assert run([folder, "--stack", "torchtune", "--checkpointing", "none", "--explain"]) == 0
    out = capsys.readouterr().out
    assert "torchtune 0.6.1, method full" in out
    assert "modules/rms_norm.py" in out
    assert "gradients" not in {
        line.split("  ")[1].strip() for line in out.splitlines() if line.startswith("  ")
    }


def test_defaults_of_each_training_stack_give_a_plan_for_every_method(planner):
    """The defaults of each stack give a plan, and each can be set by flags as well."""
    for name in STACKS:
        for method in ("full", "lora", "qlora"):
            setup = TrainingSetup(**with_defaults({"stack": name, "method": method}))
            assert setup.stack == name
            assert planner.plan(setup).total() > 0
            many = {"stack": name, "method": method, "strategy": "fsdp", "gpus": 8}
            shared = planner.plan(TrainingSetup(**with_defaults(many)))
            assert 0 < shared.total() < planner.plan(replace(setup, optimizer="adamw")).total()
            assert shared.setup.optimizer == "adamw"


def test_training_sweep_over_stacks_uses_the_defaults_of_each_stack(folder, capsys):
    assert run([folder, "--method", "lora", "--sweep", "stack=transformers,torchtune,unsloth", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["rows"]
    sizes = [row["gpu_bytes"] for row in found]
    assert all(sizes)
    assert sizes[0] > sizes[1] > sizes[2]


def test_transformers_trainer_is_planned_without_gradients_between_steps(planner):
    """Trainer frees gradients between steps; a second micro-batch still has the first one's."""
    setup = TrainingSetup(stack="transformers", precision="bf16", micro_batch=4, sequence_length=4096)
    once, twice = planner.plan(setup), planner.plan(replace(setup, gradient_accumulation=2))
    assert once.moment == twice.moment == "loss backward"
    assert (once.line("gradients"), twice.line("gradients")) == (0, 2 * once.parameters)
    assert twice.total() - once.total() == 2 * once.parameters
    plain = planner.plan(replace(setup, stack=None))
    assert plain.line("gradients") == 2 * once.parameters
    assert plain.total() > twice.total()


def test_training_stacks_are_planned_with_fused_adamw_which_copies_no_states(planner):
    """Torch's foreach kernels copy the second states; the stacks request the fused kernel."""
    setup = TrainingSetup(precision="bf16", checkpointing="full")
    assert planner.plan(setup).moment == "optimizer step"
    for stack in STACKS:
        fused = planner.plan(replace(setup, stack=stack))
        foreach = planner.plan(replace(setup, stack=stack, optimizer_kernel="foreach"))
        assert foreach.total() - fused.total() > fused.parameters


def test_full_finetuning_of_an_8b_model_fits_a_4090_with_paged_optimizer_states(folder, capsys):
    """Torchtune's README trains an 8B model in full on a 4090, which does not fit without paging."""
    arguments = [folder, "--stack", "torchtune", "--compile", "--gpu", "rtx-4090", "--json"]
    assert run(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    resident = next(x for x in found["lines"] if (x["name"], x["place"]) == ("optimizer states", "gpu"))
    assert 0 == resident["low"] < resident["bytes"] < 16_311_470_208
    assert found["gpu_bytes"] == found["setup"]["device_memory"]
    assert run([*arguments, "--optimizer", "adamw-8bit"]) == 1
    assert run([*arguments, "--device-memory", "16GiB"]) == 2  # --gpu says it already


def test_emitted_trainer_arguments_follow_the_stack(planner):
    setup = TrainingSetup(
        stack="transformers", precision="bf16", optimizer="galore-adamw-8bit", optimizer_in_backward=True,
        compile=True,
    )  # fmt: skip
    found = json.loads(emit("trainer", planner.plan(setup), planner.model.architecture))
    assert (found["optim"], found["torch_compile"]) == ("galore_adamw_8bit_layerwise", True)
    with pytest.raises(DeploymentError, match="GaLore only"):
        emit("trainer", planner.plan(replace(setup, optimizer="adamw")), planner.model.architecture)
    with pytest.raises(DeploymentError, match="TrainingArguments"):
        emit("trainer", planner.plan(TrainingSetup(**TORCHTUNE)), planner.model.architecture)


def test_compiled_training_is_planned_with_fewer_activation_bytes_and_an_interval(planner):
    setup = TrainingSetup(stack="transformers", precision="bf16", micro_batch=4, sequence_length=4096)
    eager, compiled = planner.plan(setup), planner.plan(replace(setup, compile=True))
    low, high = compiled.bounds()
    assert low < compiled.total() < eager.total() <= high
    line = next(line for line in compiled.lines if line.name == "activations")
    assert line.low < line.bytes < line.high


def test_fp8_training_activations_have_an_interval(planner):
    """The figures come from the libraries' sources, not from measurements; 16 bits are the upper bound."""
    setup = TrainingSetup(precision="fp8", micro_batch=4)
    line = next(line for line in planner.plan(setup).lines if line.name == "activations")
    assert line.low < line.high
