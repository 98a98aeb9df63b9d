"""Check of a training plan against the given memory, and notes on what its figures leave out."""

from __future__ import annotations

from tonnage.planner.training.activations import ESTIMATE_HIGH, ESTIMATE_LOW
from tonnage.planner.training.device import attention_of, device_notes
from tonnage.planner.training.methods import Trained
from tonnage.planner.training.model import TrainingModel
from tonnage.planner.training.peak import Peak
from tonnage.planner.training.plans import Line
from tonnage.planner.training.setup import TrainingSetup
from tonnage.planner.training.stacks import stack_notes
from tonnage.planner.units import gib


def judge(setup: TrainingSetup, lines: list[Line], init: int) -> tuple[bool | None, tuple[str, ...]]:
    """Return whether a training plan fits into the given GPU, CPU and NVMe memory, and why not.

    The first value is None if no memory size was given.

    `init` is the bytes of a node's CPU memory while its ranks build the model.
    """
    reasons = []
    limits = (
        ("gpu", setup.device_memory, "the GPU's"),
        ("cpu", setup.cpu_memory, "--cpu-memory"),
        ("nvme", setup.nvme, "--nvme"),
    )
    for where, limit, name in limits:
        if limit is None:
            continue
        here = [line for line in lines if line.place == where]
        need, what = sum(line.bytes for line in here), ""
        if where == "cpu" and init > need:
            need, what = init, " while the model is built"
        if need > limit:
            largest = ", ".join(f"{x.name} {gib(x.bytes)}" for x in sorted(here, key=lambda x: -x.bytes)[:3])
            reasons.append(
                f"{where}: {gib(need)} ({need:,} bytes) are needed{what}, {gib(need - limit)} more than "
                f"{name} {gib(limit)}" + (f"; largest: {largest}" if largest else "")
            )
    given = any(limit is not None for _, limit, _ in limits)
    return (not reasons if given else None), tuple(reasons)


def notes_of(
    model: TrainingModel, setup: TrainingSetup, trained: Trained, peak: Peak | None
) -> tuple[str, ...]:
    """Return notes on what the memory figures of a training plan leave out or assume."""
    out = list(model.notes)
    if peak is None:
        out.append(
            f"activations of {model.architecture.model_type} are not planned: the figures are model "
            "states and overheads only"
        )
    elif model.estimated:
        name = model.architecture.model_type
        out.append(
            f"activations of {name} are estimated from its shapes, {ESTIMATE_LOW} to {ESTIMATE_HIGH} times the "
            "figure"
        )
    asked = attention_of(setup)
    attention = model.attention(asked)
    if attention != asked:
        out.append(
            f"{model.architecture.class_name} has no {asked} attention in transformers: "
            f"planned with {attention}"
        )
    if model.architecture.experts and "all-linear" in (setup.target_modules or ()):
        out.append("PEFT adapts routers, and the experts of some mixtures, too under all-linear: not counted")
    out += device_notes(setup)
    if setup.precision in ("fp16", "fp16-mixed"):
        out.append("fp16: loss scaling is on; bf16 needs none where the GPU has it (compute capability 8.0)")
    if setup.precision == "fp16":
        out.append("pure fp16: torch's GradScaler refuses fp16 gradients, so the loss is scaled by hand")
    if setup.precision == "fp8":
        out.append("fp8 needs compute capability 8.9 (Ada, Hopper)")
        out.append("what fp8 keeps is read from its libraries' sources, not measured")
    out += stack_notes(setup)
    if setup.method == "qlora":
        out.append("QLoRA: ZeRO 1 and 2 replicate the quantized base, stage 3 cannot split it, FSDP can (NF4)")
        out.append("QLoRA runs about 30 % slower than LoRA: each matrix is dequantized for each use")
    if setup.method == "qlora" and setup.stack is None:
        upcast = sum(
            h.elements * h.count * 2
            for h in trained.held
            if not h.trainable and h.frozen_bytes == 2 * h.elements
        )
        out.append(f"prepare_model_for_kbit_training casts what is not quantized to fp32: {gib(upcast)} more")
    if setup.optimizer in ("adamw-8bit", "paged-adamw-8bit") and setup.stack != "torchtune":
        rows = [h for h in trained.held if h.trainable and h.role == "embedding"]
        more = sum(6 * h.elements * h.count for h in rows)
        if more:
            out.append(f"HF Trainer keeps 32-bit states for nn.Embedding: {gib(more)} more")
    if setup.checkpointing == "selective" and asked != "eager":
        out.append(f"selective checkpointing recomputes attention scores; {asked} keeps none")
    if (
        setup.strategy in ("ddp", "fsdp-no-shard")
        and setup.shard_ranks > 1
        and not setup.gradient_as_bucket_view
    ):
        out.append("DDP's buckets hold a second copy of the gradients; gradient_as_bucket_view=True drops it")
    if setup.gradient_accumulation > 1:
        out.append("gradient accumulation changes neither the model states nor one micro-batch's activations")
    return tuple(out)
