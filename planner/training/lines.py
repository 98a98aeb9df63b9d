"""Builders of a training plan's lines. A line has one memory component's bytes, formula and source."""

from __future__ import annotations

from dataclasses import replace

from tonnage.planner.training.activations import ESTIMATE_HIGH, ESTIMATE_LOW
from tonnage.planner.training.device import attention_of
from tonnage.planner.training.methods import Trained
from tonnage.planner.training.optimizers import OPTIMIZER
from tonnage.planner.training.peak import Peak
from tonnage.planner.training.placement import HostBytes
from tonnage.planner.training.plans import Line, Place
from tonnage.planner.training.precision import Convention, frozen_bytes
from tonnage.planner.training.setup import TrainingSetup
from tonnage.planner.training.stacks import adapter_bytes
from tonnage.planner.training.states import States
from tonnage.planner.units import gib

LOSS = {
    "full": "logits, log_softmax and their gradients: 14 bytes each (16 in fp32)",
    "dropped": "log_softmax and two gradients, 4 bytes each; the logits are dropped before",
    "fused": "logits of one chunk of rows",
    "chunked": "16-bit logits of all chunks, what one chunk's cross-entropy takes",
}


def paged(setup: TrainingSetup, lines: list[Line]) -> list[Line]:
    """Return the plan's lines, with paged optimizer states limited to the GPU memory that is left.

    bitsandbytes keeps paged states in managed memory (functional.py get_paged: cudaMallocManaged), so states
    that exceed the GPU's memory are in host memory. This is how torchtune's published full training of an 8B
    model fits on an RTX 4090.
    """
    on_gpu = [line for line in lines if line.place == "gpu"]
    states = next((line for line in on_gpu if line.name == "optimizer states"), None)
    if not setup.optimizer.startswith("paged") or setup.device_memory is None or states is None:
        return lines
    room = setup.device_memory - sum(line.bytes for line in on_gpu if line is not states)
    if states.bytes <= room:
        return lines
    formula = f"of {gib(states.bytes)} what fits beside the rest: {states.formula}"
    limited = replace(states, bytes=max(0, room), low=0, formula=formula)
    return [limited if line is states else line for line in lines]


def _exact(name: str, size: int, formula: str, source: str, place: Place = "gpu") -> Line:
    """Return a training plan's line with exact bytes: both bounds equal `size`."""
    return Line(name, place, size, size, size, formula, source)


def state_lines(
    setup: TrainingSetup, states: States, c: Convention, placed: HostBytes, trained: Trained, there: int
) -> list[Line]:
    """Return a training plan's lines of model states; `there` is the bytes of gradients at the peak."""
    ranks = f" over {setup.shard_ranks} ranks" if setup.zero_stage else ""
    master = states.master if c.master_with_weights else 0
    per = f"{c.weights} + {c.master}" if c.master_with_weights and c.master else str(c.weights)
    adapters = f" (adapters {8 * adapter_bytes(setup)} bits)" if trained.adapters else ""
    out = []
    if not placed.weights_off:
        shared = ranks if setup.zero_stage == 3 else ""
        out += [
            _exact("weights", states.weights + (0 if placed.optimizer_off else master),
                   f"{per} bytes x {states.trainable:,} trained parameters{shared}{adapters}", c.used_by),
            _exact("frozen weights", states.frozen,
                   f"{states.parameters - states.trainable:,} parameters, {_frozen(setup)}{shared}",
                   "--base-quantization" if setup.method == "qlora" else "--base-dtype"),
        ]  # fmt: skip
    out.append(
        _exact("persistent parameters", states.persistent,
               "parameters below 100,000 elements stay whole on every rank",
               "DeepSpeed stage3_param_persistence_threshold")
    )  # fmt: skip
    if not placed.gradients_off:
        shared = ranks if setup.zero_stage >= 2 else ""
        formula = f"{c.gradients} bytes x {states.trainable:,}{shared}{adapters}"
        if there != states.gradients:
            formula = f"the part of {gib(states.gradients)} that exists at the peak: {formula}"
        out.append(_exact("gradients", there, formula, "--gradient-dtype"))
    if not placed.optimizer_off:
        inner = states.optimizer + (0 if c.master_with_weights else states.master)
        held = f"{c.master} (fp32 master) + " if states.master and not c.master_with_weights else ""
        formula = f"{held}{OPTIMIZER[setup.optimizer].formula} of {c.state} bytes x {states.trainable:,}{ranks}"
        out.append(_exact("optimizer states", inner, formula, f"--optimizer {setup.optimizer}"))
    if (setup.zero_stage == 3 and setup.shard_ranks > 1) or placed.weights_off:
        out.append(placed.gathered)
    return out


def _frozen(setup: TrainingSetup) -> str:
    """Return a text on how frozen weights are stored, for the formula of their line in a training plan."""
    if setup.method == "qlora":
        return f"linear weights in {setup.base_quantization}, the rest {frozen_bytes(setup)} bytes"
    return f"{frozen_bytes(setup)} bytes each"


def peak_lines(
    setup: TrainingSetup, peak: Peak | None, length: int, estimated: bool, bounds: tuple[int, int]
) -> list[Line]:
    """Return a training plan's lines of a step's memory peak, such as activations, logits and weight casts.

    Args:
        setup: the training flags.
        peak: the peak of a training step, None if activations are not planned.
        length: sequence length in tokens.
        estimated: whether the activations are estimated from tensor shapes.
        bounds: bytes by which the activations may be (lower, higher) than planned.
    """
    if peak is None:
        return []
    at = f"b = {setup.micro_batch}, s = {length:,}, {attention_of(setup)}, checkpointing {setup.checkpointing}"
    source = "saved tensors of the forward pass (planner/training/activations.py)"
    kept = peak.activations
    low, high = kept - bounds[0], kept + bounds[1]
    if estimated:
        low, high = min(low, int(kept * ESTIMATE_LOW)), max(high, int(kept * ESTIMATE_HIGH))
        source = "estimated: inputs and outputs of every linear layer, norms in fp32"
    out = [Line("activations", "gpu", kept, low, high, at, source)]
    if peak.logits:
        # The lower bound of logits and loss is for a training loop that drops the 16-bit logits, which are 2 of
        # the 14 bytes per logit.
        formula = LOSS[setup.loss if setup.stack is None or setup.loss != "full" else "dropped"]
        out.append(
            Line(
                "logits and loss",
                "gpu",
                peak.logits,
                peak.logits * 12 // 14,
                peak.logits,
                formula,
                "cross-entropy, moment: " + peak.moment,
            )
        )
    out.append(
        _exact(
            "weight casts",
            peak.casts,
            "matrices in fp8, as stored and transposed: 1 + 1 bytes a weight"
            if setup.fp8_kept
            else "16-bit copies of fp32 matrices that autograd or the cache keep",
            "Transformer Engine (pytorch/module/linear.py)" if setup.fp8_kept else "torch.autocast",
        )
    )
    t, formula = peak.temporary, f"moment: {peak.moment}" + (f" ({peak.copies})" if peak.copies else "")
    out.append(Line("temporary", "gpu", t, t - peak.rough // 2, t, formula, "planner/training/peak.py"))
    r = peak.rounding
    out.append(
        Line(
            "allocator rounding",
            "gpu",
            r,
            0,
            2 * r,
            "segments of 10 MiB and more in steps of 2 MiB",
            "c10/cuda/CUDACachingAllocator.cpp",
        )
    )
    return out


def host_lines(setup: TrainingSetup, placed: HostBytes, peak: Peak | None, states: States) -> list[Line]:
    """Return a training plan's lines of CPU and NVMe memory.

    They are offloaded model states, offloaded activations, and the optimizer's step counters.
    """
    node = setup.gpus
    out = list(placed.lines)
    if peak is not None and peak.cpu:
        out.append(
            _exact("offloaded activations", peak.cpu * node, f"{node} ranks", "--offload-activations", "cpu")
        )
    if states.counters:
        out.append(_exact("step counters", states.counters * node, "4 bytes per tensor", "torch.optim", "cpu"))
    return out
