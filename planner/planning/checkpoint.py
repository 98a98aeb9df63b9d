"""Size in bytes of a published checkpoint (`total_size` in its index), computed from the model's config.

Old files also store buffers, which depend on the code that wrote the file. They are recognized by the file's
`transformers_version` or `model_type`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tonnage.planner.families.registry import family_of
from tonnage.planner.headers.check import tied_copies_in_index, unknown_modules
from tonnage.planner.headers.index import INDEX, CheckpointIndex
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.dtypes import ELEMENT_BYTES
from tonnage.planner.model.tensor import TensorSpec
from tonnage.planner.plans import Term
from tonnage.planner.quantization.read import read_quantization
from tonnage.planner.quantization.scheme import Quantization


@dataclass(frozen=True, slots=True)
class CheckpointSize:
    """Lower and upper bound of the bytes of a checkpoint's tensors.

    The bounds differ only for NF4 files, because those store offsets as decimal text whose length varies.
    """

    low: int
    high: int


def checkpoint_size(
    architecture: Architecture, quantization: Quantization, config: Mapping[str, Any], dtype: str,
    copies: tuple[TensorSpec, ...] | None = None,
) -> CheckpointSize:  # fmt: skip
    """Return the bytes of all tensors in the checkpoint's files, computed from the config.

    `copies` are tied tensors, such as an output head tied to the embedding, that the files store a second time.
    If `copies` is None, the model family determines which tied tensors are stored.
    """
    total = sum(quantization.bytes_in_file(tensor, dtype) for tensor in architecture.tensors)
    total += _old_buffers(architecture, config, dtype)
    if copies is None:
        tied = family_of(config.get("model_type")).files.tied_head
        copies = tuple(t for t in architecture.tensors if t.tied_to) if tied else ()
    total += sum(copy.elements for copy in copies) * ELEMENT_BYTES[dtype]
    low = high = total
    for tensor in architecture.tensors:
        found = quantization.format_of(tensor)
        if found is not None and found.kind.text_in_file is not None:
            least, most = found.kind.text_in_file(found, dtype, tensor.shape)
            low, high = low + least, high + most
    return CheckpointSize(low, high)


def against_index(
    architecture: Architecture, index: CheckpointIndex, config: Mapping[str, Any], dtype: str
) -> tuple[tuple[Term, ...], tuple[str, ...]]:
    """Compare the `total_size` of a checkpoint's index with the bytes computed from its config.

    Returns:
        (memory terms, notes): one term and no note if both sizes agree, else no term and one note that gives
            the difference.
    """
    if index.total_bytes is None:
        return (), (f"{INDEX} has no total_size: config.json gives the bytes",)
    total, copies = index.total_bytes, tied_copies_in_index(architecture, index)
    size = checkpoint_size(architecture, read_quantization(config, None), config, dtype, copies)
    if size.low <= total <= size.high:
        shards = len(set(index.files.values()))
        formula = f"{len(index.files):,} tensors in {shards:,} files, what config.json gives in {dtype}"
        return (Term("checkpoint_bytes", total, formula, INDEX),), ()
    nearest, how = (size.low, "less") if total < size.low else (size.high, "more")
    note = (
        f"{INDEX} states {total:,} bytes of tensors, config.json gives {nearest:,} in {dtype}: "
        f"{abs(total - nearest):,} {how} in the files"
    )
    others = unknown_modules(architecture, index)
    if others:
        note += f"; of no module planned: {', '.join(others[:3])}" + (" ..." if len(others) > 3 else "")
    return (), (note,)


def _old_buffers(architecture: Architecture, config: Mapping[str, Any], dtype: str) -> int:
    """Return the bytes of causal masks and rotary buffers that old transformers versions stored per layer."""
    version, before = config.get("transformers_version"), family_of(architecture.model_type).files.masks_before
    if before is None or not isinstance(version, str):
        return 0
    numbers = version.split(".")[:2]
    if not all(part.isdigit() for part in numbers) or tuple(map(int, numbers)) >= before:
        return 0
    positions, size = architecture.max_model_len, ELEMENT_BYTES[dtype]
    rotary = architecture.rotary.dim if architecture.rotary else 0
    return architecture.layers * (positions * positions // 8 + size + rotary // 2 * size)
