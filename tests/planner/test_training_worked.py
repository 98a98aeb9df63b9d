"""Tests of the worked numbers of the training literature, each with the convention of its source."""

from __future__ import annotations

import pytest

from tonnage.planner.families.registry import build_architecture
from tonnage.planner.training import deepspeed
from tonnage.planner.training.build import Planner
from tonnage.planner.training.communication import communication_of
from tonnage.planner.training.methods import TensorGroup, Trained
from tonnage.planner.training.model import model_from
from tonnage.planner.training.optimizers import state_bytes
from tonnage.planner.training.placement import init_bytes
from tonnage.planner.training.precision import convention_of
from tonnage.planner.training.setup import TrainingSetup
from tonnage.planner.training.states import states_on_rank
from tonnage.planner.training.step import SUB_GROUP_ELEMENTS, step_of

LLAMA_8B = "meta-llama/Meta-Llama-3.1-8B"
STATES = ("weights", "gradients", "optimizer states")


@pytest.fixture
def planner(config_of):
    def make(name: str) -> Planner:
        config = config_of(name)
        return Planner(model_from(name, build_architecture(config)))

    return make


def one_tensor(elements: int, architecture):
    """Return a function that gives the states of a model of one flat tensor, as the papers count it."""
    held = TensorGroup("all.weight", (elements,), "mlp", "Linear", (None,), True)

    def states(setup: TrainingSetup):
        return states_on_rank(Trained((held,), frozenset(), 0), architecture, setup)

    return states


@pytest.mark.parametrize(
    ("precision", "convention", "total", "parts"),
    [
        ("fp32", None, 16, (4, 0, 4, 4)),
        ("bf16", None, 8, (2, 0, 2, 2)),
        ("fp16", None, 8, (2, 0, 2, 2)),
        ("fp8", None, 16, (4, 0, 4, 4)),
        ("fp8", "zero", 16, (2, 4, 2, 4)),
        ("bf16-mixed", "zero", 16, (2, 4, 2, 4)),
        ("bf16-mixed", "master-with-weights", 16, (2, 4, 2, 4)),
        ("bf16-mixed", "huggingface", 18, (2, 4, 4, 4)),
        ("bf16-mixed", "autocast", 16, (4, 0, 4, 4)),
        ("fp16-mixed", "zero", 16, (2, 4, 2, 4)),
    ],
)
def test_precision_convention_decides_the_training_bytes_per_parameter(precision, convention, total, parts):
    found = convention_of(TrainingSetup(precision=precision, convention=convention))
    assert found.bytes_per_parameter == total
    assert (found.weights, found.master, found.gradients, found.state) == parts
    assert found.used_by


def test_fp8_training_keeps_one_byte_per_input_value_and_two_fp8_copies_of_each_weight(planner):
    """Transformer Engine keeps each matrix and its transpose in fp8 for the backward pass.

    This does not depend on the master weights. torchao's float8, under FSDP, keeps what 16-bit training keeps.
    """
    model = planner(LLAMA_8B)
    linear = 8_030_261_248 - 128_256 * 4096 - 65 * 4096  # the head is one of them
    # Every module keeps its own input in one byte a value, where 16-bit training keeps two of a tensor that
    # q, k and v (gate and up) share; under autocast each casts the fp32 stream for itself. What attention gives
    # is kept by its backward pass in 16 bits either way. 4096 more are the head's.
    h, inner = 4096, 14_336
    less = {
        "autocast": 32 * (3 * h - h + 2 * h + inner) + h,
        "zero": 32 * ((2 * h - 3 * h) - h + (2 * h - 2 * h) + inner) + h,
    }
    # long enough that a forward pass decides, not the step on an fp32 copy of the gradients
    length = 8192
    for convention in ("autocast", "zero"):
        setup = {"sequence_length": length, "convention": convention, "optimizer_kernel": "fused"}
        fp8, half = (model.plan(TrainingSetup(precision=p, **setup)) for p in ("fp8", "bf16-mixed"))
        assert fp8.line("weight casts") == 2 * linear
        assert half.line("weight casts") == (2 * linear if convention == "autocast" else 0)
        assert fp8.line("fp8 scales") == 225 * 5 * 1025 * 4
        assert half.line("activations") - fp8.line("activations") == length * less[convention]
        assert "Transformer Engine" in fp8.convention.used_by
    sharded = {"strategy": "fsdp", "gpus": 8, "sequence_length": 1024}
    fp8, half = (model.plan(TrainingSetup(precision=p, **sharded)) for p in ("fp8", "bf16-mixed"))
    assert fp8.total() == half.total()
    assert "torchao" in fp8.convention.used_by


def test_gradient_dtype_changes_the_gradients_only():
    found = convention_of(TrainingSetup(convention="zero", gradient_dtype="fp32"))
    assert (found.gradients, found.bytes_per_parameter) == (4, 18)


@pytest.mark.parametrize("convention", ["zero", "master-with-weights", "autocast"])
def test_llama_8b_training_states_are_128_484_179_968_bytes(planner, convention):
    plan = planner(LLAMA_8B).plan(TrainingSetup(convention=convention))
    assert sum(plan.line(name) for name in STATES) == 128_484_179_968 == 16 * 8_030_261_248


def test_llama_8b_training_has_48_gb_of_weights_16_gb_of_gradients_and_64_gb_of_optimizer_states(planner):
    plan = planner(LLAMA_8B).plan(TrainingSetup(convention="master-with-weights"))
    assert [plan.line(name) // 8_030_261_248 for name in STATES] == [6, 2, 8]
    assert [round(plan.line(name) / 1e9) for name in STATES] == [48, 16, 64]


@pytest.mark.parametrize(
    ("optimizer", "per_parameter"), [("adamw", 8), ("sgd-momentum", 4), ("sgd", 0), ("lion", 4)]
)
def test_each_optimizer_has_the_expected_state_bytes_per_parameter(optimizer, per_parameter):
    assert state_bytes(optimizer, (4096, 4096), "mlp", 4) == per_parameter * 4096 * 4096


def test_8bit_adamw_states_have_two_bytes_per_parameter_only_in_large_tensors():
    assert state_bytes("adamw-8bit", (4096,), "norm", 4) == 2 * 4096 + 8 * 16
    assert state_bytes("adamw-8bit", (4095,), "norm", 4) == 8 * 4095
    assert state_bytes("adamw-8bit", (257, 17), "mlp", 4) == 2 * 4369 + 8 * 18


def test_training_states_of_a_7_5b_model_on_64_gpus_equal_the_zero_paper(config_of):
    """Each GPU holds 120, 31.4, 16.6 and 1.9 GB with DDP and stages 1 to 3 (arXiv 1910.02054, figure 1)."""
    states = one_tensor(7_500_000_000, build_architecture(config_of(LLAMA_8B)))
    found = [
        states(TrainingSetup(strategy=strategy, gpus=8, nodes=8, convention="zero")).total / 1e9
        for strategy in ("ddp", "zero1", "zero2", "zero3")
    ]
    assert [round(x, 1) for x in found] == [120.0, 31.4, 16.6, 1.9]


def test_fsdp_full_shard_equals_zero_3_and_hybrid_shard_divides_only_within_a_group(config_of):
    states = one_tensor(7_500_000_000, build_architecture(config_of(LLAMA_8B)))
    base = {"gpus": 8, "nodes": 8, "convention": "zero"}
    full = states(TrainingSetup(strategy="fsdp", fsdp_version=1, **base)).total
    assert full == states(TrainingSetup(strategy="zero3", **base)).total
    hybrid = states(TrainingSetup(strategy="fsdp-hybrid", fsdp_version=1, **base)).total
    assert hybrid == 8 * full  # groups of one node: 8, not 64


@pytest.mark.parametrize(
    ("strategy", "extra", "volume"),
    [
        ("ddp", {}, 2),
        ("zero1", {}, 2),
        ("zero2", {}, 2),
        ("zero3", {}, 3),
        ("fsdp", {}, 3),
        ("zero3", {"quantized_weights": True, "hpz_partition_size": 8, "quantized_gradients": True}, 0.75),
    ],
)
def test_each_parallel_strategy_has_the_expected_communication_per_parameter(
    config_of, strategy, extra, volume
):
    states = one_tensor(40_000_000_000, build_architecture(config_of(LLAMA_8B)))
    setup = TrainingSetup(strategy=strategy, gpus=8, nodes=2, convention="zero", **extra)
    found = communication_of(setup, states(setup), 0)
    assert found.elements == volume * 40_000_000_000
    # once per accumulation window for gradients, per micro-batch for gathered weights
    twice = TrainingSetup(
        strategy=strategy, gpus=8, nodes=2, convention="zero", gradient_accumulation=2, **extra
    )
    assert communication_of(twice, states(twice), 0).elements == found.elements


def test_zero_3_step_of_a_40b_model_sends_120_gb_between_two_nodes(config_of):
    states = one_tensor(40_000_000_000, build_architecture(config_of(LLAMA_8B)))
    setup = TrainingSetup(strategy="zero3", gpus=8, nodes=2, convention="zero", intra_node=300 * 10**9,
                          inter_node=50 * 10**9)  # fmt: skip
    found = communication_of(setup, states(setup), 0)
    # two gathers and one reduction of 16 bits a parameter, of which each of two nodes sends half
    assert found.inter_node_bytes == 120 * 10**9
    assert found.seconds == pytest.approx(120 / (50 * 0.8))  # 80 % of the specification


def test_ddp_reduces_gradients_once_per_accumulation_window(planner):
    base = {"gpus": 8, "strategy": "ddp", "convention": "zero"}
    one = planner(LLAMA_8B).plan(TrainingSetup(**base)).communication
    four = planner(LLAMA_8B).plan(TrainingSetup(gradient_accumulation=4, **base)).communication
    assert one.bytes == four.bytes == 4 * 8_030_261_248
    zero2 = TrainingSetup(gpus=8, strategy="zero2", gradient_accumulation=4)
    found = planner(LLAMA_8B).plan(zero2).communication
    assert found.high_bytes - found.bytes == 3 * 2 * 8_030_261_248  # DeepSpeed reduces every micro-batch


T5_3B, T5_3B_LAYER = 2_851_598_336, 32_899_072


def gib(estimate: deepspeed.StateEstimate) -> tuple[str, str]:
    return f"{estimate.gpu / 2**30:.2f}", f"{estimate.cpu / 2**30:.2f}"


def test_zero2_estimates_equal_deepspeed_table():
    assert gib(deepspeed.zero2(T5_3B, 8, offload=True)) == ("5.31", "127.48")
    assert gib(deepspeed.zero2(T5_3B, 8, offload=False, documented=True)) == ("15.93", "127.48")
    assert gib(deepspeed.zero2(T5_3B, 8, offload=False)) == ("11.29", "127.48")


@pytest.mark.parametrize(
    ("optimizer", "param", "init", "expected"),
    [
        (True, True, True, ("0.12", "71.71")),
        (True, True, False, ("0.12", "127.48")),
        (True, False, True, ("0.79", "63.74")),
        (True, False, False, ("0.79", "127.48")),
        (False, False, True, ("6.10", "1.47")),
        (False, False, False, ("6.10", "127.48")),
    ],
)
def test_zero3_estimates_equal_deepspeed_table(optimizer, param, init, expected):
    found = deepspeed.zero3(
        T5_3B, T5_3B_LAYER, 8, offload_optimizer=optimizer, offload_param=param, zero_init=init
    )
    assert gib(found) == expected


def test_falcon_40b_initialization_needs_1_92_tb_cpu_memory():
    assert init_bytes(40_000_000_000, 8) == 1_920_000_000_000


def test_falcon_40b_lora_weights_use_the_exact_instead_of_the_nominal_parameter_count(planner):
    plan = planner("tiiuae/falcon-40b").plan(TrainingSetup(method="lora"))
    assert plan.parameters == 41_303_293_952
    assert round(plan.line("frozen weights") / 2**30, 1) == 76.9
    assert int(2 * 40e9 / 2**30) == 74  # the nominal 40e9


def test_lora_and_qlora_base_weights_of_llama_2_7b_have_the_expected_bytes(planner):
    model = planner("meta-llama/Llama-2-7b-hf")
    lora = model.plan(TrainingSetup(method="lora"))
    assert lora.line("frozen weights") == 2 * 6_738_415_616  # about 14 GB
    qlora = model.plan(TrainingSetup(method="qlora"))
    linear = 6_738_415_616 - 2 * 32_000 * 4096 - 65 * 4096
    scales = qlora.line("frozen weights") - linear // 2 - 2 * (2 * 32_000 * 4096 + 65 * 4096)
    assert round(linear / 2 / 1e9, 1) == 3.2
    assert linear // 64 <= scales <= linear // 60  # uint8 absmax, nested absmax and code books
    assert lora.adapters == 32 * 2 * 16 * (4096 + 4096)


@pytest.mark.parametrize(
    ("method", "precision", "extra", "rule"),
    [
        ("full", "bf16-mixed", {"convention": "huggingface"}, 18),
        ("full", "bf16", {}, 8),
        ("lora", "bf16", {}, 2),
    ],
)
def test_planned_training_states_agree_with_llama_factorys_rules_of_thumb(
    planner, method, precision, extra, rule
):
    """The rules are 18, 8 and 2 GB per billion parameters.

    Its QLoRA rules exclude scales, embedding and head.
    """
    setup = TrainingSetup(method=method, precision=precision, rank=8, **extra)
    plan = planner(LLAMA_8B).plan(setup)
    states = sum(plan.line(name) for name in (*STATES, "frozen weights"))
    assert states / plan.parameters == pytest.approx(rule, rel=0.01)


def gpt_layer(config_of, attention):
    """Return the activations of a 16-bit GPT layer with dropout, biases and multi-head attention."""
    config = {
        **config_of("transformers-default/gpt_bigcode"),
        "multi_query": False,
        "n_embd": 1024,
        "n_head": 16,
    }
    config["n_inner"] = 4096
    architecture = build_architecture(config)
    setup = TrainingSetup(precision="bf16", attention=attention)
    (_, _, kept), *_ = Planner(model_from("gpt", architecture)).activations(setup).layers
    return kept.total


def test_transformer_layer_activations_are_34_bytes_per_hidden_value(config_of):
    """The formula is s b h (34 + 5 a s / h) (arXiv 2205.05198, equation 1).

    FlashAttention drops the second term. The first is exact, beside 4 bytes of log-sum-exp per head and of mean
    and 1/std per norm.
    """
    assert gpt_layer(config_of, "flash").token == 34 * 1024 + 4 * 16 + 2 * 8


def test_attention_score_activations_are_7_bytes_per_head_and_pair_of_tokens(config_of):
    """The paper counts 5 a s^2 b: softmax 2, dropout mask 1 and dropped weights 2.

    With transformers' fp32 softmax it is 7.
    """
    assert gpt_layer(config_of, "eager").score == (5 + 2) * 16


def test_full_gradient_checkpointing_keeps_two_bytes_per_hidden_value_and_layer(planner):
    """Each layer keeps 2 s b h, and one layer its peak (arXiv 2205.05198, section 5)."""
    model = planner(LLAMA_8B)
    base = {"precision": "bf16", "checkpointing": "full", "sequence_length": 1024, "optimizer_kernel": "fused"}
    some, more = (model.plan(TrainingSetup(micro_batch=b, **base)) for b in (8, 9))
    assert some.moment == more.moment == "loss backward"
    # token ids; the final norm's input in fp32, its result and 1/std, kept by the norm and the head
    ends = 1024 * (8 + 4096 * (4 + 2 + 2) + 4)
    assert more.line("activations") - some.line("activations") == 32 * 2 * 1024 * 4096 + ends


def test_gradient_checkpointing_in_segments_keeps_fewer_activations_than_per_layer(planner):
    model = planner(LLAMA_8B)
    setup = {"precision": "bf16", "checkpointing": "full", "micro_batch": 8, "sequence_length": 4096,
             "loss": "fused"}  # fmt: skip
    each = model.plan(TrainingSetup(**setup))
    segments = model.plan(TrainingSetup(checkpoint_segments=6, **setup))
    assert segments.line("activations") < each.line("activations") / 3
    assert segments.line("temporary") > each.line("temporary")  # a whole segment is recomputed


@pytest.mark.parametrize(
    ("extra", "per_parameter"),
    [
        ({}, 4),  # torch.optim.AdamW: the list of denominators
        ({"optimizer_kernel": "fused"}, 0),
        ({"convention": "zero"}, 4),  # Megatron-LM: fp32 copy of the 16-bit gradients, FusedAdam
        ({"convention": "zero", "optimizer_kernel": "foreach"}, 8),
        ({"convention": "zero", "optimizer": "sgd"}, 4),
        ({"convention": "zero", "gradient_dtype": "fp32"}, 0),
        ({"convention": "huggingface"}, 0),
        ({"strategy": "zero2", "gpus": 8}, 6 / 8),  # DeepSpeed: flat gradients, then in fp32
        ({"strategy": "zero2", "gpus": 8, "optimizer_kernel": "foreach"}, 8 / 8),  # the flat 16-bit ones freed
        ({"strategy": "zero1", "gpus": 8, "precision": "fp32"}, 4 / 8),
        ({"strategy": "zero2", "gpus": 8, "offload_optimizer": "cpu"}, 0),
    ],
)
def test_framework_decides_the_bytes_copied_in_the_optimizer_step(planner, extra, per_parameter):
    """A framework's fused AdamW with an fp32 master steps on an fp32 copy of the gradients (step.py)."""
    model = planner(LLAMA_8B)
    setup = TrainingSetup(**extra)
    step = step_of(setup, convention_of(setup), model.states(setup, 0))
    assert step.bytes == per_parameter * 8_030_261_248


def test_zero_3_optimizer_step_copies_only_one_sub_group_of_parameters(planner):
    setup = TrainingSetup(strategy="zero3", gpus=4)
    step = step_of(setup, convention_of(setup), planner(LLAMA_8B).states(setup, 0))
    assert step.bytes == 6 * SUB_GROUP_ELEMENTS < 6 * 8_030_261_248 // 4


def test_zero_2_step_bytes_equal_deepspeed_estimate(planner):
    """DeepSpeed's 18 bytes per partitioned parameter are our 14 and the fp32 gradient copy."""
    setup = TrainingSetup(strategy="zero2", gpus=8)
    states = planner(LLAMA_8B).states(setup, 0)
    copy = step_of(setup, convention_of(setup), states).bytes - states.gradients  # the flat one is freed
    assert states.total + copy == deepspeed.zero2(8_030_261_248, 8, offload=False).gpu


def test_plan_explains_the_fp32_gradient_copy_of_a_peak_in_the_optimizer_step(planner):
    plan = planner(LLAMA_8B).plan(TrainingSetup(convention="zero", checkpointing="full", sequence_length=128))
    assert plan.moment == "optimizer step"
    line = next(line for line in plan.lines if line.name == "temporary")
    assert line.bytes == 4 * 8_030_261_248
    assert "fp32 copy of the gradients, 4 bytes x 8,030,261,248" in line.formula


def test_gradient_accumulation_changes_no_memory_term(planner):
    model = planner(LLAMA_8B)
    one, many = (model.plan(TrainingSetup(gradient_accumulation=n)) for n in (1, 16))
    assert [(x.name, x.bytes) for x in one.lines] == [(x.name, x.bytes) for x in many.lines]
    assert many.setup.effective_batch == 16


def test_every_training_memory_line_has_interval_formula_and_source(planner):
    plan = planner(LLAMA_8B).plan(TrainingSetup(strategy="zero2", gpus=8))
    names = {line.name for line in plan.lines}
    assert {"activations", "logits and loss", "cuBLAS workspaces", "CUDA context", "NCCL buffers"} <= names
    for line in plan.lines:
        assert line.low <= line.bytes <= line.high, line
        assert line.source, line
        assert line.formula, line
    low, high = plan.bounds()
    assert low <= plan.total() <= high
