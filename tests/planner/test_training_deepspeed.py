"""Tests against DeepSpeed's estimator functions and config classes.

deepspeed is not in the dev extra: PyPI has only its source, whose build requires torch. Its answers are stored
in tests/data/training/deepspeed_estimates.json; an installed deepspeed is called as well.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from training_models import training_model

from tonnage.planner.families.registry import build_architecture
from tonnage.planner.training import deepspeed as ours
from tonnage.planner.training import emit
from tonnage.planner.training.build import Planner
from tonnage.planner.training.model import model_from
from tonnage.planner.training.setup import TrainingSetup

STORED = json.loads((Path(__file__).parents[1] / "data" / "training" / "deepspeed_estimates.json").read_text())
REASON = "deepspeed is built from source (pip install --no-deps deepspeed hjson py-cpuinfo msgpack einops)"


def answer(row: dict) -> list[int]:
    """Return [CPU bytes, GPU bytes], in the order of DeepSpeed's functions."""
    p, gpus, nodes = row["parameters"], row["gpus"], row["nodes"]
    if row["stage"] == 2:
        found = ours.zero2(p, gpus, nodes, offload=row["cpu_offload"])
    else:
        found = ours.zero3(
            p, row["largest_layer"], gpus, nodes, offload_optimizer=row["cpu_offload"],
            offload_param=row["cpu_offload_params"], zero_init=row["zero_init"],
        )  # fmt: skip
    return [found.cpu, found.gpu]


def test_deepspeed_estimates_equal_deepspeeds_stored_answers():
    assert len(STORED["rows"]) == 32
    for row in STORED["rows"]:
        assert answer(row) == row["answer"], row


@pytest.mark.parametrize("says", STORED["tables"], ids=lambda row: f"{row['row']}-{row['nodes']}x{row['gpus']}")
def test_printed_deepspeed_tables_equal_deepspeeds_stored_output(says):
    """The tables are ``_all_live`` of real tiny models, and ``_all_cold`` of large counts."""
    theirs = says["says"].replace("OffloadDeviceEnum.cpu", "cpu ")  # an enum's name, from Python 3.11 on
    counted = says["parameters"], says["largest_layer"]
    if says["row"] is not None:
        assert ours.counts(training_model(says["row"]).architecture) == counted
    assert ours.tables_of(*counted, says["gpus"], says["nodes"]) == theirs.strip("\n")


def test_deepspeed_estimates_equal_the_functions_of_the_installed_deepspeed():
    zero2 = pytest.importorskip("deepspeed.runtime.zero.stage_1_and_2", reason=REASON)
    zero3 = pytest.importorskip("deepspeed.runtime.zero.stage3", reason=REASON)
    for row in STORED["rows"]:
        common = {
            "total_params": row["parameters"],
            "num_gpus_per_node": row["gpus"],
            "num_nodes": row["nodes"],
            "cpu_offload": row["cpu_offload"],
        }
        if row["stage"] == 2:
            theirs = zero2.estimate_zero2_model_states_mem_needs(**common)
        else:
            theirs = zero3.estimate_zero3_model_states_mem_needs(
                largest_layer_params=row["largest_layer"], cpu_offload_params=row["cpu_offload_params"],
                zero_init=row["zero_init"], **common,
            )  # fmt: skip
        assert list(theirs[:2]) == answer(row)


@pytest.mark.parametrize("offload", ["none", "cpu", "nvme"])
@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_deepspeed_accepts_emitted_configuration(config_of, strategy, offload):
    """The class is DeepSpeed's own pydantic class, which forbids unknown keys."""
    classes = pytest.importorskip("deepspeed.runtime.zero.config", reason=REASON)
    if offload == "nvme" and strategy != "zero3":
        offload = "cpu"
    config = config_of("meta-llama/Meta-Llama-3.1-8B")
    planner = Planner(model_from("llama", build_architecture(config)))
    setup = TrainingSetup(strategy=strategy, gpus=8, offload_optimizer=offload,
                          offload_param=offload if strategy == "zero3" else "none")  # fmt: skip
    found = json.loads(emit.emit("deepspeed", planner.plan(setup), planner.model.architecture))
    assert int(classes.DeepSpeedZeroConfig(**found["zero_optimization"]).stage) == int(strategy[-1])
