"""Bytes of logits and loss on one rank, by the kind of loss and by the tensors that the training loop keeps.

Per logit, the head's output takes `width` bytes, its fp32 copy 4 bytes, and the result of log_softmax 4 bytes.
The backward pass reads that result, and adds 4 + 4 bytes for two fp32 gradients.
"""

from __future__ import annotations

from typing import NamedTuple

from tonnage.planner.training.activations import Activations
from tonnage.planner.training.setup import TrainingSetup
from tonnage.planner.training.stacks import stack_of
from tonnage.planner.units import GiB, ceil_div

# Upper bounds of the bytes of unsloth's loss: per logit, and in total (_CE_BYTES_PER_LOGIT and
# _CE_TARGET_GB_CAP in unsloth_zoo 2026.10.9, fused_losses/cross_entropy_loss.py). unsloth computes the loss in
# chunks that fit into half of the free memory, so the loss never decides whether a step fits.
UNSLOTH_LOGIT, UNSLOTH_MOST = 16, 4 * GiB


class LossMemory(NamedTuple):
    """Bytes of the logits and the loss at each moment of a training step.

    Attributes:
        forward: bytes at the end of the loss's forward pass.
        backward: bytes in the loss's backward pass.
        head: bytes while the gradient of the head's weight is computed.
        alive: bytes that remain after the head's backward pass.
        matrices: number of gradients of the head's weight that are alive at once.
        most: upper bound of the larger of `forward` and `backward`.
        pieces: bytes of single tensors, from which the CUDA allocator's rounding is computed.
    """

    forward: int
    backward: int
    head: int
    alive: int
    matrices: int
    most: int
    pieces: tuple[int, ...] = ()


def loss_of(setup: TrainingSetup, acts: Activations, tokens: int, tp: int, head_trained: bool) -> LossMemory:
    """Return the bytes of logits and loss during a training step, for `tokens` tokens on one rank.

    Args:
        setup: the training flags.
        acts: the model's activations, with vocabulary size and bytes of one logit.
        tokens: tokens of the micro-batch on this rank.
        tp: tensor-parallel ranks, among which the vocabulary is divided.
        head_trained: whether the head's weight is trained.
    """
    stack = stack_of(setup)
    elements = tokens * ceil_div(acts.vocab, tp)
    width, labels = acts.logit_width, 8 * tokens
    whole = elements * width
    if setup.loss == "fused":
        size = _liger(acts, tokens, head_trained) // tp
        most = max(size, min(UNSLOTH_LOGIT * elements, UNSLOTH_MOST)) if setup.stack == "unsloth" else size
        return LossMemory(size, size, 0, 0, 1, most)
    if setup.loss == "chunked":
        return _chunked(setup, elements, width, labels)
    pieces = (whole, *(4 * elements,) * 3)
    if stack.head_in_fp32:  # The fp32 copy of the logits is dropped before the head's backward pass.
        wide = 4 * elements
        return LossMemory(2 * wide + labels, 3 * wide + labels, wide + whole, 0, 1, 3 * wide + labels, pieces)
    forward = whole + elements * (4 if width == 4 else 8) + labels
    alive = whole if stack.keeps_logits else 0
    backward = alive + 12 * elements + labels
    # The upper bound of the loss's memory also covers a training loop that keeps an fp32 copy of the logits
    # (accelerate's convert_outputs_to_fp32).
    most = backward if stack.keeps_logits else 16 * elements + labels
    return LossMemory(forward, backward, alive + whole, alive, 1, most, pieces)


def _chunked(setup: TrainingSetup, elements: int, width: int, labels: int) -> LossMemory:
    """Return the bytes of logits and loss for torchtune's CEWithChunkedOutputLoss.

    The head computes the logits in chunks, and the logits of all chunks are kept. The cast to fp32 and the
    cross-entropy run chunk by chunk. The backward pass first runs through the losses of all chunks, then
    through the head. Each chunk gives a gradient of the head's weight, and autograd's InputBuffer adds them one
    by one, so two are alive at once. Under torch.compile, a chunk keeps 16-bit logits and no fp32 tensor.
    """
    whole, chunk = elements * width, ceil_div(elements, setup.loss_chunks)
    if setup.compile:
        backward = whole + chunk * width + labels
        return LossMemory(whole + labels, backward, whole, 0, 2, backward)
    forward = whole + 4 * elements + 4 * chunk + labels
    return LossMemory(forward, 4 * elements + 8 * chunk + labels, whole, 0, 2, forward)


def _liger(acts: Activations, tokens: int, head_trained: bool) -> int:
    """Return the bytes of logits and loss for Liger's fused linear cross-entropy.

    The kernel holds the logits of one chunk of tokens (in 16 bits and fp32), and the gradients of the hidden
    states and of the head's weight. A chunk has tokens / ceil(vocabulary / hidden size) tokens, rounded up to a
    power of two. Source: liger_kernel/ops/fused_linear_cross_entropy.py.
    """
    rows = ceil_div(tokens, ceil_div(acts.vocab, acts.hidden))
    rows = 1 << max(0, rows - 1).bit_length()
    head = acts.vocab * acts.hidden * acts.logit_width if head_trained else 0
    return (
        min(rows, tokens) * acts.vocab * (acts.logit_width + 4) + tokens * acts.hidden * acts.logit_width + head
    )
