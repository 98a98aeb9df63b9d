"""The memory peak of a training step: the bytes that one micro-batch adds to the model states.

The peak is the largest of the moments below. Their live tensors are derived from PyTorch's autograd, checkpoint
and cross-entropy code. No figure is fitted to measurements. A benchmark compares the peaks with published runs
on an A6000 (benchmarks/training_accuracy.py).

- `loss forward`: all tensors kept by the layers, all weight casts of the autocast region, 16-bit logits, their
  fp32 copy and log_softmax's result.
- `loss backward`: tensors kept by the layers, weight casts that the graph still reads, 16-bit logits,
  log_softmax's result and its two fp32 gradients (14 bytes per logit, 16 in fp32).
- `layer backward`: kept tensors, logits, one layer's (or segment's) recomputed tensors and gradients.
- `head gradient`: kept tensors, logits and their gradient, and the gradient of the head's weight before it is
  added.
- `embedding gradient`: the two gradients of a tied embedding before they are summed.
- `optimizer step`: copies of the gradients and the temporaries of the multi-tensor kernels (step.py), no
  activations.
- `first layer backward`: one layer's tensors and all gradients, for training loops that free the gradients
  after each step.

Some training loops free the model's output early or set gradients to None, which lowers the peak (stacks.py).
loss.py lists the tensors of the loss.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from tonnage.planner.training.activations import Activations, Kept
from tonnage.planner.training.loss import LossMemory, loss_of
from tonnage.planner.training.setup import TrainingSetup
from tonnage.planner.training.stacks import stack_of
from tonnage.planner.training.step import StepMemory
from tonnage.planner.units import MiB, ceil_div

MOMENTS = (
    "loss forward", "loss backward", "layer backward", "head gradient", "embedding gradient", "optimizer step",
    "first layer backward",
)  # fmt: skip

# c10/cuda/CUDACachingAllocator.cpp (2.13): requests of at least 10 MiB get segments rounded up to 2 MiB, and a
# remainder of up to 1 MiB is not split off.
_LARGE, _ROUND, _UNSPLIT = 10 * MiB, 2 * MiB, 1 * MiB


class Peak(NamedTuple):
    """The GPU memory besides the model states at the peak of a training step, by kind.

    Attributes:
        moment: the moment of the peak, one of MOMENTS.
        activations: bytes of kept activations on the GPU.
        logits: bytes of logits and loss.
        casts: bytes of 16-bit copies of weights.
        temporary: bytes of tensors that live within one operation, layer or optimizer step.
        rounding: bytes that the CUDA allocator adds by rounding.
        cpu: bytes of activations kept on the host.
        gradients: the part of the model's gradients that exists at the peak, in bytes.
        more: bytes by which the real peak may be higher than planned.
        rough: the part of `temporary` that is an estimate, in bytes.
        copies: description of the gradient copies of an optimizer step.
    """

    moment: str
    activations: int
    logits: int
    casts: int
    temporary: int
    rounding: int
    cpu: int
    gradients: int
    more: int
    rough: int
    copies: str = ""

    @property
    def total(self) -> int:
        """Return the sum of the bytes on the GPU at the peak of a training step, without the model states."""
        return self.activations + self.logits + self.casts + self.temporary + self.rounding


class StageShape(NamedTuple):
    """A pipeline stage: its layers, whether it has the embedding or the head, and its micro-batches.

    Attributes:
        layers: number of layers of the stage.
        of_layers: number of layers of the whole model.
        embedding: whether the stage has the embedding.
        head: whether the stage has the head.
        in_flight: number of micro-batches whose activations the stage keeps at once.
    """

    layers: int
    of_layers: int
    embedding: bool
    head: bool
    in_flight: int


def _rounded(piece: int) -> int:
    """Return the bytes that PyTorch's CUDA allocator adds to a tensor of `piece` bytes by rounding."""
    if piece < _LARGE:
        return 0
    rest = -piece % _ROUND
    return rest if rest <= _UNSPLIT else 0


class Gradients(NamedTuple):
    """The gradients of one rank, in bytes, and how long they live.

    Attributes:
        full: bytes of all gradients.
        head: bytes of the gradient of the head, or of the tied embedding.
        embedding: bytes of the gradient of an untied embedding, 0 for a tied one.
        held: whether gradients persist from one step to the next.
        dropped: whether each gradient is freed as soon as the optimizer has used it.
    """

    full: int
    head: int
    embedding: int
    held: bool
    dropped: bool


class _Cut(NamedTuple):
    """The part of a micro-batch that one rank computes.

    Attributes:
        batch: sequences of the micro-batch.
        length: tokens per sequence on this rank, after context parallelism.
        tp: number of tensor-parallel ranks.
        sequence_parallel: whether the residual stream is divided among these ranks.
    """

    batch: int
    length: int
    tp: int
    sequence_parallel: bool

    def kept(self, kept: Kept) -> int:
        """Return the bytes on one rank of the tensors in `kept`, after tensor and sequence parallelism."""
        whole, split = kept.total.at(self.batch, self.length), kept.split.at(self.batch, self.length)
        if self.sequence_parallel:
            return ceil_div(whole, self.tp)
        return whole - split + ceil_div(split, self.tp)


class _LayerSums(NamedTuple):
    """Sums over the layers of a pipeline stage on one rank, in bytes.

    Attributes:
        kept: tensors that all layers keep for the backward pass.
        largest: tensors that the largest layer keeps.
        scores: attention scores.
        casts: 16-bit copies of trained weights.
        frozen: 16-bit copies of frozen weights.
        rounding: bytes that the CUDA allocator adds by rounding.
    """

    kept: int
    largest: int
    scores: int
    casts: int
    frozen: int
    rounding: int


@lru_cache(maxsize=65536)
def _layer_sums(acts: Activations, cut: _Cut, stage: StageShape) -> _LayerSums:
    """Return the bytes that a pipeline stage's layers keep for the backward pass on one rank, summed."""
    total = scores = casts = frozen = largest = rounding = 0
    for _, count, kept in acts.layers:
        here = ceil_div(count * stage.layers, stage.of_layers)
        each = cut.kept(kept)
        total += here * each
        largest = max(largest, each)
        scores += here * ceil_div(kept.scores.at(cut.batch, cut.length), cut.tp)
        casts += here * kept.casts // cut.tp
        frozen += here * kept.frozen_casts // cut.tp
        rounding += here * sum(_rounded(piece.at(cut.batch, cut.length)) for piece in kept.pieces)
    return _LayerSums(total, largest, scores, casts, frozen, rounding)


class _Waiting(NamedTuple):
    """Bytes that the layers of a pipeline stage keep until the backward pass.

    Attributes:
        saved: activations on the GPU.
        cpu: activations on the host.
        recompute: activations that checkpointing recomputes at once, in one segment.
        forward_casts: 16-bit copies of weights at the end of the forward pass.
        casts: 16-bit copies of weights that remain during the backward pass.
        rounding: bytes that the CUDA allocator adds by rounding.
        first: activations that are left when the backward pass reaches the stage's first layer.
    """

    saved: int
    cpu: int
    recompute: int
    forward_casts: int
    casts: int
    rounding: int
    first: int


def _waiting(setup: TrainingSetup, acts: Activations, cut: _Cut, stage: StageShape) -> _Waiting:
    """Return the bytes that a pipeline stage's layers keep until their backward pass, by kind.

    Activation checkpointing and activation offload are taken into account.
    """
    kept, largest, scores, casts, frozen, rounding = _layer_sums(acts, cut, stage)
    if setup.checkpointing == "full":
        stream = cut.batch * cut.length * acts.stream
        segments = min(stage.layers, setup.checkpoint_segments or stage.layers)
        per_segment = ceil_div(stage.layers, segments)
        saved = segments * stream
        if setup.sequence_parallel or setup.partition_activations:
            saved = ceil_div(saved, cut.tp)
        saved *= stage.in_flight
        there = min(saved, 2 * stream) if setup.offload_activations else saved
        again = per_segment * (largest + (casts + frozen) // max(1, stage.layers))
        rounding = per_segment * rounding // max(1, stage.layers)
        return _Waiting(there, saved - there, again, casts, 0, rounding, stream)
    selective = setup.checkpointing == "selective"
    saved = stage.in_flight * (kept - (scores if selective else 0))
    again = ceil_div(scores, stage.layers) if selective and scores else 0
    if not setup.offload_activations:
        return _Waiting(saved, 0, again, casts + frozen, casts + frozen, rounding, largest)
    there = min(saved, 2 * largest)
    return _Waiting(there, saved - there, again, casts + frozen, casts + frozen, 0, largest)


class _Moment(NamedTuple):
    """GPU bytes by kind of tensor at one moment of a training step; `name` is one of MOMENTS."""

    name: str
    activations: int
    logits: int
    casts: int
    temporary: int
    gradients: int

    @property
    def bytes(self) -> int:
        """Return the total GPU bytes (all fields but `name`) at this moment of a training step."""
        return sum(self[1:])


def peak_of(
    setup: TrainingSetup, acts: Activations, stage: StageShape, length: int, inner: int, step: StepMemory,
    head_trained: bool, tied: bool, gradients: Gradients, packed: int = 0,
) -> Peak:  # fmt: skip
    """Return the memory peak of a training step on one rank, besides the model states.

    Args:
        setup: the flags of the training.
        acts: the model's activations, as functions of batch and length.
        stage: shape of the pipeline stage.
        length: sequence length in tokens.
        inner: width of the MLP's intermediate layer, in elements.
        step: temporary bytes of the optimizer step.
        head_trained: whether the head is trained.
        tied: whether head and embedding are one tensor.
        gradients: bytes of the rank's gradients, and how long they live.
        packed: elements of the largest quantized matrix, which is dequantized for each product.
    """
    stack = stack_of(setup)
    local = ceil_div(length, setup.context_parallel)
    tp = setup.tensor_parallel
    cut = _Cut(setup.micro_batch, local, tp, setup.sequence_parallel)
    tokens = setup.micro_batch * local
    saved, cpu, recompute, late_casts, live_casts, rounding, first = _waiting(setup, acts, cut, stage)
    ends = acts.shared.at(setup.micro_batch, local)
    if stage.embedding:
        ends += stage.in_flight * cut.kept(acts.embedding) + acts.embedding.casts + acts.embedding.frozen_casts
    offloads_ends = setup.offload_activations and stack.offloads_ends
    if offloads_ends:
        cpu, ends = cpu + ends, 0
    base = saved + ends
    matrix = ceil_div(acts.vocab, tp) * acts.hidden * acts.logit_width
    head_gradient = matrix if head_trained else 0
    tied_here = tied and head_trained and stage.embedding and stage.head
    persistent = gradients.full if gradients.held else 0
    # With tied weights, the gradient from the head stays allocated until the embedding's gradient is added.
    unsummed = head_gradient if tied_here and not gradients.held else 0
    in_layer = (
        3 * tokens * ceil_div(inner, tp) * acts.logit_width
        + 2 * tokens * acts.stream
        + packed * (2 if setup.compile else stack.dequantized)
    )
    ends_kept, late, live = base, late_casts, live_casts
    loss = LossMemory(0, 0, 0, 0, 1, 0)
    if stage.head:
        loss = loss_of(setup, acts, tokens, tp, head_trained)
        rounding += sum(_rounded(piece) for piece in loss.pieces)
        head_kept = cut.kept(acts.head)
        if offloads_ends:
            head_kept, cpu = head_gradient and tokens * acts.hidden * acts.logit_width, cpu + head_kept
        head_cast = (acts.head.casts + acts.head.frozen_casts) // tp
        ends_kept, late, live = base + head_kept, late_casts + head_cast, live_casts + head_cast
    work = recompute + in_layer + unsummed
    after_head = persistent if gradients.held or gradients.dropped or tied_here else gradients.head
    moments = [
        _Moment("loss forward", ends_kept, loss.forward, late, 0, persistent),
        _Moment("loss backward", ends_kept, loss.backward, live, 0, persistent),
        _Moment("layer backward", base, loss.alive, live_casts, work, after_head),
    ]
    if stage.head:
        gradient = loss.matrices * head_gradient
        moments.append(_Moment("head gradient", ends_kept, loss.head, live, gradient, persistent))
    if tied_here:
        last = 0 if gradients.dropped else gradients.full - (0 if gradients.held else gradients.head)
        moments.append(_Moment("embedding gradient", 0, loss.alive, 0, 2 * matrix, last))
    if gradients.dropped:
        work = step.bytes + max(gradients.head, gradients.embedding)
        moments.append(_Moment("optimizer step", 0, 0, 0, work, 0))
    else:
        moments.append(_Moment("optimizer step", 0, 0, 0, step.bytes, gradients.full))
        if not gradients.held:
            rest = gradients.full - (gradients.head if tied_here else gradients.embedding)
            casts = live_casts // max(1, stage.layers)
            moments.append(_Moment("first layer backward", first + ends, loss.alive, casts, work, rest))
    worst = max(moments, key=lambda moment: (moment.bytes, -MOMENTS.index(moment.name)))
    name = worst.name
    # The plan counts two gradients of the head's weight for the chunked loss. A third may be alive.
    more = head_gradient if setup.loss == "chunked" and name == "head gradient" else 0
    if name in ("loss forward", "loss backward") and stage.head:
        more = max(0, loss.most - max(loss.forward, loss.backward))
    return Peak(
        name, worst.activations, worst.logits, worst.casts, worst.temporary,
        rounding if name in MOMENTS[:4] else 0, cpu, worst.gradients, more,
        in_layer if name.endswith("layer backward") else worst.temporary,
        step.copies if name == "optimizer step" else "",
    )  # fmt: skip
