"""Tests of the activations that ``--compile`` keeps, against torch's partitioner on real models.

Each decoder layer is compiled with ``aot_eager_decomp_partition``: inductor's decompositions and the partition
(functorch/partitioners.py, min_cut_rematerialization_partition) of its forward and backward graph, without its
code generator. The bytes that autograd then keeps are stored in tests/data/oracles; `make test-oracles`
compiles the layers again.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import training_models as models
from oracle import Oracle

from tonnage.planner.families.registry import build_architecture
from tonnage.planner.training.build import Planner
from tonnage.planner.training.model import model_from
from tonnage.planner.training.setup import TrainingSetup
from tonnage.planner.training.stacks import kernels_of
from tonnage.planner.training.values import Kernels

BATCH, LENGTH = 2, 96
ORACLE = Oracle("training_compile", "torch", "transformers")
SAID = json.loads((Path(__file__).parents[1] / "data" / "training" / "stacks.json").read_text())
EXACT = ("llama", "qwen2", "qwen3", "gemma")
OTHERS = ("gemma2", "olmo2", "mixtral")
"""Rows whose partition cannot be forecast to the byte; they lie inside the interval."""


def kept(row: str, setup: TrainingSetup, kernels: Kernels) -> int:
    """Return the planned bytes of a forward pass on the CPU with a loss."""
    layers_only = kernels._replace(layers_only=True)
    return models.planned_bytes(row, setup, frozenset(), BATCH, LENGTH, layers_only)


@pytest.mark.oracle
@pytest.mark.parametrize("precision", ["bf16", "bf16-mixed"])
@pytest.mark.parametrize("row", EXACT + OTHERS)
def test_planned_activations_of_compiled_layers_match_torchs_partitioner(row, precision, request):
    def ask() -> int:
        real = models.real_model(row, "sdpa", "bfloat16" if precision == "bf16" else "float32")
        for layer in real.model.layers:
            layer.compile(backend="aot_eager_decomp_partition")
        return models.saved_bytes(real, BATCH, LENGTH, autocast=precision == "bf16-mixed")

    inputs = [models.config_of(row), BATCH, LENGTH, precision]
    said = ORACLE.says(request.node.name, inputs, ask)
    setup = TrainingSetup(precision=precision, attention="sdpa", compile=True)
    kernels = kernels_of(setup)
    if row in EXACT:
        assert kept(row, setup, kernels) == pytest.approx(said, rel=0.0005)
    least, eager = (kept(row, setup, kernels._replace(compiled=how)) for how in ("least", ""))
    assert least <= said <= eager


@pytest.mark.parametrize("row", SAID["compiled"], ids=lambda row: row["method"])
def test_planned_activations_of_torchtunes_compiled_layers_are_exact(row):
    """Torchtune's layers, with and without LoRA, are exact to the byte."""
    asked = SAID["torchtune"]
    config = {"model_type": "llama", "hidden_act": "silu", "max_position_embeddings": 128, "rms_norm_eps": 1e-5}
    lora = ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    setup = TrainingSetup(
        stack="torchtune", precision="bf16", attention="sdpa", method=row["method"], compile=True,
        rank=asked["rank"], target_modules=lora if row["method"] == "lora" else None,
        micro_batch=asked["batch"], sequence_length=asked["length"],
    )  # fmt: skip
    acts = Planner(model_from("tiny", build_architecture({**config, **asked["config"]}))).activations(setup)
    total = acts.shared + acts.embedding.total + acts.head.total
    for _, count, each in acts.layers:
        total = total + each.total.times(count)
    assert total.at(asked["batch"], asked["length"]) == row["kept"]
