"""Tests of the activation model against ``saved_tensors_hooks`` on real models.

Types with an operation-by-operation layer are exact to a few bytes (``near``); other types lie within the
plan's interval. The bytes that autograd keeps are stored in tests/data/oracles; `make test-oracles` trains the
models again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import training_models as models
from oracle import Oracle

from tonnage.planner.errors import TonnageError
from tonnage.planner.families.registry import build_architecture
from tonnage.planner.training.activations import (
    ESTIMATE_HIGH,
    ESTIMATE_LOW,
    ActivationSetup,
    activations_of,
    shape_sums,
)
from tonnage.planner.training.build import Planner
from tonnage.planner.training.model import model_from
from tonnage.planner.training.precision import convention_of
from tonnage.planner.training.setup import TrainingSetup

BATCH, LENGTH = 2, 96
planned = models.planned_bytes
ORACLE = Oracle("training_activations", "torch", "transformers", "peft")
pytestmark = pytest.mark.oracle


@pytest.fixture
def saved(request) -> Callable[..., int]:
    """Return a function that gives the bytes autograd keeps of ``real()``, a model of ``family``.

    The stored answer's key is the name of the test.
    """

    def ask(real, family, *, batch=BATCH, length=LENGTH, autocast=False, **overrides) -> int:
        inputs = [models.config_of(family, **overrides), batch, length, autocast]
        return ORACLE.says(
            request.node.name, inputs, lambda: models.saved_bytes(real(), batch, length, autocast=autocast)
        )

    return ask


def near(measured: int, family: str = "") -> object:
    """Return ``measured`` with a tolerance of 56 bytes.

    Two types, with adapters under autocast, keep 3 and 6 KiB that the tape lacks.
    """
    return pytest.approx(measured, rel=0, abs={"opt-projected": 3_072, "hunyuan_v1_moe": 6_144}.get(family, 56))


def exact(row: str) -> bool:
    """Return whether the planner has this model's layer operation by operation."""
    return not models.training_model(row).estimated


def routes(row: str) -> bool:
    return models.training_model(row).architecture.experts > 0


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-mixed"])
@pytest.mark.parametrize("family", models.ROWS)
def test_planned_activations_of_full_training_equal_autograd(family, precision, attention, saved):
    def real():
        return models.real_model(family, attention, "bfloat16" if precision == "bf16" else "float32")

    measured = saved(real, family, autocast=precision == "bf16-mixed")
    setup = TrainingSetup(precision=precision, attention=attention)
    found = planned(family, setup, frozenset(), BATCH, LENGTH)
    if exact(family):
        assert found == near(measured)
    else:
        assert found * ESTIMATE_LOW <= measured <= found * ESTIMATE_HIGH


@pytest.mark.parametrize("row", models.ROWS)
def test_training_parameter_count_equals_real_model(row):
    def counted() -> int:
        return sum(parameter.numel() for parameter in models.real_model(row).parameters())

    tensors = models.training_model(row).architecture.tensors
    planned = sum(t.elements for t in tensors if t.role != "buffer" and t.tied_to is None)
    assert planned == ORACLE.says(f"parameters of {row}", models.config_of(row), counted)


def test_training_activations_of_at_least_60_model_types_are_planned_exactly():
    """A type counts if all its rows are exact, as in benchmarks/training_accuracy.py --activations."""
    types = {True: set(), False: set()}
    for row in models.ROWS:
        types[exact(row)].add(row.partition("-")[0])
    assert len(types[True] - types[False]) >= 60


@pytest.mark.parametrize("method", ["lora", "ia3"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-mixed"])
@pytest.mark.parametrize("family", models.FAMILIES)
def test_planned_activations_of_adapter_training_equal_autograd(family, precision, method, saved):
    def real():
        import peft

        model = models.real_model(family, "sdpa", "float32" if precision == "fp32" else "bfloat16")
        config = (
            peft.LoraConfig(r=4, task_type="CAUSAL_LM")
            if method == "lora"
            else peft.IA3Config(task_type="CAUSAL_LM")
        )
        return peft.get_peft_model(model, config).train()

    measured = saved(real, family, autocast=precision == "bf16-mixed")
    setup = TrainingSetup(method=method, precision=precision, attention="sdpa", rank=4)
    targets = models.planner(family).trained(setup).targets
    assert planned(family, setup, targets, BATCH, LENGTH) == near(measured, family)


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
@pytest.mark.parametrize("family", [row for row in models.ROWS if exact(row) and not routes(row)])
def test_planned_activations_of_lora_on_every_linear_layer_equal_autograd(family, precision, saved):
    def real():
        import peft

        model = models.real_model(family, "sdpa", "float32" if precision == "fp32" else "bfloat16")
        config = peft.LoraConfig(r=4, task_type="CAUSAL_LM", target_modules="all-linear")
        return peft.get_peft_model(model, config).train()

    measured = saved(real, family, autocast=precision == "bf16-mixed")
    setup = TrainingSetup(
        method="lora", precision=precision, attention="sdpa", rank=4, target_modules=("all-linear",)
    )
    targets = models.planner(family).trained(setup).targets
    assert planned(family, setup, targets, BATCH, LENGTH) == near(measured, family)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-mixed"])
@pytest.mark.parametrize(
    "family", ["mixtral", "qwen2_moe", "phimoe", "ernie4_5_moe", "glm4_moe", "hunyuan_v1_moe", "gpt_oss"]
)
def test_planned_activations_of_lora_on_the_attention_of_moe_layers_equal_autograd(family, precision, saved):
    """Experts and routers are frozen; gradients pass through them."""

    def real():
        import peft

        model = models.real_model(family, "sdpa", "float32" if precision == "fp32" else "bfloat16")
        return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])).train()

    measured = saved(real, family, autocast=precision == "bf16-mixed")
    targets = ("q_proj", "v_proj")
    setup = TrainingSetup(method="lora", precision=precision, attention="sdpa", rank=4, target_modules=targets)
    found = planned(family, setup, models.planner(family).trained(setup).targets, BATCH, LENGTH)
    assert found == near(measured, family)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_neox"])
@pytest.mark.parametrize(("batch", "length"), [(1, 24), (3, 160)])
def test_planned_activations_equal_autograd_for_several_batch_sizes_and_sequence_lengths(
    family, batch, length, saved
):
    """The tape is symbolic; these sizes are new to it, with windows both used and unused."""
    measured = saved(lambda: models.real_model(family), family, batch=batch, length=length)
    setup = TrainingSetup(precision="fp32", attention="sdpa")
    assert planned(family, setup, frozenset(), batch, length) == near(measured)


@pytest.mark.parametrize("family", [row for row in models.ROWS if exact(row)])
def test_planned_activations_of_eager_attention_for_one_sequence_equal_autograd(family, saved):
    """With one sequence, batch and heads merge without a copy.

    Autograd then keeps views of fused projections.
    """

    def real():
        return models.real_model(family, "eager", "bfloat16")

    measured = saved(real, family, batch=1, length=24)
    setup = TrainingSetup(precision="bf16", attention="eager")
    assert planned(family, setup, frozenset(), 1, 24) == near(measured)


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_frozen_lower_layers_keep_no_activations(family, saved):
    def real():
        model = models.real_model(family)
        layers = model.model.layers if family == "llama" else model.gpt_neox.layers
        for parameter in model.parameters():
            parameter.requires_grad = False
        for layer in layers[-2:]:
            for parameter in layer.parameters():
                parameter.requires_grad = True
        return model

    measured = saved(real, family)
    setup = TrainingSetup(method="freeze", precision="fp32", attention="sdpa", trainable_layers=2)
    assert planned(family, setup, frozenset(), BATCH, LENGTH) == near(measured)


def test_planned_activations_include_the_mask_of_attention_dropout(saved):
    """With eager attention, the CPU keeps a full-width mask beside the dropped weights."""
    measured = saved(
        lambda: models.real_model("gpt_bigcode", "eager", attn_pdrop=0.1), "gpt_bigcode", attn_pdrop=0.1
    )
    setup = TrainingSetup(precision="fp32", attention="eager")
    found = planned("gpt_bigcode", setup, frozenset(), BATCH, LENGTH, attn_pdrop=0.1)
    assert found == near(measured)
    assert found > planned("gpt_bigcode", setup, frozenset(), BATCH, LENGTH) * 1.2


@pytest.mark.parametrize("precision", ["bf16", "bf16-mixed"])
def test_planned_attention_dropout_under_autocast_applies_to_scores_before_their_cast(precision, saved):
    """Under autocast, dropout applies to fp32 scores, because q has the rotary tables' dtype."""

    def real():
        dtype = "bfloat16" if precision == "bf16" else "float32"
        return models.real_model("seed_oss", "eager", dtype, attention_dropout=0.1)

    measured = saved(real, "seed_oss", autocast=precision == "bf16-mixed", attention_dropout=0.1)
    setup = TrainingSetup(precision=precision, attention="eager")
    found = planned("seed_oss", setup, frozenset(), BATCH, LENGTH, attention_dropout=0.1)
    assert found == near(measured)


def test_gradient_checkpointing_keeps_layer_inputs(saved):
    """Non-reentrant checkpointing, as Trainer's, keeps one residual stream per layer."""

    def real():
        model = models.real_model("llama")
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model

    setup = TrainingSetup(precision="fp32", attention="sdpa")
    acts = models.planner("llama").activations(setup)
    ends = (acts.embedding.total + acts.head.total + acts.loss).at(BATCH, LENGTH)
    measured = saved(real, "llama")
    assert measured == near(ends + 3 * acts.stream * BATCH * LENGTH)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-mixed"])
def test_interval_of_estimated_activations_contains_the_exact_bytes(precision):
    """Families without a tape are estimated from shapes.

    For families with a tape, on real configs, the exact bytes lie within the estimate's interval. Every other
    decoder gets an estimate.
    """
    configs = sorted((Path(__file__).parent.parent / "data" / "configs").glob("*.json"))
    setup = TrainingSetup(precision=precision)
    kept = ActivationSetup("flash", "full", 16, frozenset(), 2, False, convention_of(setup), 2)
    checked = 0
    for path in configs:
        config = json.loads(path.read_text())
        try:
            architecture = build_architecture(config)
        except TonnageError:
            continue
        model = model_from(path.stem, architecture)
        if model.recipe is None or model.estimated:
            continue
        exact, guess = (
            activations_of(model.recipe, model.masked(2048), kept, sums)
            for sums in ((), shape_sums(architecture))
        )  # fmt: skip
        exact, guess = (sum(n * kept.total.at(1, 2048) for _, n, kept in a.layers) for a in (exact, guess))
        assert guess * ESTIMATE_LOW <= exact <= guess * ESTIMATE_HIGH, path.stem
        checked += 1
    assert checked > 40


@pytest.mark.parametrize(("row", "estimated"), [("mixtral", False), ("doge", True)])
def test_training_plan_marks_estimated_activations(row, estimated):
    plan = models.planner(row).plan(TrainingSetup())
    line = next(x for x in plan.lines if x.name == "activations")
    assert (line.low < line.bytes < line.high) == estimated
    assert (line.low == line.bytes == line.high) != estimated
    assert any("estimated" in note for note in plan.notes) == estimated


@pytest.mark.parametrize("row", ["llama", "phi3", "falcon", "gpt2", "mixtral", "gpt_oss", "deepseek_v3"])
def test_tensor_parallelism_divides_mlp_activations(row):
    """Up projections, their activation and their product are divided, for each chosen expert too."""
    layers = models.planner(row).activations(TrainingSetup(precision="bf16")).layers
    architecture = models.training_model(row).architecture
    config = models.config_of(row)
    inner = config.get("moe_intermediate_size", config["intermediate_size"]) if architecture.experts else 192
    kept = 4 if architecture.gated_mlp else 2
    _, _, last = layers[-1]
    assert last.split.token >= 2 * kept * inner * max(1, architecture.experts_per_token)


def test_expert_parallelism_divides_mixtral_experts():
    config = {
        "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "vocab_size": 32_000,
        "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
        "max_position_embeddings": 32_768,
    }  # fmt: skip
    architecture = build_architecture(config)
    planner = Planner(model_from("mixtral", architecture))
    plan = planner.plan(TrainingSetup(gpus=8, expert_parallel=8, strategy="zero1"))
    whole = planner.plan(TrainingSetup(gpus=8, strategy="zero1", convention="zero"))
    assert whole.line("weights") == 2 * 46_702_792_704
    experts = 32 * 8 * 3 * 4096 * 14336
    assert plan.line("weights") == 2 * (46_702_792_704 - experts) + 2 * experts // 8
