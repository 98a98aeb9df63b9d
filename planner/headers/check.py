"""Checks that a checkpoint has the tensors that its config.json requires, with their names and shapes."""

from __future__ import annotations

from math import prod

from tonnage.planner.errors import CheckpointError, printable
from tonnage.planner.families.registry import family_of
from tonnage.planner.headers.index import CheckpointIndex
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.dtypes import SAFETENSORS_NAMES
from tonnage.planner.model.tensor import TOWER_ROLES, HeaderTensor, TensorSpec
from tonnage.planner.quantization.rules import spelling
from tonnage.planner.quantization.scheme import Quantization

# Old tensor names -> names by which transformers replaces them while loading (5.19, conversion_mapping.py and
# the models' own maps).
_OLD_NAMES = {"lm_head.weight": "embed_out.weight"}


def check_index(architecture: Architecture, index: CheckpointIndex, quantization: Quantization) -> None:
    """Raise CheckpointError for the first tensor that the config requires and the checkpoint's index lacks."""
    check_tensors(architecture, _named(index), quantization, shapes=False)


def _named(index: CheckpointIndex) -> tuple[HeaderTensor, ...]:
    return tuple(HeaderTensor(name, "", (), 0) for name in index.files)


def check_tensors(
    architecture: Architecture,
    tensors: tuple[HeaderTensor, ...],
    quantization: Quantization,
    shapes: bool = True,
) -> None:
    """Raise CheckpointError for the first tensor that is missing in the checkpoint or has another shape there.

    - A quantized weight must exist, but its packed shape is not compared.
    - Checkpoints store each routed expert separately, the loaded model all experts in one tensor. All experts
      must exist, and their numbers of elements must add up.
    - Tensors of vision and audio towers may be missing, and their shapes are not compared.
    - Tensors of encoders and routers may be missing. In families whose files do not use transformers' names
      (`FileTraits.renamed`), all tensors except experts may be missing.

    Args:
        architecture: the tensors that the config requires.
        tensors: the tensors of the checkpoint.
        quantization: the quantization of the checkpoint.
        shapes: whether the shapes of `tensors` are known.
    """
    found = {tensor.name: tensor for tensor in tensors}
    spelled = {spelling(tensor.name): tensor for tensor in tensors}
    experts = _experts_by_module(tensors)
    tied: dict[str, list[str]] = {}
    for spec in architecture.tensors:
        if spec.tied_to is not None:
            tied.setdefault(spec.tied_to, []).append(spec.name)
    stored_quantized = quantization.origin == "quantization_config"
    strict = not family_of(architecture.model_type).files.renamed
    for spec in architecture.tensors:
        if not spec.is_parameter or spec.tied_to is not None:
            continue
        found_format = quantization.format_of(spec) if stored_quantized else None
        packed = found_format is not None
        name = spec.name
        if found_format is not None and found_format.kind.suffix is not None:
            name = spec.module + found_format.kind.suffix
        # A checkpoint may store either of two tied tensors; transformers' tie_weights accepts both cases.
        tensor = _find(found, name) or next(
            (t for alias in tied.get(name, ()) if (t := _find(found, alias))), None
        )
        tensor = tensor or spelled.get(spelling(name))
        if tensor is None and spec.role == "expert":
            _check_experts(spec, experts.get(spelling(spec.module)), packed or not shapes)
            continue
        if tensor is None and (not strict or spec.role in (*TOWER_ROLES, "encoder", "router")):
            continue
        if tensor is None:
            raise _mismatch(f"{name} is not in the checkpoint, which has {len(found)} tensors")
        if shapes and not packed and tensor.shape != spec.shape and spec.role not in TOWER_ROLES:
            stored, wanted = list(tensor.shape), list(spec.shape)
            raise _mismatch(f"{spec.name} is {stored} in the checkpoint but {wanted} by config.json")


def _mismatch(message: str) -> CheckpointError:
    """Return the error for a checkpoint that does not match its config.json."""
    hint = "config.json and the weights do not belong together"
    return CheckpointError(message, field="safetensors", hint=hint)


def _experts_by_module(tensors: tuple[HeaderTensor, ...]) -> dict[str, list[HeaderTensor]]:
    """Return normalized module name (`<module>.experts`) -> header entries of all its experts' tensors."""
    out: dict[str, list[HeaderTensor]] = {}
    for tensor in tensors:
        module, mark, rest = tensor.name.partition(".experts.")
        if mark and rest.partition(".")[0].isdigit():
            out.setdefault(spelling(module + ".experts"), []).append(tensor)
    return out


def _check_experts(spec: TensorSpec, stored: list[HeaderTensor] | None, packed: bool) -> None:
    """Raise CheckpointError if a checkpoint's experts in one layer have a wrong number or matrix size."""
    if stored is None:
        raise _mismatch(f"{spec.module} has no experts in the checkpoint")
    if len(spec.shape) != 3 or spec.name.endswith("_bias"):
        return
    numbers = {t.name.partition(".experts.")[2].partition(".")[0] for t in stored}
    if len(numbers) != spec.shape[0]:
        raise _mismatch(
            f"{spec.module} has {len(numbers)} experts in the checkpoint but {spec.shape[0]} by config.json"
        )
    each = spec.elements // spec.shape[0] // spec.matrices
    if not packed and not any(prod(t.shape) == each for t in stored):
        raise _mismatch(f"{spec.module} has no expert matrix of {each:,} elements, which config.json requires")


def _find(found: dict[str, HeaderTensor], name: str) -> HeaderTensor | None:
    """Return the tensor `name` of a checkpoint, which may store it under one of three names; None if absent.

    The names are `name` itself, its old name, and `name` without its first part (such as `model.`), which
    checkpoints of a `...Model` class leave out.
    """
    if name in found:
        return found[name]
    old = _OLD_NAMES.get(name)
    if old in found:
        return found[old]
    return found.get(name.partition(".")[2])


def stored_tied_copies(architecture: Architecture, tensors: tuple[HeaderTensor, ...]) -> tuple[TensorSpec, ...]:
    """Return the tied tensors that the checkpoint stores a second time, found from its headers.

    transformers 5.19 ties such tensors only if their values are equal (modeling_utils.py, tie_weights). The
    header does not show the values.
    """
    found = {tensor.name: tensor for tensor in tensors}
    return tuple(
        spec
        for spec in architecture.tensors
        if spec.tied_to is not None and _find(found, spec.name) and _find(found, spec.tied_to)
    )


def tied_copies_in_index(architecture: Architecture, index: CheckpointIndex) -> tuple[TensorSpec, ...]:
    """Return the tied tensors that a checkpoint stores a second time, found from its index alone."""
    return stored_tied_copies(architecture, _named(index))


def unknown_modules(architecture: Architecture, index: CheckpointIndex) -> list[str]:
    """Return text lines about modules in a checkpoint's index that the config's model lacks.

    Each line has the module's number of tensors; the modules with the most tensors come first. Layer indices
    that occur several times are replaced by `*`. The list is empty for a family whose files use other names
    than transformers.
    """
    if family_of(architecture.model_type).files.renamed:
        return []
    owners: set[str] = set()
    known: set[str] = set()
    for spec in architecture.tensors:
        pieces = spelling(spec.name).split(".")
        owners.add(".".join(pieces[:-1]))
        known.update(".".join(pieces[:k]) for k in range(1, len(pieces)))
    found: dict[str, list[str]] = {}
    for name in index.files:
        pieces = spelling(name).split(".")
        for k in range(1, len(pieces) + 1):
            at = ".".join(pieces[:k])
            if at in owners:
                break
            if at not in known:
                group = ".".join("*" if piece.isdigit() else piece for piece in pieces[:k])
                found.setdefault(group, []).append(at)
                break
    most_first = sorted(found.items(), key=lambda item: -len(item[1]))
    return [
        f"{printable(group if len(set(below)) > 1 else below[0])} ({len(below):,})"
        for group, below in most_first
    ]


def floating_dtype(tensors: tuple[HeaderTensor, ...]) -> str | None:
    """Return the dtype of a checkpoint's first floating-point tensor, or None if it has none.

    With dtype `auto`, transformers uses this dtype if config.json states none.
    """
    for tensor in tensors:
        if tensor.dtype in SAFETENSORS_NAMES:
            return SAFETENSORS_NAMES[tensor.dtype]
    return None
