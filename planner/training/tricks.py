"""Memory-saving tricks, each planned for one model and setup, and ranked by the time that it costs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isqrt
from typing import Any

from tonnage.planner.errors import TonnageError
from tonnage.planner.training.build import Planner
from tonnage.planner.training.device import attention_of
from tonnage.planner.training.plans import TrainingPlan
from tonnage.planner.training.setup import TrainingSetup
from tonnage.planner.training.speed import work_of
from tonnage.planner.training.step import kernel_of
from tonnage.planner.units import gib


@dataclass(frozen=True, slots=True)
class Trick:
    """One memory-saving trick for training, and the figures of the plan with the trick.

    Attributes:
        name: name of the trick.
        flags: the flags that apply it, as text.
        gpu_bytes: GPU bytes with the trick.
        saved: GPU bytes that the trick saves, negative if the trick needs more.
        cpu_bytes: CPU bytes with the trick.
        relative_time: step time with the trick divided by step time without it, as speed.py estimates both.
        fits: whether the setup fits with the trick, None if no device memory was given.
        note: an effect of the trick that the other fields do not show.
        changes: (field, new value) of each changed flag.
    """

    name: str
    flags: str
    gpu_bytes: int
    saved: int
    cpu_bytes: int
    relative_time: float
    fits: bool | None
    note: str
    changes: tuple[tuple[str, Any], ...]


def _candidates(setup: TrainingSetup, layers: int, hidden_tokens: int) -> list[tuple[str, dict[str, Any], str]]:
    """Return (name, flag changes, note) of each memory-saving trick that applies to the training setup."""
    many, ddp = setup.shard_ranks > 1, setup.strategy == "ddp"
    odd, root, attention = setup.micro_batch % 8, isqrt(layers), attention_of(setup)
    up, steps = setup.micro_batch + 8 - odd, setup.gradient_accumulation * setup.micro_batch
    offloadable = setup.offload_optimizer == "none" and not setup.is_fsdp
    table: list[tuple[bool, str, dict[str, Any], str]] = [
        (setup.micro_batch > 1, "gradient accumulation", {"micro_batch": 1, "gradient_accumulation": steps},
         "same effective batch"),
        (odd > 0, f"micro-batch {up} (multiple of 8; 64 on A100)", {"micro_batch": up},
         "b x s is a multiple of 64 already" if hidden_tokens % 64 == 0 else "fills tensor-core tiles"),
        (setup.checkpointing != "full", "gradient checkpointing", {"checkpointing": "full"},
         "recomputes each layer"),
        (setup.checkpointing != "full", f"checkpointing in {root} segments",
         {"checkpointing": "full", "checkpoint_segments": root}, "about sqrt(layers) segments"),
        (setup.checkpointing == "none" and attention == "eager", "selective checkpointing",
         {"checkpointing": "selective"}, "recomputes attention scores"),
        (attention != "flash" and setup.precision != "fp32" and setup.stack != "torchtune", "FlashAttention",
         {"attention": "flash"}, "no score matrix in memory; fewer HBM passes"),
        (not setup.compile, "torch.compile", {"compile": True},
         "pointwise operations are recomputed; an interval"),
        (setup.method == "full" and not setup.optimizer_in_backward, "optimizer in backward",
         {"optimizer_in_backward": True}, "no clipping, no accumulation"),
        (setup.method == "full" and not setup.optimizer_in_backward, "GaLore, 8-bit",
         {"optimizer": "galore-adamw-8bit"}, "gradients projected to --galore-rank"),
        (setup.loss == "full" and setup.stack == "torchtune", "chunked loss", {"loss": "chunked"},
         "fp32 for one chunk at a time"),
        (setup.loss == "full" and setup.stack != "torchtune", "fused linear cross-entropy", {"loss": "fused"},
         "logits in chunks (Liger kernel)"),
        (setup.precision == "fp32", "mixed precision", {"precision": "bf16-mixed"}, "16-bit tensor cores"),
        (not setup.pure_16_bit, "pure bf16", {"precision": "bf16", "convention": None},
         "small updates are rounded away"),
        *((setup.optimizer != name, f"optimizer {name}", {"optimizer": name}, "")
          for name in ("adamw-8bit", "paged-adamw-8bit", "adafactor", "lion", "sgd")),
        (kernel_of(setup) != "fused", "fused optimizer", {"optimizer_kernel": "fused"},
         "no copies during the step"),
        (many and ddp and not setup.gradient_as_bucket_view, "gradient_as_bucket_view",
         {"gradient_as_bucket_view": True}, "gradients live in the buckets"),
        *((many and setup.strategy in ("ddp", "zero1", "zero2") and stage > setup.strategy,
           f"ZeRO stage {stage[-1]}", {"strategy": stage}, "") for stage in ("zero1", "zero2", "zero3")),
        (many and ddp, "FSDP full shard", {"strategy": "fsdp"}, ""),
        (offloadable, "ZeRO-Offload (optimizer to CPU)",
         {"strategy": setup.strategy if setup.zero_stage else "zero2", "offload_optimizer": "cpu"}, "CPU Adam"),
        (offloadable, "ZeRO-Infinity (weights and optimizer to CPU)",
         {"strategy": "zero3", "offload_optimizer": "cpu", "offload_param": "cpu"}, "CPU Adam"),
        (not setup.offload_activations, "offloaded activations", {"offload_activations": True},
         "over PCIe, both ways"),
        (setup.method == "full", "LoRA", {"method": "lora"}, "trains adapters only"),
        (setup.method in ("full", "lora"), "QLoRA", {"method": "qlora"},
         "adapters over a 4-bit base; about 30 % slower than LoRA"),
    ]  # fmt: skip
    return [(name, changes, note) for applies, name, changes, note in table if applies]


def tricks(planner: Planner, setup: TrainingSetup) -> tuple[Trick, ...]:
    """Return every memory-saving trick that applies to the training setup, with its planned effect.

    Tricks with which the setup fits come first. Tricks are then sorted by relative step time and by memory. If
    no single trick makes the setup fit, the first entry is a combination of the fastest tricks that does. A
    trick that contradicts the setup is left out.
    """
    base = planner.plan(setup)
    reference = work_of(planner, base).seconds
    out = []
    tokens = setup.micro_batch * base.length
    for name, changes, note in _candidates(setup, planner.model.architecture.layers, tokens):
        found = tried_with(planner, setup, base, reference, name, changes, note)
        if found is not None:
            out.append(found)
    out.append(_data_loader(base))
    out.sort(key=lambda t: (not t.fits, round(t.relative_time, 3), t.gpu_bytes))
    if base.fits is False and not any(t.fits for t in out):
        together = _together(planner, setup, base, reference, out)
        if together is not None:
            out.insert(0, together)
    return tuple(out)


def tried_with(
    planner: Planner, setup: TrainingSetup, base: TrainingPlan, reference: float, name: str,
    changes: dict[str, Any], note: str,
) -> Trick | None:  # fmt: skip
    """Return the memory-saving trick that applies `changes` to `setup`, with the changed plan's figures.

    Returns None if the changed setup is rejected. `base` is the plan without the changes, `reference` its step
    time in seconds.
    """
    try:
        plan = planner.plan(replace(setup, **changes))
    except TonnageError:
        return None
    work = work_of(planner, plan)
    scale = plan.setup.effective_batch / base.setup.effective_batch
    if work.pcie:
        note = f"{note}; {gib(work.pcie)} over PCIe a step" if note else f"{gib(work.pcie)} over PCIe a step"
    return Trick(
        name, _flags(changes), plan.total(), base.total() - plan.total(), plan.total("cpu"),
        work.seconds / reference / scale, plan.fits, note, tuple(changes.items()),
    )  # fmt: skip


def _flags(changes: dict[str, Any]) -> str:
    """Return the flag changes of a memory-saving trick as command-line text, such as `--loss fused`."""
    parts = []
    for field, value in changes.items():
        flag = "--" + field.replace("_", "-")
        if value is True:
            parts.append(flag)
        elif value is not None:
            parts.append(f"{flag} {value}")
    return " ".join(parts)


def _data_loader(plan: TrainingPlan) -> Trick:
    """Return a row for the table of tricks: the CPU memory of the data loader's pinned batches.

    4 workers hold 2 batches each (prefetch_factor). For each token, a batch has an id, a label and a
    mask value of 8 bytes each.
    """
    size = 4 * 2 * 3 * 8 * plan.setup.micro_batch * plan.length * plan.setup.gpus
    return Trick(
        "data loader (pinned, 4 workers)", "pin_memory, num_workers=4", plan.total(),
        0, plan.total("cpu") + size, 1.0, plan.fits, f"{gib(size)} of CPU memory; saves none on the GPU",
        (),
    )  # fmt: skip


def _together(
    planner: Planner, setup: TrainingSetup, base: TrainingPlan, reference: float, rows: list[Trick]
) -> Trick | None:
    """Return a combination of memory-saving tricks with which the setup fits, None if none is found.

    Tricks are added in order of relative step time. A trick is skipped if it sets a flag that an added trick
    sets, or if it saves no further GPU memory.
    """
    changes: dict[str, Any] = {}
    names: list[str] = []
    held = base.total()
    for row in sorted(rows, key=lambda t: (round(t.relative_time, 2), t.gpu_bytes)):
        if not row.changes or any(field in changes for field, _ in row.changes):
            continue
        tried = tried_with(planner, setup, base, reference, "", {**changes, **dict(row.changes)}, "")
        if tried is None or tried.gpu_bytes >= held:
            continue
        changes.update(row.changes)
        names.append(row.name)
        held = tried.gpu_bytes
        if tried.fits:
            return replace(tried, name="together: " + ", ".join(names))
    return None
