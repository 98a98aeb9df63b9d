"""Model states of one rank: weights, master weights, gradients, optimizer states.

The module also counts sizes that other modules need for buckets, gathered weights and temporary copies.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from tonnage.planner.model.architecture import Architecture
from tonnage.planner.training.methods import TensorGroup, Trained
from tonnage.planner.training.optimizers import OPTIMIZER, STEP_BYTES, is_projected, shared_bytes, state_bytes
from tonnage.planner.training.precision import Convention, convention_of
from tonnage.planner.training.setup import TrainingSetup
from tonnage.planner.training.sharding import (
    PERSISTENT_ELEMENTS,
    Shards,
    in_stage,
    shard_elements,
    shards,
    split,
    stage_of,
)
from tonnage.planner.training.stacks import adapter_bytes
from tonnage.planner.units import ceil_div


@dataclass(frozen=True, slots=True)
class States:
    """Bytes of the model states of one rank, on GPU, CPU or NVMe, and sizes that other plan lines need.

    Attributes:
        weights: bytes of trained weights.
        frozen: bytes of weights that are not trained.
        master: bytes of the fp32 copies of trained weights.
        gradients: bytes of gradients.
        optimizer: bytes of optimizer states.
        counters: bytes of step counters, in host memory.
        persistent: bytes of small parameters that ZeRO-3 keeps in full on every rank.
        parameters: number of parameters of the rank's part of the model, before sharding.
        trainable: number of trained parameters among these.
        layer: elements of one decoder layer.
        largest: elements of the largest tensor.
        full_gradients: bytes of the gradients before sharding.
        full_frozen: bytes of the frozen weights before sharding.
        projected: elements of the largest matrix that GaLore projects.
        packed: elements of the largest quantized matrix.
        layer_trained: trained elements of one decoder layer.
        outer_trained: trained elements outside the layers.
        layer_gathered: bytes of one decoder layer after its weights are gathered.
        outer_gathered: bytes of all tensors outside the layers after they are gathered.
        end_gathered: bytes of the largest tensor outside the layers after it is gathered.
    """

    weights: int
    frozen: int
    master: int
    gradients: int
    optimizer: int
    counters: int
    persistent: int
    parameters: int
    trainable: int
    layer: int
    largest: int
    full_gradients: int
    full_frozen: int
    projected: int
    packed: int
    layer_trained: int
    outer_trained: int
    layer_gathered: int
    outer_gathered: int
    end_gathered: int

    @property
    def total(self) -> int:
        """Return the total bytes of weights, master weights, gradients and optimizer states on one rank."""
        return self.weights + self.frozen + self.master + self.gradients + self.optimizer


class _Piece(NamedTuple):
    """A group of equal tensors on one rank.

    Attributes:
        held: the group as it is in the whole model, before parallelism divides it.
        shape: shape of one tensor on this rank, before sharding.
        tensors: number of tensors of the group on this rank.
        ranks: number of ranks among which each tensor's states are sharded.
    """

    held: TensorGroup
    shape: tuple[int, ...]
    tensors: int
    ranks: Shards

    @property
    def elements(self) -> int:
        """Return the number of elements of one tensor of the group on a rank, before sharding."""
        return prod(self.shape)


def _pieces(trained: Trained, architecture: Architecture, setup: TrainingSetup, stage: int) -> list[_Piece]:
    """Return the groups of tensors on one rank of a pipeline stage, after tensor and expert parallelism."""
    layers = stage_of(architecture, setup, stage)
    tied = any(t.tied_to for t in architecture.tensors)
    everywhere = shards(setup)
    out = []
    for held in trained.held:
        count = in_stage(held, layers, stage, setup.pipeline_parallel, tied)
        if not count:
            continue
        shape, ranks = split(held, setup), everywhere
        if held.role == "expert" and setup.expert_parallel > 1:
            ep = setup.expert_parallel
            if len(shape) > 2:  # One tensor holds all experts of a layer.
                shape = (ceil_div(shape[0], ep), *shape[1:])
            else:
                count = ceil_div(count, ep)
            ranks = Shards(*(max(1, n // ep) for n in (ranks.weights, ranks.gradients, ranks.optimizer)))
        out.append(_Piece(held, shape, count, ranks))
    return out


def _sharded(piece: _Piece, ranks: int, setup: TrainingSetup) -> int:
    """Return the number of elements in one tensor's largest shard, after sharding among `ranks` ranks."""
    return shard_elements(piece.shape, ranks, setup.is_fsdp and setup.fsdp_version == 2)


def states_on_rank(
    trained: Trained, architecture: Architecture, setup: TrainingSetup, stage: int = 0
) -> States:
    """Return the model states of one rank of a pipeline stage: the rank with the largest shards.

    DeepSpeed's stages 1 and 2 shard one flat buffer of all gradients and states. ZeRO-3 and FSDP shard each
    tensor, padded to equal shards (FSDP2: whole rows). Tests compare the bytes with torch's FSDP
    (tests/planner/test_training_fsdp.py).
    """
    convention = convention_of(setup)
    pieces = _pieces(trained, architecture, setup, stage)
    weights = frozen = master = gradients = optimizer = counters = persistent = 0
    parameters = trainable = full_gradients = full_frozen = largest = projected = packed = 0
    per_layer = per_layer_trained = outer_trained = layer_gathered = outer_gathered = end_gathered = 0
    for piece in pieces:
        held, count, n = piece.held, piece.tensors, piece.elements
        total = n * count
        parameters += total
        largest = max(largest, n)
        gathered = convention.compute * n if held.trainable else ceil_div(held.frozen_bytes * n, held.elements)
        if held.layers[0] is None:
            outer_gathered += gathered * count
            end_gathered = max(end_gathered, gathered)
            outer_trained += total if held.trainable else 0
        else:
            each = n * held.count // len(set(held.layers))
            per_layer += each
            per_layer_trained += each if held.trainable else 0
            layer_gathered += gathered * held.count // len(set(held.layers))
        w = _sharded(piece, piece.ranks.weights, setup) * count
        # A weight with fewer bytes than elements is quantized.
        if not held.trainable and held.frozen_bytes < n:
            packed = max(packed, n)
        if not held.trainable:
            # The packed bytes of a quantized tensor are sharded in proportion to its elements.
            bytes_whole = ceil_div(held.frozen_bytes * n, held.elements)
            frozen += ceil_div(bytes_whole * w, n) if w != total else bytes_whole * count
            full_frozen += bytes_whole * count
            continue
        trainable += total
        each_w, each_m, each_g, each_s = _trained_bytes(held, convention, setup)
        g = _sharded(piece, piece.ranks.gradients, setup) * count
        s = _sharded(piece, piece.ranks.optimizer, setup) * count
        if piece.ranks.weights > 1 and not setup.is_fsdp and n < PERSISTENT_ELEMENTS and not held.adapter:
            persistent += each_w * (total - w)
        weights += each_w * w
        master += each_m * s
        gradients += each_g * g
        full_gradients += each_g * total
        states = state_bytes(setup.optimizer, piece.shape, held.role, each_s, setup.galore_rank) * count
        if is_projected(setup.optimizer, piece.shape, held.role):
            projected = max(projected, n)
        optimizer += states if s == total else ceil_div(states * s, total)
        counters += STEP_BYTES * count if OPTIMIZER[setup.optimizer].counter else 0
    if setup.is_fsdp and setup.fsdp_version == 1 and setup.method == "full" and weights:
        # FSDP1 has one flat parameter per unit, padded once. The units are the layers, and a root unit with all
        # other tensors.
        whole = sum(p.elements * p.tensors for p in pieces)
        ranks = pieces[0].ranks
        weights = convention.weights * _units(pieces, ranks.weights)
        master = convention.master * _units(pieces, ranks.optimizer)
        gradients = convention.gradients * _units(pieces, ranks.gradients)
        states = sum(
            state_bytes(setup.optimizer, p.shape, p.held.role, convention.state, setup.galore_rank) * p.tensors
            for p in pieces
        )
        optimizer = ceil_div(states * _units(pieces, ranks.optimizer), whole)
    experts_apart = setup.expert_parallel > 1 and any(piece.held.role == "expert" for piece in pieces)
    if setup.strategy in ("zero1", "zero2") and trainable and not experts_apart:
        # ZeRO-1 and ZeRO-2 shard one flat buffer, which is padded once.
        optimizer, master, gradients = _flat(pieces, convention, setup)
    return States(
        weights=weights, frozen=frozen, master=master, gradients=gradients,
        optimizer=optimizer + shared_bytes(setup.optimizer), counters=counters,
        persistent=persistent, parameters=parameters, trainable=trainable, layer=per_layer, largest=largest,
        full_gradients=full_gradients, full_frozen=full_frozen, projected=projected, packed=packed,
        layer_trained=per_layer_trained, outer_trained=outer_trained, layer_gathered=layer_gathered,
        outer_gathered=outer_gathered, end_gathered=end_gathered,
    )  # fmt: skip


def _units(pieces: list[_Piece], ranks: int) -> int:
    """Return the number of elements of FSDP1's flat parameters on one rank.

    FSDP1 has one flat parameter per layer, and one for all tensors outside the layers.
    """
    sums: dict[int | None, int] = {}
    for piece in pieces:
        layers = sorted(set(piece.held.layers), key=lambda layer: -1 if layer is None else layer)
        each = piece.tensors // len(layers) if piece.tensors == piece.held.count else 1
        for layer in layers[: max(1, piece.tensors // max(1, each))]:
            sums[layer] = sums.get(layer, 0) + piece.elements * each
    return sum(ceil_div(total, ranks) for total in sums.values())


def _trained_bytes(
    held: TensorGroup, convention: Convention, setup: TrainingSetup
) -> tuple[int, int, int, int]:
    """Return the bytes of a trained parameter's weight, fp32 copy, gradient and single optimizer state."""
    if held.adapter:
        size = adapter_bytes(setup)
        return size, 0, size, size
    return convention.weights, convention.master, convention.gradients, convention.state


def _flat(pieces: list[_Piece], convention: Convention, setup: TrainingSetup) -> tuple[int, int, int]:
    """Return (optimizer state, fp32 copy, gradient) bytes of one rank under ZeRO-1 and ZeRO-2.

    Each of the three is one rank's part of a flat buffer, which is rounded up once.
    """
    ranks = pieces[0].ranks
    sums = [0, 0, 0]
    for piece in pieces:
        if piece.held.trainable:
            _, m, g, s = _trained_bytes(piece.held, convention, setup)
            total = piece.elements * piece.tensors
            states = state_bytes(setup.optimizer, piece.shape, piece.held.role, s, setup.galore_rank)
            sums[0] += states * piece.tensors
            sums[1] += m * total
            sums[2] += g * total
    return (
        ceil_div(sums[0], ranks.optimizer),
        ceil_div(sums[1], ranks.optimizer),
        ceil_div(sums[2], ranks.gradients),
    )
