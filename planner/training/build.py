"""Planner: a model and a TrainingSetup -> TrainingPlan."""

from __future__ import annotations

from operator import attrgetter

from tonnage.planner.records import replace
from tonnage.planner.training.activations import (
    ESTIMATE_HIGH,
    ESTIMATE_LOW,
    Activations,
    activations_of,
)
from tonnage.planner.training.communication import NO_COMMUNICATION, communication_of
from tonnage.planner.training.device import attention_of, check_device, device_notes
from tonnage.planner.training.methods import LINEARS, Trained, train_under
from tonnage.planner.training.model import TrainingModel
from tonnage.planner.training.optimizers import OPTIMIZER
from tonnage.planner.training.overheads import overheads_of
from tonnage.planner.training.peak import Gradients, Peak, StageShape, peak_of
from tonnage.planner.training.placement import HostBytes, place
from tonnage.planner.training.plans import Line, Place, TrainingPlan
from tonnage.planner.training.precision import Convention, convention_of, frozen_bytes
from tonnage.planner.training.setup import TrainingSetup, check_setup
from tonnage.planner.training.sharding import check_parallel, check_segments, stage_of
from tonnage.planner.training.stacks import (
    adapter_bytes,
    check_stack,
    gradients_held,
    kernels_of,
    stack_notes,
    stack_of,
)
from tonnage.planner.training.states import States, states_on_rank
from tonnage.planner.training.step import step_of
from tonnage.planner.training.tape import Kernels
from tonnage.planner.units import ceil_div, gib

DEFAULT_LENGTH = 2048  # when the flag is absent, or the model's own length if shorter


_METHOD = attrgetter(
    "stack",
    "method",
    "rank",
    "target_modules",
    "trainable_layers",
    "base_quantization",
    "base_dtype",
    "precision",
)
_STATES = attrgetter(
    "convention", "gradient_dtype", "optimizer", "galore_rank", "strategy", "gpus", "nodes", "shard_size",
    "fsdp_version", "tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel",
)  # fmt: skip


_ACTIVATIONS = attrgetter(
    "convention",
    "gradient_dtype",
    "strategy",
    "attention",
    "compute_capability",
    "materialized_mask",
    "packing",
)


class Planner:
    """Plans many setups of one model: what only depends on part of the setup is computed once."""

    def __init__(self, model: TrainingModel) -> None:
        self.model = model
        self._trained: dict[object, Trained] = {}
        self._states: dict[object, States] = {}
        self._activations: dict[object, Activations] = {}

    def trained(self, setup: TrainingSetup) -> Trained:
        key = _METHOD(setup)
        if key not in self._trained:
            self._trained[key] = train_under(self.model.architecture, setup)
        return self._trained[key]

    def states(self, setup: TrainingSetup, stage: int) -> States:
        key = (_METHOD(setup), _STATES(setup), stage)
        found = self._states.get(key)
        if found is None:
            check_parallel(self.model.architecture, setup)
            found = states_on_rank(self.trained(setup), self.model.architecture, setup, stage)
            self._states[key] = found
        return found

    def length(self, setup: TrainingSetup) -> int:
        return setup.sequence_length or min(DEFAULT_LENGTH, self.model.architecture.max_model_len)

    def activations(self, setup: TrainingSetup, kernels: Kernels | None = None) -> Activations | None:
        """``kernels``: instead of the stack's own."""
        recipe = self.model.recipe
        if recipe is None:
            return None
        kernels = kernels or kernels_of(setup)
        longest = self.length(setup) if any(self.model.windows) else 0
        single = setup.micro_batch == 1
        known = (_METHOD(setup), _ACTIVATIONS(setup), longest, single, kernels)
        cached = self._activations.get(known)
        if cached is not None:
            return cached
        targets = self.trained(setup).targets
        key = (
            self.model.attention(attention_of(setup)),
            setup.method,
            setup.rank,
            targets,
            setup.trainable_layers,
            setup.fp8_kept,
        )
        found = activations_of(
            recipe, self.model.masked(self.length(setup)), convention_of(setup),
            4 if kernels.quantized else frozen_bytes(setup), key,
            explicit_mask=setup.materialized_mask
            or (setup.packing and attention_of(setup) == "sdpa" and kernels.tables != "taken"),
            single=single, estimated=self.model.estimated, kernels=kernels,
        )  # fmt: skip
        self._activations[known] = found
        return found

    def peak(
        self, setup: TrainingSetup, stage: int, states: States, kernels: Kernels | None = None,
        wide_step: bool = False,
    ) -> Peak | None:  # fmt: skip
        """``wide_step``: with the optimizer's four operands in fp32, for the largest tensor."""
        acts = self.activations(setup, kernels)
        if acts is None:
            return None
        stages = setup.pipeline_parallel
        architecture = self.model.architecture
        flight = 1
        if stages > 1:
            # one forward, one backward in turn: a stage keeps as many micro-batches as stages follow it
            flight = min(stages - stage, setup.pipeline_micro_batches or setup.gradient_accumulation)
        shape = StageShape(
            len(stage_of(architecture, setup, stage)),
            architecture.layers,
            stage == 0,
            stage == stages - 1,
            flight,
        )
        convention = convention_of(setup)
        step = step_of(setup, convention, states)
        if wide_step:
            step = step._replace(bytes=step.bytes + 4 * 4 * states.largest)
        full = setup.method == "full"
        side = ceil_div(acts.vocab, setup.tensor_parallel) * acts.hidden * convention.gradients if full else 0
        gradients = Gradients(
            states.gradients, side, 0 if self.model.tied else side, gradients_held(setup),
            setup.optimizer_in_backward,
        )  # fmt: skip
        return peak_of(
            setup, acts, shape, self.length(setup), architecture.intermediate_size, step, full, self.model.tied,
            gradients, states.packed,
        )  # fmt: skip

    def peak_bounds(self, setup: TrainingSetup, stage: int, states: States, peak: Peak) -> tuple[int, int]:
        """Bytes by which the peak may be lower and higher: by what a compiler chooses to keep, which of
        torchtune's two RMSNorms runs, how an 8-bit optimizer computes; fp8 is bounded by what 16 bits keep."""
        kernels = kernels_of(setup)
        low = high = kernels
        if kernels.compiled == "least":  # a stack's own kernels
            high = kernels._replace(compiled="inductor")
        elif kernels.compiled:
            low, high = kernels._replace(compiled="least"), kernels._replace(compiled="")
        elif kernels.fp32_norm:
            low = kernels._replace(fp32_norm=False)
        wide = stack_of(setup).states_in_fp32 and setup.optimizer.endswith("8bit")
        if low == high and not wide and not setup.fp8_kept:
            return 0, peak.more
        sides = [self.peak(setup, stage, states, side, wide and side == high) for side in (low, high)]
        if setup.fp8_kept:
            sides.append(self.peak(replace(setup, precision="bf16-mixed"), stage, states))
        totals = [found.total + found.gradients for found in sides if found is not None]
        here = peak.total + peak.gradients
        return max(0, here - min(totals)), max(peak.more, max(totals) - here)

    def _fp8_modules(self, setup: TrainingSetup) -> int:
        """Linear modules of a rank that multiply in fp8."""
        if not setup.fp8_kept:
            return 0
        found = {t.module for t in self.model.architecture.tensors if t.module_class in LINEARS}
        return ceil_div(len(found), setup.pipeline_parallel)

    def plan(self, setup: TrainingSetup, *, brief: bool = False) -> TrainingPlan:
        """The whole answer for one setup; ``brief`` leaves communication and notes out, for sweeps. Raises
        DeploymentError or UnsupportedArchitecture."""
        check_setup(setup)
        check_device(setup)
        check_stack(setup, self.model.architecture.model_type)
        check_segments(self.model.architecture, setup)
        stages = {0, setup.pipeline_parallel - 1}
        plans = [self._stage(setup, stage, brief) for stage in sorted(stages)]
        return max(plans, key=TrainingPlan.total)

    def _stage(self, setup: TrainingSetup, stage: int, brief: bool) -> TrainingPlan:
        model, trained = self.model, self.trained(setup)
        states = self.states(setup, stage)
        convention = convention_of(setup)
        peak = self.peak(setup, stage, states)
        length = self.length(setup)
        placed = place(setup, states, convention, trained)
        there = states.gradients if peak is None else peak.gradients
        lines = _state_lines(setup, states, convention, placed, trained, there)
        bounds = self.peak_bounds(setup, stage, states, peak) if peak else (0, 0)
        lines += _peak_lines(setup, peak, length, bool(model.estimated), bounds)
        lines += [
            Line(o.name, "gpu", o.bytes, o.low, o.high, o.formula, o.source)
            for o in overheads_of(setup, states, self._fp8_modules(setup))
        ]
        lines += _host_lines(setup, placed, peak, states)
        lines = [line for line in lines if line.bytes or line.high]
        stream = setup.micro_batch * ceil_div(length, setup.context_parallel)
        stream *= model.architecture.hidden_size * 2 * len(stage_of(model.architecture, setup, stage))
        traffic = NO_COMMUNICATION if brief else communication_of(setup, states, stream)
        notes = () if brief else _notes(self, setup, trained, peak)
        fits, reasons = judge(setup, lines, placed.init)
        return TrainingPlan(
            model.id, model.architecture.class_name, setup, length, convention, trained.parameters,
            trained.trainable, trained.adapters, tuple(lines), peak.moment if peak else "not planned", stage,
            traffic, fits, reasons, notes, placed.init,
        )  # fmt: skip


def _exact(name: str, size: int, formula: str, source: str, place: Place = "gpu") -> Line:
    return Line(name, place, size, size, size, formula, source)


def _state_lines(
    setup: TrainingSetup, states: States, c: Convention, placed: HostBytes, trained: Trained, there: int
) -> list[Line]:
    """``there``: bytes of the gradients at the peak."""
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
            formula = f"of {gib(states.gradients)} what is there at the peak: {formula}"
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
    if setup.method == "qlora":
        return f"linear weights in {setup.base_quantization}, the rest {frozen_bytes(setup)} bytes"
    return f"{frozen_bytes(setup)} bytes each"


def _peak_lines(
    setup: TrainingSetup, peak: Peak | None, length: int, estimated: bool, bounds: tuple[int, int]
) -> list[Line]:
    if peak is None:
        return []
    at = f"b = {setup.micro_batch}, s = {length:,}, {attention_of(setup)}, checkpointing {setup.checkpointing}"
    source = "saved tensors of the forward pass (planner/training/activations.py)"
    kept = peak.activations
    low, high = kept - bounds[0], kept + bounds[1]
    if estimated:
        low, high = min(low, int(kept * ESTIMATE_LOW)), max(high, int(kept * ESTIMATE_HIGH))
    if estimated:
        source = "estimated: inputs and outputs of every linear layer, norms in fp32"
    out = [Line("activations", "gpu", kept, low, high, at, source)]
    if peak.logits:
        low = peak.logits  # 12 of the 14 bytes where the caller does not keep the logits
        formula = "logits, log_softmax and their gradients: 14 bytes each (16 in fp32)"
        if setup.loss == "fused":
            formula = "logits of one chunk of rows"
        out.append(
            Line(
                "logits and loss",
                "gpu",
                peak.logits,
                low * 12 // 14,
                low,
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


def _host_lines(setup: TrainingSetup, placed: HostBytes, peak: Peak | None, states: States) -> list[Line]:
    node = setup.gpus
    out = list(placed.lines)
    if peak is not None and peak.cpu:
        out.append(
            _exact("offloaded activations", peak.cpu * node, f"{node} ranks", "--offload-activations", "cpu")
        )
    if states.counters:
        out.append(_exact("step counters", states.counters * node, "4 bytes per tensor", "torch.optim", "cpu"))
    return out


def judge(setup: TrainingSetup, lines: list[Line], init: int) -> tuple[bool | None, tuple[str, ...]]:
    """Fits into what was given? None when nothing was given to fit into. ``init``: CPU bytes of a node while
    its ranks build the model."""
    reasons = []
    limits = (
        ("gpu", setup.device_memory, "--device-memory"),
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


def _notes(planner: Planner, setup: TrainingSetup, trained: Trained, peak: Peak | None) -> tuple[str, ...]:
    out = []
    if peak is None:
        out.append(
            f"activations of {planner.model.architecture.model_type} are not planned: the figures are model "
            "states and overheads only"
        )
    elif planner.model.estimated:
        name = planner.model.architecture.model_type
        out.append(
            f"activations of {name} are estimated from its shapes, {ESTIMATE_LOW} to {ESTIMATE_HIGH} times the "
            "figure"
        )
    asked = attention_of(setup)
    attention = planner.model.attention(asked)
    if attention != asked:
        out.append(
            f"{planner.model.architecture.class_name} has no {asked} attention in transformers: "
            f"planned with {attention}"
        )
    if planner.model.architecture.experts and "all-linear" in (setup.target_modules or ()):
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
