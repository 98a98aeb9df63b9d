"""Tests of two real training steps: parameters, gradients, states and adapters equal the plan exactly."""

from __future__ import annotations

import pytest
import training_models as models

from tonnage.planner.training.setup import TrainingSetup

torch = pytest.importorskip("torch", reason="the real thing is torch")


def train(model, optimizer, steps: int = 2) -> None:
    ids = torch.randint(0, 500, (1, 16))
    for _ in range(steps):
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def measured(model, optimizer) -> tuple[int, int, int, int]:
    """Return the bytes of (all parameters, gradients, optimizer states, step counters)."""
    parameters = sum(models.storages(model.parameters()).values())
    gradients = sum(models.storages(p.grad for p in model.parameters() if p.grad is not None).values())
    states, counters = {}, {}
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                (counters if name == "step" else states).update(models.storages([value]))
    return parameters, gradients, sum(states.values()), sum(counters.values())


def planned(family: str, setup: TrainingSetup) -> tuple[int, int, int, int]:
    states = models.planner(family).states(setup, 0)
    return states.weights + states.frozen, states.gradients, states.optimizer, states.counters


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-4),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-4),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=1e-4, momentum=0.9),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-4),
}


@pytest.mark.parametrize("family", models.FAMILIES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_planned_bytes_of_full_adamw_training_states_equal_real_training(family, precision):
    real = models.real_model(family, dtype={"fp32": "float32", "bf16": "bfloat16"}[precision])
    optimizer = OPTIMIZERS["adamw"](real.parameters())
    train(real, optimizer)
    assert measured(real, optimizer) == planned(family, TrainingSetup(precision=precision))


@pytest.mark.parametrize("name", ["sgd", "sgd-momentum", "adafactor"])
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "falcon"])
def test_planned_optimizer_state_bytes_equal_real_training(family, name):
    real = models.real_model(family)
    optimizer = OPTIMIZERS[name](real.parameters())
    train(real, optimizer)
    assert measured(real, optimizer) == planned(family, TrainingSetup(precision="fp32", optimizer=name))


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_planned_muon_and_adamw_state_bytes_equal_real_training(family):
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("torch before 2.9 has no Muon")
    real = models.real_model(family)
    named = dict(real.named_parameters())
    matrices = [p for n, p in named.items() if p.ndim == 2 and "embed" not in n and "lm_head" not in n]
    rest = [p for p in named.values() if all(p is not m for m in matrices)]
    muon, adamw = torch.optim.Muon(matrices, lr=1e-4), torch.optim.AdamW(rest, lr=1e-4)
    train(real, muon)
    ids = torch.randint(0, 500, (1, 16))
    real(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    adamw.step()
    found = measured(real, muon)[2] + measured(real, adamw)[2]
    assert found == planned(family, TrainingSetup(precision="fp32", optimizer="muon"))[2]


@pytest.mark.parametrize("family", models.FAMILIES)
def test_planned_bytes_of_fp32_states_in_autocast_training_equal_real_training(family):
    real = models.real_model(family)
    optimizer = OPTIMIZERS["adamw"](real.parameters())
    ids = torch.randint(0, 500, (1, 16))
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = real(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
    assert measured(real, optimizer) == planned(family, TrainingSetup(precision="bf16-mixed"))


@pytest.mark.parametrize("family", models.FAMILIES)
@pytest.mark.parametrize("method", ["lora", "ia3", "all-linear"])
def test_planned_adapter_state_bytes_equal_peft(family, method):
    peft = pytest.importorskip("peft", reason="adapters are PEFT's")
    extra = {}
    if method == "ia3":
        config = peft.IA3Config(task_type="CAUSAL_LM")
    else:
        extra = {"rank": 4, "target_modules": ("all-linear",) if method == "all-linear" else None}
        modules = "all-linear" if method == "all-linear" else None
        config = peft.LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=modules)
    real = peft.get_peft_model(models.real_model(family, dtype="bfloat16"), config).train()
    trained = [p for p in real.parameters() if p.requires_grad]
    optimizer = OPTIMIZERS["adamw"](trained)
    train(real, optimizer)
    setup = TrainingSetup(method="ia3" if method == "ia3" else "lora", precision="bf16", **extra)
    assert measured(real, optimizer) == planned(family, setup)
    assert sum(p.numel() for p in trained) == models.planner(family).trained(setup).adapters


def test_frozen_layers_have_no_gradients_or_states():
    real = models.real_model("llama")
    for parameter in real.parameters():
        parameter.requires_grad = False
    for layer in real.model.layers[-2:]:
        for parameter in layer.parameters():
            parameter.requires_grad = True
    optimizer = OPTIMIZERS["adamw"]([p for p in real.parameters() if p.requires_grad])
    train(real, optimizer)
    setup = TrainingSetup(method="freeze", precision="fp32", trainable_layers=2)
    assert measured(real, optimizer) == planned("llama", setup)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox"])
def test_planned_8bit_adamw_state_bytes_equal_bitsandbytes(family):
    """On the CPU, states of 4,096 values and more are block-wise, with two shared maps of 1 KiB."""
    bnb = pytest.importorskip("bitsandbytes", reason="8-bit AdamW is bitsandbytes'")
    real = models.real_model(family)
    optimizer = bnb.optim.AdamW8bit(real.parameters(), lr=1e-4)
    try:
        train(real, optimizer)
    except (NotImplementedError, RuntimeError) as error:
        pytest.skip(f"bitsandbytes has no 8-bit AdamW on this CPU: {error}")
    found = measured(real, optimizer)
    assert found[:3] == planned(family, TrainingSetup(precision="fp32", optimizer="adamw-8bit"))[:3]


@pytest.mark.parametrize("scheme", ["nf4", "nf4-double"])
def test_planned_qlora_base_and_adapter_bytes_equal_bitsandbytes(scheme, held_bytes):
    """The base has 4 bits by bitsandbytes, the adapters are PEFT's; the bytes are equal."""
    peft = pytest.importorskip("peft", reason="adapters are PEFT's")
    bnb = pytest.importorskip("bitsandbytes", reason="NF4 is bitsandbytes'")
    real = models.real_model("llama", dtype="bfloat16")
    for name, module in list(real.named_modules()):
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            four = bnb.nn.Linear4bit(
                module.in_features, module.out_features, bias=False, compute_dtype=torch.bfloat16,
                compress_statistics=scheme == "nf4-double", quant_type="nf4",
            )  # fmt: skip
            four.weight = bnb.nn.Params4bit(
                module.weight.data,
                requires_grad=False,
                compress_statistics=scheme == "nf4-double",
                quant_type="nf4",
            )
            real.set_submodule(name, four.to("cpu"))
    real = peft.get_peft_model(real, peft.LoraConfig(r=4, task_type="CAUSAL_LM"))
    setup = TrainingSetup(method="qlora", precision="bf16-mixed", base_quantization=scheme, rank=4)
    model = models.planner("llama")
    states, trained = model.states(setup, 0), model.trained(setup)
    assert held_bytes(real) == states.weights + states.frozen + trained.buffer_bytes
