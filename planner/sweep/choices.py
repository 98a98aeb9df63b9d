"""What is planned side by side: several models, and the values between the commas of --gpu (2xa100-80g: two of
them), --quantization and --kv-cache-dtype."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tonnage.planner.deployment import Deployment
from tonnage.planner.errors import DeploymentError
from tonnage.planner.flags import flags_of

if TYPE_CHECKING:
    from tonnage.planner.devices.catalogue import Gpu
    from tonnage.planner.sweep.grid import Grid

UNQUANTIZED = "none"


@dataclass(frozen=True, slots=True)
class Choices:
    """Values of the flags that were given, in their order; an empty tuple: not given. ``gpus``: name and how
    many of them share a model, None where nothing says."""

    models: tuple[str, ...]
    gpus: tuple[tuple[str, int | None], ...] = ()
    quantizations: tuple[str, ...] = ()
    kv_cache_dtypes: tuple[str, ...] = ()

    @property
    def lists(self) -> tuple[tuple[object, ...], ...]:
        return self.models, self.gpus, self.quantizations, self.kv_cache_dtypes

    @property
    def several(self) -> bool:
        return max(map(len, self.lists)) > 1

    @property
    def of_models(self) -> Choices:
        """The models alone."""
        return Choices(self.models)


def read_choices(args: argparse.Namespace) -> Choices:
    """Take them out of ``args``, which keeps the first of each. Raises DeploymentError."""
    gpus, formats, caches = args.gpu or "", args.quantization or "", args.kv_cache_dtype or ""
    found = Choices(
        tuple(dict.fromkeys((args.model, *getattr(args, "others", ())))),
        tuple(_counted(text) for text in _parts(gpus, "gpu")),
        tuple(_parts(formats, "quantization")),
        tuple(_parts(caches, "kv_cache_dtype")),
    )
    if found.gpus:
        ranks = args.tensor_parallel_size
        for name, count in found.gpus:
            if count is not None and ranks is not None and ranks != count:
                raise DeploymentError(
                    f"{count} x {name} contradicts --tensor-parallel-size {ranks}",
                    field="--gpu", hint="give one",
                )  # fmt: skip
        args.gpu, count = found.gpus[0]
        if count is not None and not found.several:
            args.tensor_parallel_size = count
    if found.quantizations:
        args.quantization = None if UNQUANTIZED in found.quantizations else found.quantizations[0]
    if found.kv_cache_dtypes:
        args.kv_cache_dtype = found.kv_cache_dtypes[0]
    return found


def one_of(choices: Choices) -> None:
    """For a question about one plan: raises DeploymentError where several values were given."""
    if choices.several:
        given = zip(("MODEL", "--gpu", "--quantization", "--kv-cache-dtype"), choices.lists, strict=True)
        field = next(name for name, values in given if len(values) > 1)
        raise DeploymentError("several are for a table of many plans, this is about one", field=field)


def grids(choices: Choices, deployment: Deployment, every: Sequence[Gpu], whole: Grid | None) -> list[Grid]:
    """What to combine. ``every``: the GPUs where none was named; ``whole``: of --sweep, all that a flag leaves
    open is varied."""
    from tonnage.planner.devices.catalogue import find_gpu  # a plan alone needs none of these
    from tonnage.planner.quantization.read import quantized_to
    from tonnage.planner.sweep.grid import Grid

    ranks = deployment.tensor_parallel_size
    formats = tuple("as is" if name == UNQUANTIZED else name for name in choices.quantizations)
    for name in formats:
        if name != "as is":
            quantized_to(name)  # refuses an unknown one
    caches = choices.kv_cache_dtypes or (deployment.kv_cache_dtype,)
    base = Grid(tuple(every), formats or ("as is",), caches, (ranks,))
    if whole is not None:
        base = replace(
            whole,
            quantizations=formats or whole.quantizations,
            kv_cache_dtypes=choices.kv_cache_dtypes or whole.kv_cache_dtypes,
        )
    if not choices.gpus:
        return [base]
    found = []
    # One after the other: rows in the order of the flag. Each once, whatever its spellings.
    for gpu, count in dict.fromkeys((find_gpu(name), count) for name, count in choices.gpus):
        sizes = base.tensor_parallel_sizes if count is None else (count,)
        found.append(replace(base, gpus=(gpu,), tensor_parallel_sizes=sizes))
    return found


def _parts(text: str, name: str) -> list[str]:
    """The values between commas, each read as the flag reads it."""
    flag = flags_of(Deployment)[name]
    parts = [part.strip() for part in text.split(",")] if text else []
    if parts and not all(parts):
        raise DeploymentError(f"{text[:60]!r} has an empty name", field=flag.option)
    return list(dict.fromkeys(flag.read(part) for part in parts))


def _counted(text: str) -> tuple[str, int | None]:
    match = re.fullmatch(r"(\d{1,4})\s*x\s*(.+)", text)
    if match is None:
        return text, None
    if not int(match[1]):
        raise DeploymentError(f"{text[:60]!r}: at least one", field="--gpu")
    return match[2], int(match[1])
