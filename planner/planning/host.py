"""Host memory of a plan for GPUs: the inputs for the engine's estimates, and their results as memory terms."""

from __future__ import annotations

from dataclasses import replace

from tonnage.planner.devices.catalogue import shares_memory
from tonnage.planner.engines.pool import PoolCapacity, PoolSpec
from tonnage.planner.engines.registry import engine_of
from tonnage.planner.engines.runtime.host import HostInputs, largest_tensor
from tonnage.planner.errors import DeploymentError
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.dtypes import ELEMENT_BYTES
from tonnage.planner.model.host import HostMemory
from tonnage.planner.model.tier import KVTier
from tonnage.planner.planning.stages import Stage
from tonnage.planner.plans import RankPlan, Resolved, Term
from tonnage.planner.quantization.read import read_quantization
from tonnage.planner.source.resolve import ModelSource
from tonnage.planner.units import gib


def host_memory(
    source: ModelSource, dtype: str, architecture: Architecture, chosen: Resolved, stages: list[Stage],
    ranks: tuple[RankPlan, ...], pool: PoolSpec, held: PoolCapacity,
    bounds: tuple[PoolCapacity, PoolCapacity],
) -> tuple[HostMemory | None, tuple[KVTier, ...]]:  # fmt: skip
    """Return the host memory that the engine needs besides GPU memory (None on a CPU), and its KV tiers.

    `dtype` is the checkpoint's dtype. `held` is the planned capacity of the KV pool, and `bounds` are its lower
    and upper bound.

    Raises:
        DeploymentError: a tier's flags are not understood, or a tier does not fit into memory whose size is
            known.
    """
    flags = chosen.flags
    total, largest = _files(source, architecture, dtype)
    usual, most = _file_sizes(source.config.get("transformers_version"))
    hosted = HostInputs(
        architecture, chosen, pool.layout, ranks, total, min(total, usual), min(total, most), largest,
        block_bytes=max(stage.block_bytes for stage in stages) * len(ranks),
        num_blocks=held.num_blocks,
        tokens=held.tokens,
        token_bounds=(bounds[0].tokens, bounds[1].tokens),
        apart=pool.apart,
    )  # fmt: skip
    engine = engine_of(flags.engine)
    tiers = engine.tiers(hosted)
    if flags.device == "cpu":
        return None, tiers
    if shares_memory(flags.gpu):
        _check_unified(tiers, chosen, len(ranks))
        why = f"{flags.gpu} has no memory of its own, the plan's is the host's too"
        return HostMemory(unknown=why), tiers
    return engine.host_memory(replace(hosted, tiers=tiers)), tiers


def _check_unified(tiers: tuple[KVTier, ...], chosen: Resolved, ranks: int) -> None:
    """Raise DeploymentError if the KV tiers in memory are too large for a GPU that shares the host's memory.

    Each machine has one such GPU. The tiers must fit into the memory that the engine leaves free there.
    """
    # A machine whose GPU shares the host's memory has only one GPU, so each rank runs on its own machine.
    taken = sum(tier.value or 0 for tier in tiers if tier.medium == "host") // ranks
    left = chosen.device_memory - chosen.limit
    if taken > left:
        raise DeploymentError(
            f"takes {gib(taken)} of the memory that {chosen.flags.gpu} shares with its host; the engine "
            f"uses {gib(chosen.limit)} of {gib(chosen.device_memory)}, which leaves {gib(left)}",
            field="KV tier", hint="lower the tier's size or --gpu-memory-utilization",
        )  # fmt: skip


def _files(source: ModelSource, architecture: Architecture, dtype: str) -> tuple[int, int]:
    """Return (bytes of all tensors in the checkpoint, bytes of the largest tensor).

    The numbers come from the tensor headers if they are known, else from the index or the config.
    """
    if source.tensors is not None:
        sizes = [tensor.nbytes for tensor in source.tensors]
        return sum(sizes), max(sizes, default=0)
    largest = largest_tensor(architecture.tensors, ELEMENT_BYTES[dtype])
    if source.index is not None and source.index.total_bytes is not None:
        return source.index.total_bytes, largest
    stored = read_quantization(source.config, None)
    return sum(stored.bytes_in_file(tensor, dtype) for tensor in architecture.tensors), largest


def _file_sizes(version: object) -> tuple[int, int]:
    """Return (typical, largest) bytes of one checkpoint file, by the transformers version that wrote it.

    The sizes are the max_shard_size of save_pretrained: 10 GB, 5 GB from transformers 4.35, 50 GB from 5.0.
    """
    later = isinstance(version, str) and not version.startswith(("0.", "1.", "2.", "3.", "4."))
    return 5 * 10**9, (50 if later else 10) * 10**9


def host_terms(host: HostMemory) -> list[Term]:
    """Return the parts of host memory as memory terms of the plan; each sums all ranks of one replica."""
    return [
        Term(
            f"host.{part.name.lower().replace(' ', '_')}", part.value,
            f"{part.formula}; {gib(part.low)} to {gib(part.high)}"
            + ("" if part.when == "always" else f", while {part.when}")
            + (", in /dev/shm" if part.shared else ""),
            part.source,
        )
        for part in host.parts
    ]  # fmt: skip
