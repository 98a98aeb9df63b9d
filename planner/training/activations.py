"""Activations that a training step keeps for its backward pass, layer by layer.

Layers that a recipe describes (planner/model/recipe.py) run on a `Tape`, a symbolic forward pass. For a
decoder without a recipe, they are estimated from the shapes of its tensors.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from tonnage.planner.families.registry import family_of
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.recipe import (
    Attention,
    Embedding,
    Experts,
    Head,
    LatentAttention,
    Norm,
    Recipe,
    Table,
)  # fmt: skip
from tonnage.planner.training.layers import MASK, norm
from tonnage.planner.training.layers import layer as run_layer
from tonnage.planner.training.precision import Convention
from tonnage.planner.training.tape import ACTIVATIONS, Tape
from tonnage.planner.training.values import Extent, Kernels, Value


class LayerKind(NamedTuple):
    """The properties of a layer that decide which tensors autograd keeps for its backward pass.

    Two layers with the same modules and equal properties keep the same number of bytes.

    Attributes:
        masked: whether the layer receives an explicit attention mask.
        input_grad: whether the layer's input needs a gradient.
        trainable: whether the layer's own weights are trained.
    """

    masked: bool
    input_grad: bool
    trainable: bool


class Kept(NamedTuple):
    """Bytes that one layer, the embedding or the head keeps for the backward pass.

    Attributes:
        total: bytes of all kept tensors.
        split: the part of `total` that tensor parallelism divides among its ranks.
        scores: the part of `total` that attention scores take, which selective checkpointing recomputes.
        casts: bytes of the 16-bit copies of trained weights that the backward pass reads.
        frozen_casts: bytes of the 16-bit copies of frozen weights that the backward pass reads.
        pieces: bytes of each kept tensor, from which the CUDA allocator's rounding is computed.
    """

    total: Extent
    split: Extent
    scores: Extent
    casts: int
    frozen_casts: int
    pieces: tuple[Extent, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Activations:
    """The activations that a model keeps for the backward pass, as functions of batch and sequence length.

    Instances are compared by identity, because they are used as keys of a cache.

    Attributes:
        layers: one (kind, number of layers of that kind, tensors that each layer keeps) per layer kind.
        shared: bytes of tensors that all layers share, such as rotary tables.
        embedding: tensors that the embedding keeps.
        head: tensors that the head keeps.
        loss: bytes that the loss keeps.
        stream: bytes per token of the residual stream; full activation checkpointing keeps it once per layer.
        logit_width: bytes of one logit.
        vocab: number of logits of a token: rows of the vocabulary, or labels of a classifier.
        hidden: width of the head's input, in elements.
    """

    layers: tuple[tuple[LayerKind, int, Kept], ...]
    shared: Extent
    embedding: Kept
    head: Kept
    loss: Extent
    stream: int
    logit_width: int
    vocab: int
    hidden: int


class ShapeSum(NamedTuple):
    """Tensor sizes of a group of equal layers, from which activations are estimated without a recipe.

    Attributes:
        layers: number of equal layers.
        heads: query heads of one layer.
        linear: elements per token of the inputs and outputs of all linear layers.
        routed: elements per token of the inputs and outputs of the routed experts that process the token.
        norms: elements per token of the norms.
        weights: elements of the matrices that autocast casts to 16 bits. Experts are excluded: torch's
            grouped_mm runs in their own dtype.
    """

    layers: int
    heads: int
    linear: int
    routed: int
    norms: int
    weights: int


# Lower and upper bound of the ratio of exact to estimated activation bytes, for full training in fp32, bf16 and
# under autocast (tests/planner/test_training_activations.py).
#
# For families whose exact bytes `Tape` computes, at published sizes, the ratio is from 0.435 to 2.234. The
# minimum is OPT in bf16, whose ReLU keeps only its output, which is also the next matrix's input. The maximum
# is Apertus under autocast, whose xIELU keeps five tensors, two of them in fp32. Without these two families,
# the ratio is from 0.504 (StarCoder2) to 1.915 (CodeGen, whose GELU is composed of single operations). For tiny
# models of other families, with eager attention, it is from 0.74 (Doge) to 1.585 (DiffLlama, with two
# attentions per layer).
ESTIMATE_LOW, ESTIMATE_HIGH = 0.4, 2.25


def _experts_run(architecture: Architecture) -> int:
    """Return the number of routed experts of a layer that process one token."""
    every = family_of(architecture.model_type).every_expert
    return architecture.experts if every else max(1, architecture.experts_per_token)


def shape_sums(architecture: Architecture) -> tuple[ShapeSum, ...]:
    """Return one `ShapeSum` (sums of tensor shapes) for each group of equal layers of a decoder."""
    sums: dict[int, list[int]] = {}
    for tensor in architecture.tensors:
        if tensor.layer is None or tensor.role in ("vision", "audio", "projector", "buffer"):
            continue
        linear, routed, norms, weights = sums.setdefault(tensor.layer, [0, 0, 0, 0])
        weights += tensor.elements if len(tensor.shape) == 2 else 0
        if tensor.role == "norm":
            norms += tensor.shape[0] if tensor.shape else 0
        elif tensor.role == "expert" and len(tensor.shape) == 3:
            routed += (tensor.shape[1] + tensor.shape[2]) * _experts_run(architecture)
        elif len(tensor.shape) == 2:
            linear += sum(tensor.shape)
        sums[tensor.layer] = [linear, routed, norms, weights]
    counts = Counter(tuple(values) for values in sums.values())
    return tuple(ShapeSum(count, architecture.heads, *values) for values, count in counts.items())


def taped(recipe: Recipe | None) -> bool:
    """Return whether `Tape`, the symbolic forward pass, supports every operation of a model's recipe."""
    if recipe is None or not recipe.taped:
        return False
    modules = {branch.module for layer in set(recipe.layers) for branch in layer.branches}
    return all(
        isinstance(module, Attention | LatentAttention)
        or (module.act in ACTIVATIONS and not (isinstance(module, Experts) and module.router.kind == "other"))
        for module in modules
    )


def bare_recipe(architecture: Architecture) -> Recipe:
    """Return a recipe (a model's operations) with only embedding, final norm and head.

    It is for a model whose layers' activations are estimated from tensor shapes.
    """
    hidden, rotary = architecture.hidden_size, architecture.rotary
    norm = Norm("", hidden, family_of(architecture.model_type).final_norm)
    return Recipe(
        "", Embedding("", architecture.vocab_size, hidden), (), norm,
        Head(tied=False), (Table("", rotary.dim),) if rotary else (),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ActivationSetup:
    """The settings that decide which tensors a model's layers keep for the backward pass.

    Attributes:
        attention: `flash`, `sdpa` or `eager`.
        method: training method (`full`, `lora`, `qlora`, `ia3` or `freeze`).
        rank: LoRA rank.
        targets: name patterns of the modules that have adapters.
        trained_layers: number of last layers that the method `freeze` trains.
        fp8: whether Transformer Engine keeps the inputs of linear layers in fp8.
        convention: bytes per element of weights, gradients and matrix products.
        frozen: bytes of one frozen weight.
        cuda: whether the step runs on a GPU.
        explicit_mask: whether every layer receives an explicit attention mask.
        single: whether a micro-batch is one sequence.
        kernels: how the training library's modules differ from transformers' in the tensors that they keep.
    """

    attention: str
    method: str
    rank: int
    targets: frozenset[str]
    trained_layers: int
    fp8: bool
    convention: Convention
    frozen: int
    cuda: bool = True
    explicit_mask: bool = False
    single: bool = False
    kernels: Kernels = Kernels()

    @property
    def stream(self) -> int:
        """Return the bytes of one element of the residual stream."""
        convention = self.convention
        stored = convention.weights if self.method == "full" else self.frozen
        if convention.name == "fp32" or (convention.autocast and stored == 4):
            return 4
        return 2 if stored == 2 else convention.compute

    def layer_kind(self, index: int, layers: int, masked: bool) -> LayerKind:
        """Return the properties of layer `index` (from 0) that decide which tensors it keeps for training.

        The model has `layers` layers.
        """
        first = layers - self.trained_layers if self.method == "freeze" else 0
        trainable = self.method == "full" or (self.method == "freeze" and index >= first)
        adapters = self.method in ("lora", "qlora", "ia3")
        below = self.method == "full" or (adapters and index > 0) or (self.method == "freeze" and index > first)
        return LayerKind(masked, below, trainable)

    def tape(self, trainable: bool, masked: bool, kernels: Kernels) -> Tape:
        """Return an empty `Tape`, which records the tensors that a layer, the embedding or the head keeps."""
        convention, stream = self.convention, self.stream
        return Tape(
            compute=convention.compute, autocast=convention.autocast,
            weight=convention.weights if convention.autocast else stream,
            frozen=self.frozen if convention.autocast else stream, attention=self.attention, cuda=self.cuda,
            explicit_mask=self.explicit_mask, single=self.single, targets=self.targets, method=self.method,
            rank=self.rank, fp8=self.fp8, trainable=trainable, masked=masked, kernels=kernels,
        )  # fmt: skip


@lru_cache(maxsize=512)
def activations_of(
    recipe: Recipe, masked: tuple[bool, ...], setup: ActivationSetup, estimated: tuple[ShapeSum, ...] = ()
) -> Activations:
    """Return the activations that a model keeps for training, as functions of batch and sequence length.

    Args:
        recipe: the model's layers, as the operations that they run.
        masked: for each layer, whether it receives an explicit attention mask.
        setup: method, precision and kernels.
        estimated: if given, sums of tensor shapes; the layers are estimated from them, not from `recipe`.
    """
    stream, vocab, full = setup.stream, recipe.logits, setup.method == "full"
    tables = _rotary_tables(recipe, stream)
    if estimated:
        layers = tuple(_estimated(sums, setup) for sums in estimated)
        read = [table for pair in tables.values() for table in pair]
    else:
        layers, read = _taped(recipe, masked, setup, tables)
    kernels = setup.kernels._replace(compiled="") if setup.kernels.layers_only else setup.kernels
    return Activations(
        layers=layers,
        shared=sum((table.size.times(table.width) for table in read), Extent()),
        embedding=_embedding(setup.tape(full, False, kernels), recipe, stream),
        head=_head(setup.tape(full, False, kernels), recipe, stream),
        # log_softmax keeps its fp32 result (4 bytes per logit); the loss keeps the shifted labels (8 bytes per
        # token).
        loss=Extent(token=4 * vocab + 8, fixed=4),
        stream=recipe.hidden * stream,
        logit_width=setup.convention.compute if setup.convention.autocast else stream,
        vocab=vocab,
        hidden=recipe.embedding.width,
    )


def _rotary_tables(recipe: Recipe, stream: int) -> dict[str, tuple[Value, Value]]:
    """Return a model's rotary tables, as a dict from a table's name to its symbolic (cos, sin) tensors."""
    tables = {}
    for table in recipe.tables:
        size = Extent(position=table.dim // 2 if table.complex or table.half else table.dim)
        width = 4 if table.complex or table.wide else stream
        tables[table.name] = Value(size, width, False), Value(size, width, False)
    return tables


def _estimated(sums: ShapeSum, setup: ActivationSetup) -> tuple[LayerKind, int, Kept]:
    """Estimate the bytes that a group of equal layers keeps for the backward pass, from sums of tensor shapes.

    Returns (kind, number of layers, kept bytes of one layer).
    """
    convention, stream = setup.convention, setup.stream
    width = sums.linear * convention.compute + sums.norms * (4 + convention.compute) + sums.routed * stream
    score = sums.heads * (4 + convention.compute) if setup.attention == "eager" else 0
    total = Extent(token=width, score=score)
    cast = setup.fp8 or (convention.autocast and stream == 4)
    casts = convention.compute * sums.weights if cast else 0
    return LayerKind(False, True, True), sums.layers, Kept(total, total, Extent(score=score), casts, 0)


def _taped(
    recipe: Recipe, masked: tuple[bool, ...], setup: ActivationSetup, tables: dict[str, tuple[Value, Value]]
) -> tuple[tuple[tuple[LayerKind, int, Kept], ...], list[Value]]:
    """Run one layer of each kind on a `Tape`, the symbolic forward pass.

    Returns the kept bytes of each layer kind, and the shared tensors (rotary tables, attention mask) that any
    layer keeps.
    """
    mask = Value(Extent(mask=1), 1, False)
    tables = {**tables, MASK: (mask, mask)}
    counts = Counter(
        (layer, setup.layer_kind(index, len(recipe.layers), masked[index]))
        for index, layer in enumerate(recipe.layers)
    )
    layers = []
    read: dict[int, Value] = {}
    for (layer, kind), count in counts.items():
        t = setup.tape(kind.trainable, kind.masked, setup.kernels)
        run_layer(
            t,
            layer,
            Value(Extent(token=recipe.hidden), setup.stream, kind.input_grad),
            tables,
            f"{recipe.at}.*",
        )
        for pair in tables.values():
            for table in pair:
                if t.saved.pop(id(table), None) is not None:
                    read[id(table)] = table
        layers.append((kind, count, _kept(t)))
    return tuple(layers), list(read.values())


def _kept(t: Tape) -> Kept:
    """Return the bytes that the backward pass keeps, from the tensors that the `Tape` `t` has recorded."""
    sizes = [(value.size.times(value.width), value.split) for value in t.saved.values()]
    total = sum((size for size, _ in sizes), Extent())
    split = sum((size for size, is_split in sizes if is_split), Extent())
    return Kept(
        total, split, Extent(score=total.score),
        sum(size for _, size, frozen in t.weight_casts if not frozen),
        sum(size for _, size, frozen in t.weight_casts if frozen),
        tuple(size for size, _ in sizes),
    )  # fmt: skip


def _embedding(t: Tape, recipe: Recipe, stream: int) -> Kept:
    """Return the tensors that the token embedding keeps for the backward pass.

    It keeps 8-byte token ids, the indices of learned positions, and dropout's mask.
    """
    first, full = recipe.embedding, t.method == "full"
    if full:
        t.save(Value(Extent(token=1), 8, False))
        if first.positions is not None:
            t.save(Value(Extent(token=1) if first.each else Extent(position=1), 8, False))
    x = Value(Extent(token=first.width), stream, full)
    if first.projected is not None:
        x = t.cast(t.linear(x, first.projected[0], first.width, recipe.hidden), stream)
    if first.norm is not None:
        x = norm(t, first.norm, x)
    t.dropout(x, first.dropout)
    return _kept(t)


def _head(t: Tape, recipe: Recipe, stream: int) -> Kept:
    """Return the tensors that final norm, head and soft cap of the logits keep for the backward pass."""
    width, vocab = recipe.embedding.width, recipe.logits
    x = Value(Extent(token=recipe.hidden), stream, True)
    if recipe.final is not None:
        x = norm(t, recipe.final, x)
    if recipe.head.projected is not None:
        x = t.linear(x, recipe.head.projected, recipe.hidden, width)
    logits = t.linear(x, "lm_head", width, vocab)
    if recipe.head.softcap:
        t.save(t.like(logits))
    return _kept(t)
