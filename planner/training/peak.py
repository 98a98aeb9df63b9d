"""What one micro-batch adds to the model states at the worst moment of a step.

The moments, each with what is alive then (derived from PyTorch's autograd, checkpoint and cross-entropy
code; benchmarks/training_accuracy.py holds the sums against published A6000 runs without any fitted term):

- ``loss forward``: everything kept by the layers, all weight casts of the autocast region, 16-bit logits,
  their fp32 copy and log_softmax's result
- ``loss backward``: the same kept tensors, the casts the graph still reads, 16-bit logits, log_softmax's
  result and two fp32 gradients of it (14 bytes a logit, 16 in fp32)
- ``layer backward``: kept tensors, logits, one layer's (or segment's) recomputed tensors and gradients
- ``head gradient``: kept tensors, logits and their gradient, the head's weight gradient before it is added
- ``embedding gradient``: the tied embedding's two gradients before they are summed
- ``optimizer step``: copies of the gradients and the temporaries of the multi-tensor kernels (step.py), no
  activations
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from tonnage.planner.training.activations import Activations, Kept
from tonnage.planner.training.setup import TrainingSetup
from tonnage.planner.training.step import Step
from tonnage.planner.units import MiB, ceil_div

MOMENTS = (
    "loss forward", "loss backward", "layer backward", "head gradient", "embedding gradient", "optimizer step",
)  # fmt: skip

# c10/cuda/CUDACachingAllocator.cpp (2.13): requests from 10 MiB on get segments rounded to 2 MiB, and a
# remainder of up to 1 MiB is not split off.
_LARGE, _ROUND, _UNSPLIT = 10 * MiB, 2 * MiB, 1 * MiB


class Peak(NamedTuple):
    """Bytes beside the model states at the worst moment, by kind; ``cpu``: activations kept on the host."""

    moment: str
    activations: int
    logits: int
    casts: int
    temporary: int
    rounding: int
    cpu: int
    copies: str = ""  # what an optimizer step copies of the gradients, in words

    @property
    def total(self) -> int:
        return self.activations + self.logits + self.casts + self.temporary + self.rounding


class StageShape(NamedTuple):
    """One pipeline stage: its share of the layers, its end pieces, micro-batches kept at once."""

    layers: int
    of_layers: int
    embedding: bool
    head: bool
    in_flight: int


def _rounded(piece: int) -> int:
    """Bytes the allocator adds to one tensor."""
    if piece < _LARGE:
        return 0
    rest = -piece % _ROUND
    return rest if rest <= _UNSPLIT else 0


class _Cut(NamedTuple):
    """Micro-batch as one rank sees it."""

    batch: int
    length: int
    tp: int
    sequence_parallel: bool

    def kept(self, kept: Kept) -> int:
        whole, split = kept.total.at(self.batch, self.length), kept.split.at(self.batch, self.length)
        if self.sequence_parallel:
            return ceil_div(whole, self.tp)
        return whole - split + ceil_div(split, self.tp)


def _chunked_loss(setup: TrainingSetup, acts: Activations, tokens: int, head_trained: bool) -> int:
    """Liger's fused linear cross-entropy: logits of one chunk of rows (16-bit and fp32), the gradient of the
    hidden states, and of the head (liger_kernel/ops/fused_linear_cross_entropy.py: rows per chunk =
    next power of two of tokens / ceil(vocabulary / hidden))."""
    rows = ceil_div(tokens, ceil_div(acts.vocab, acts.hidden))
    rows = 1 << max(0, rows - 1).bit_length()
    head = acts.vocab * acts.hidden * acts.logit_width if head_trained else 0
    return (
        min(rows, tokens) * acts.vocab * (acts.logit_width + 4) + tokens * acts.hidden * acts.logit_width + head
    )


@lru_cache(maxsize=65536)
def _layer_sums(acts: Activations, cut: _Cut, stage: StageShape) -> tuple[int, int, int, int, int, int]:
    """(all layers' bytes, the largest layer's, scores, casts of trained, casts of frozen weights, rounding)
    of the stage."""
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
    return total, largest, scores, casts, frozen, rounding


def peak_of(
    setup: TrainingSetup, acts: Activations, stage: StageShape, length: int, inner: int, step: Step,
    head_trained: bool, tied: bool,
) -> Peak:  # fmt: skip
    """The worst moment of one micro-batch of ``setup.micro_batch`` x ``length`` tokens on one rank."""
    local = ceil_div(length, setup.context_parallel)
    tp = setup.tensor_parallel
    cut = _Cut(setup.micro_batch, local, tp, setup.sequence_parallel)
    tokens = setup.micro_batch * local
    kept, largest, scores, casts, frozen, rounding = _layer_sums(acts, cut, stage)
    layers, flight = stage.layers, stage.in_flight
    ends = acts.shared.at(setup.micro_batch, local)
    if stage.embedding:
        ends += flight * cut.kept(acts.embedding) + acts.embedding.casts + acts.embedding.frozen_casts
    stream = tokens * acts.stream
    cpu = recompute = live_casts = 0
    one_cast = (casts + frozen) // max(1, layers)
    if setup.checkpointing == "full":
        segments = min(layers, setup.checkpoint_segments or layers)
        per_segment = ceil_div(layers, segments)
        recompute = per_segment * (largest + one_cast)
        saved = segments * stream
        if setup.sequence_parallel or setup.partition_activations:
            saved = ceil_div(saved, tp)
        saved, rounding, live_casts = flight * saved, per_segment * rounding // max(1, layers), 0
        if setup.offload_activations:
            resident = min(saved, 2 * stream)
            cpu, saved = saved - resident, resident
    else:
        saved = flight * (kept - (scores if setup.checkpointing == "selective" else 0))
        if setup.checkpointing == "selective" and scores:
            recompute = ceil_div(scores, layers)
        live_casts = casts + frozen
        if setup.offload_activations:
            resident = min(saved, 2 * largest)
            cpu, saved, rounding = saved - resident, resident, 0
    base = saved + ends
    head_cast = head_kept = forward = backward = alive = 0
    head_gradient = embedding_gradient = matrix = 0
    if stage.head:
        elements = tokens * ceil_div(acts.vocab, tp)
        width = acts.logit_width
        head_kept = cut.kept(acts.head)
        head_cast = (acts.head.casts + acts.head.frozen_casts) // tp
        labels = 8 * tokens
        if setup.loss == "fused":
            forward = backward = _chunked_loss(setup, acts, tokens, head_trained) // tp
        else:
            alive = elements * width
            forward = alive + elements * (4 if width == 4 else 8) + labels
            backward = alive + 12 * elements + labels
            rounding += _rounded(alive) + 3 * _rounded(4 * elements)
        matrix = ceil_div(acts.vocab, tp) * acts.hidden * width
        head_gradient = base + head_kept + live_casts + head_cast + 2 * alive + (matrix if head_trained else 0)
        if tied and head_trained and stage.embedding:
            embedding_gradient = alive + 2 * matrix
    in_layer = 3 * tokens * ceil_div(inner, tp) * acts.logit_width + 2 * stream
    moments = (
        base + head_kept + casts + (0 if setup.checkpointing == "full" else frozen) + head_cast + forward,
        base + head_kept + live_casts + head_cast + backward,
        base + live_casts + recompute + in_layer + alive,
        head_gradient,
        embedding_gradient,
        step.bytes,
    )
    worst = max(range(len(moments)), key=moments.__getitem__)
    parts = (
        (base + head_kept, forward, casts + (0 if setup.checkpointing == "full" else frozen) + head_cast, 0),
        (base + head_kept, backward, live_casts + head_cast, 0),
        (base, alive, live_casts, recompute + in_layer),
        (base + head_kept, 2 * alive, live_casts + head_cast, matrix if head_trained else 0),
        (0, alive, 0, moments[4] - alive),
        (0, 0, 0, step.bytes),
    )[worst]  # fmt: skip
    if worst >= 4:
        rounding = 0
    return Peak(MOMENTS[worst], *parts, rounding, cpu, step.copies if worst == 5 else "")
