"""Planner of training memory, which turns a model and a `TrainingSetup` into a `TrainingPlan`."""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter

from tonnage.planner.training.activations import Activations, ActivationSetup, activations_of
from tonnage.planner.training.communication import NO_COMMUNICATION, communication_of
from tonnage.planner.training.device import attention_of, check_device
from tonnage.planner.training.lines import host_lines, paged, peak_lines, state_lines
from tonnage.planner.training.methods import LINEARS, Trained, train_under
from tonnage.planner.training.model import TrainingModel
from tonnage.planner.training.overheads import overheads_of
from tonnage.planner.training.peak import Gradients, Peak, StageShape, peak_of
from tonnage.planner.training.placement import place
from tonnage.planner.training.plans import TrainingPlan
from tonnage.planner.training.precision import convention_of, frozen_bytes
from tonnage.planner.training.setup import TrainingSetup, check_setup
from tonnage.planner.training.sharding import check_parallel, check_segments, stage_of
from tonnage.planner.training.stacks import check_stack, gradients_held, kernels_of, stack_of
from tonnage.planner.training.states import States, states_on_rank
from tonnage.planner.training.step import step_of
from tonnage.planner.training.values import Kernels
from tonnage.planner.training.verdict import judge, notes_of
from tonnage.planner.units import ceil_div

# Tokens per sequence without --sequence-length, unless the model's maximum is shorter
DEFAULT_LENGTH = 2048


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


# Number of fp32 copies of the largest tensor in an optimizer step.
#
# torchao's 8-bit AdamW computes with parameter, gradient and both states in fp32 (optim/adam.py
# single_param_adam), always compiled. The compiler fuses away the gradient's copy, so three fp32 copies remain.
# The lower bound is 0 copies (bitsandbytes), the upper bound 4 (nothing fused).
_FP32_COPIES = 3


def _copies_operands(setup: TrainingSetup) -> bool:
    """Return whether the setup's optimizer step makes fp32 copies of a whole tensor.

    torchao's 8-bit AdamW, which torchtune uses, makes such copies.
    """
    return stack_of(setup).states_in_fp32 and setup.optimizer == "adamw-8bit"


class Planner:
    """A planner of many training setups of one model, which caches results that several setups share."""

    def __init__(self, model: TrainingModel) -> None:
        self.model = model
        self._trained: dict[object, Trained] = {}
        self._states: dict[object, States] = {}
        self._activations: dict[object, Activations] = {}

    def trained(self, setup: TrainingSetup) -> Trained:
        """Return the model's tensors under the setup's training method, each marked as trained or frozen."""
        key = _METHOD(setup)
        if key not in self._trained:
            self._trained[key] = train_under(self.model.architecture, setup)
        return self._trained[key]

    def states(self, setup: TrainingSetup, stage: int) -> States:
        """Return the model states of one rank of the pipeline stage with index `stage`, in bytes."""
        key = (_METHOD(setup), _STATES(setup), stage)
        found = self._states.get(key)
        if found is None:
            check_parallel(self.model.architecture, setup)
            found = states_on_rank(self.trained(setup), self.model.architecture, setup, stage)
            self._states[key] = found
        return found

    def length(self, setup: TrainingSetup) -> int:
        """Return the tokens per sequence: --sequence-length, else 2,048, or the model's maximum if shorter."""
        return setup.sequence_length or min(DEFAULT_LENGTH, self.model.architecture.max_model_len)

    def activations(self, setup: TrainingSetup, kernels: Kernels | None = None) -> Activations | None:
        """Return the activations that the layers keep for the backward pass.

        Returns None if the planner does not support the model's activations. `kernels` replaces the fused
        modules that the setup's training library would use.
        """
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
        attention = attention_of(setup)
        kept = ActivationSetup(
            self.model.attention(attention), setup.method, setup.rank, self.trained(setup).targets,
            setup.trainable_layers, setup.fp8_kept, convention_of(setup),
            4 if kernels.quantized else frozen_bytes(setup),
            explicit_mask=setup.materialized_mask
            or (setup.packing and attention == "sdpa" and kernels.tables != "taken"),
            single=single, kernels=kernels,
        )  # fmt: skip
        found = activations_of(recipe, self.model.masked(self.length(setup)), kept, self.model.estimated)
        self._activations[known] = found
        return found

    def peak(
        self, setup: TrainingSetup, stage: int, states: States, kernels: Kernels | None = None,
        copies: int | None = None,
    ) -> Peak | None:  # fmt: skip
        """Return the memory peak of a training step on one pipeline stage, besides the model states.

        Returns None if the planner does not support the model's activations. `kernels` replaces the fused
        modules that the setup's training library would use. `copies` is the number of fp32 copies that an 8-bit
        optimizer makes of the largest tensor. By default it is 3 for torchao's 8-bit AdamW, and 0 otherwise.
        """
        acts = self.activations(setup, kernels)
        if acts is None:
            return None
        stages = setup.pipeline_parallel
        architecture = self.model.architecture
        # Under the 1F1B pipeline schedule, a stage keeps the activations of one micro-batch for itself and one
        # for each later stage.
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
        if _copies_operands(setup):
            copies = _FP32_COPIES if copies is None else copies
            step = step._replace(bytes=step.bytes + 4 * copies * states.largest)
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
        """Return the bytes by which a training step's memory peak may be (lower, higher) than planned.

        The bounds are the lowest and the highest peak of these variants of the setup, where they apply:

        - torch.compile keeps the fewest or the most tensors for the backward pass.
        - torchtune's RMSNorm is a single fused operation, not a composition of operations in fp32.
        - An 8-bit optimizer makes no fp32 copies, or 4.
        - A setup with fp8 runs in bf16 instead.
        - A setup with tensor parallelism uses sequence parallelism too, which also divides the residual
          stream.
        """
        kernels = kernels_of(setup)
        low = high = kernels
        if kernels.compiled == "least":
            # The plan already assumes that torch.compile keeps as few tensors as possible. The upper bound
            # assumes that torch.compile keeps the tensors that its default partitioner selects.
            high = kernels._replace(compiled="inductor")
        elif kernels.compiled:
            low, high = kernels._replace(compiled="least"), kernels._replace(compiled="")
        elif kernels.fp32_norm:
            low = kernels._replace(fp32_norm=False)
        wide = _copies_operands(setup)
        others = []
        if setup.fp8_kept:
            others.append(replace(setup, precision="bf16-mixed"))
        if setup.tensor_parallel > 1 and not setup.sequence_parallel:
            others.append(replace(setup, sequence_parallel=True))
        if low == high and not wide and not others:
            return 0, peak.more
        sides = [self.peak(setup, stage, states, low, 0), self.peak(setup, stage, states, high, 4)]
        sides += [self.peak(other, stage, states) for other in others]
        totals = [found.total + found.gradients for found in sides if found is not None]
        here = peak.total + peak.gradients
        return max(0, here - min(totals)), max(peak.more, max(totals) - here)

    def _fp8_modules(self, setup: TrainingSetup) -> int:
        """Return the number of linear modules on a rank that multiply in fp8."""
        if not setup.fp8_kept:
            return 0
        found = {t.module for t in self.model.architecture.tensors if t.module_class in LINEARS}
        return ceil_div(len(found), setup.pipeline_parallel)

    def plan(self, setup: TrainingSetup, *, brief: bool = False) -> TrainingPlan:
        """Return the memory plan of a training setup; with `brief`, without communication and notes.

        Raises:
            DeploymentError: for a setup that contradicts itself, the model or the device.
            UnsupportedArchitecture: for a model that cannot be trained with the setup's method.
        """
        check_setup(setup)
        check_device(setup)
        check_stack(setup, self.model.architecture.model_type)
        check_segments(self.model.architecture, setup)
        stages = {0, setup.pipeline_parallel - 1}
        plans = [self._stage(setup, stage, brief) for stage in sorted(stages)]
        return max(plans, key=TrainingPlan.total)

    def _stage(self, setup: TrainingSetup, stage: int, brief: bool) -> TrainingPlan:
        """Return the training plan for one rank of the pipeline stage with index `stage` (from 0)."""
        model, trained = self.model, self.trained(setup)
        states = self.states(setup, stage)
        convention = convention_of(setup)
        peak = self.peak(setup, stage, states)
        length = self.length(setup)
        placed = place(setup, states, convention, trained)
        there = states.gradients if peak is None else peak.gradients
        lines = state_lines(setup, states, convention, placed, trained, there)
        bounds = self.peak_bounds(setup, stage, states, peak) if peak else (0, 0)
        lines += peak_lines(setup, peak, length, bool(model.estimated), bounds)
        in_layer = setup.stack is None or peak is None or peak.moment.endswith("layer backward")
        lines += overheads_of(setup, states, self._fp8_modules(setup), in_layer)
        lines += host_lines(setup, placed, peak, states)
        lines = paged(setup, [line for line in lines if line.bytes or line.high])
        stream = setup.micro_batch * ceil_div(length, setup.context_parallel)
        stream *= model.architecture.hidden_size * 2 * len(stage_of(model.architecture, setup, stage))
        traffic = NO_COMMUNICATION if brief else communication_of(setup, states, stream)
        notes = () if brief else notes_of(model, setup, trained, peak)
        fits, reasons = judge(setup, lines, placed.init)
        return TrainingPlan(
            model.id, model.architecture.class_name, setup, length, convention, trained.parameters,
            trained.trainable, trained.adapters, tuple(lines), peak.moment if peak else "not planned", stage,
            traffic, fits, reasons, notes, placed.init,
        )  # fmt: skip
