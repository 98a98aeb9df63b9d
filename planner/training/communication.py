"""Bytes that a training step sends, by collective, and the time they take on a given network.

Volumes are per rank and optimizer step, in the convention of the ZeRO paper (section 7): an all-reduce of n
elements moves 2n elements, an all-gather or reduce-scatter n. For a model of P parameters, DDP, ZeRO-1 and
ZeRO-2 move 2P elements, ZeRO-3 moves 3P, and ZeRO++ 0.75P (arXiv 2306.10209, section 3).
"""

from __future__ import annotations

from typing import NamedTuple

from tonnage.planner.training.setup import TrainingSetup, hybrid_group
from tonnage.planner.training.states import States
from tonnage.planner.units import ceil_div


class Collective(NamedTuple):
    """One collective operation that a rank takes part in during a training step, and its traffic.

    Attributes:
        name: name of the collective operation, such as `all-reduce`.
        what: text that names the data sent.
        elements: 16-bit values sent in one run, by the ZeRO paper's convention; int8 counts half, int4 a
            quarter.
        bytes: bytes that one rank sends over one optimizer step.
        inter_node_bytes: bytes that all ranks of one node together send through the node's network port.
        per: how often the operation runs, `step` or `micro-batch`.
        seconds: time over one optimizer step, None if a needed link speed is unknown.
    """

    name: str
    what: str
    elements: int
    bytes: int
    inter_node_bytes: int
    per: str
    seconds: float | None = None


class Communication(NamedTuple):
    """All network and link traffic of a rank over one optimizer step of training.

    The fields `elements`, `bytes`, `inter_node_bytes` and `seconds` are sums over the collectives.

    Attributes:
        high_bytes: upper bound of `bytes`, reached where ZeRO-2 and ZeRO-3 reduce gradients after every
            micro-batch.
    """

    collectives: tuple[Collective, ...]
    elements: int
    bytes: int
    inter_node_bytes: int
    seconds: float | None
    high_bytes: int
    note: str


NO_COMMUNICATION = Communication((), 0, 0, 0, None, 0, "")


def _crossing(size: int, setup: TrainingSetup, ranks: int) -> int:
    """Return the bytes of one collective operation that cross the network port of one node.

    The operation moves `size` bytes over `ranks` ranks. If the ranks are on n nodes, size / n bytes cross each
    node's port. If all ranks are on one node, the result is 0.
    """
    nodes = setup.nodes if ranks > setup.gpus // setup.tensor_parallel else 1
    return 0 if nodes == 1 else size // nodes


def communication_of(setup: TrainingSetup, states: States, activation_bytes: int) -> Communication:
    """Return the network and link traffic of one rank over an optimizer step.

    `activation_bytes` is the bytes of the residual stream after one layer, for one micro-batch. Tensor and
    pipeline parallelism exchange it between ranks.
    """
    ranks = setup.shard_ranks
    p, trained = states.parameters, states.trainable
    weight = 2 if setup.precision != "fp32" else 4
    grad = max(1, ceil_div(states.full_gradients, max(1, trained)))
    # The ZeRO paper counts 16-bit gradients; fp32 gradients (autocast, DDP) move twice as many bytes.
    out: list[Collective] = []
    steps = setup.gradient_accumulation
    high = 0

    def add(name: str, what: str, elements: int, size: int, group: int, per: str = "step") -> None:
        """Add a collective operation over `group` ranks that sends `size` bytes per `step` or `micro-batch`.

        Nothing is added if `size` is 0 or the group has one rank.
        """
        if not size or group == 1:
            return
        total = size * steps if per == "micro-batch" else size
        crossing = _crossing(total, setup, group)
        out.append(Collective(name, what, elements, total, crossing, per, _seconds(setup, total, crossing)))

    stage = setup.zero_stage
    if setup.strategy == "fsdp-hybrid":
        group = hybrid_group(setup)
        add("all-gather", "weights, forward", p, weight * p, group, "micro-batch")
        add("all-gather", "weights, backward", p, weight * p, group, "micro-batch")
        add("reduce-scatter", "gradients in the group", trained, grad * trained, group)
        if ranks // group > 1:
            add("all-reduce", "gradient shards between groups", ceil_div(2 * trained, group),
                ceil_div(2 * grad * trained, group), ranks)  # fmt: skip
    elif stage == 3:
        hpz = setup.hpz_partition_size
        each = 1 if setup.quantized_weights else weight
        add("all-gather", "weights, forward", each * p // weight, each * p, ranks, "micro-batch")
        if hpz > 1:
            # With ZeRO++'s hpZ, each group of ranks holds a second copy of the weights for the backward pass.
            add("all-gather", "weights, backward, inside the group", 0, each * p, hpz, "micro-batch")
        else:
            add("all-gather", "weights, backward", each * p // weight, each * p, ranks, "micro-batch")
        if setup.quantized_gradients:
            # ZeRO++ replaces the reduce-scatter by an int4 all-to-all (arXiv 2306.10209 section 3.3).
            add("all-to-all", "gradients, int4", trained // 4, ceil_div(trained, 2), ranks)
            high = ceil_div(trained, 2) * (steps - 1)
        else:
            add("reduce-scatter", "gradients", trained, grad * trained, ranks)
            high = grad * trained * (steps - 1)
    elif stage in (1, 2):
        add("reduce-scatter", "gradients", trained, grad * trained, ranks)
        add("all-gather", "updated weights", trained, weight * trained, ranks)
        high = grad * trained * (steps - 1) if stage == 2 else 0
    elif ranks > 1:
        add("all-reduce", "gradients", 2 * trained, 2 * grad * trained, ranks)
    if setup.tensor_parallel > 1:
        # Tensor parallelism runs two all-reduces forward and two backward in each layer (arXiv 1909.08053).
        # Sequence parallelism replaces each all-reduce by an all-gather and a reduce-scatter of the same
        # volume.
        size = 2 * 4 * activation_bytes
        add("all-reduce", "activations of tensor parallelism", size // 2, size, setup.tensor_parallel,
            "micro-batch")  # fmt: skip
    if setup.pipeline_parallel > 1:
        size = 2 * activation_bytes // setup.pipeline_parallel
        add("send-receive", "activations and their gradients between stages", size // 2, size, ranks + 1,
            "micro-batch")  # fmt: skip
    elements = sum(c.elements for c in out)
    size, crossing = sum(c.bytes for c in out), sum(c.inter_node_bytes for c in out)
    seconds = [c.seconds for c in out]
    known = [s for s in seconds if s is not None]
    note = "" if not out else "gradients are reduced once per accumulation window"
    if high:
        note += "; DeepSpeed's stages 2 and 3 reduce them after every micro-batch (the upper bound)"
    return Communication(
        tuple(out),
        elements,
        size,
        crossing,
        sum(known) if len(known) == len(seconds) else None,
        size + high,
        note,
    )


def _seconds(setup: TrainingSetup, size: int, crossing: int) -> float | None:
    """Return the seconds of a collective operation, if links reach `network_share` of their specified speed.

    The result is the larger of the time inside the node and the time between nodes. It is None if the speed of
    a needed link is unknown.
    """
    total = 0.0
    if size:
        if setup.intra_node is None:
            return None
        total += size / (setup.intra_node * setup.network_share)
    if crossing:
        if setup.inter_node is None:
            return None
        total = max(total, crossing / (setup.inter_node * setup.network_share))
    return total
