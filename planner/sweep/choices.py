"""Values that a table of plans compares: several models, GPUs, quantizations and KV cache dtypes.

The options --gpu, --quantization and --kv-cache-dtype accept several values with commas. `--gpu 2xa100-80g`
means two GPUs of this type.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tonnage.planner.deployment import Deployment
from tonnage.planner.devices.catalogue import Gpu, find_gpu
from tonnage.planner.errors import DeploymentError
from tonnage.planner.flags import flags_of
from tonnage.planner.quantization.read import quantized_to

if TYPE_CHECKING:
    from tonnage.planner.sweep.grid import Grid

UNQUANTIZED = "none"


@dataclass(frozen=True, slots=True)
class Choices:
    """The values that the user gave for each flag that varies in a table of plans; an empty tuple means none.

    Attributes:
        gpus: (GPU name, number of GPUs among which the model is divided, or None without a count).
    """

    models: tuple[str, ...]
    gpus: tuple[tuple[str, int | None], ...] = ()
    quantizations: tuple[str, ...] = ()
    kv_cache_dtypes: tuple[str, ...] = ()

    @property
    def lists(self) -> tuple[tuple[object, ...], ...]:
        """Return the values from the command line as (models, GPUs, quantizations, KV cache dtypes)."""
        return self.models, self.gpus, self.quantizations, self.kv_cache_dtypes

    @property
    def several(self) -> bool:
        """Return whether the user gave more than one value for any flag."""
        return max(map(len, self.lists)) > 1


def read_choices(args: argparse.Namespace) -> Choices:
    """Read the comma-separated values of options; leave only the first value of each option in `args`.

    Raises:
        DeploymentError: a value is invalid or contradicts --tensor-parallel-size.
    """
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
                    field="--gpu", hint="give only one of the two",
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
    """Raise DeploymentError if several values were given although an option needs a single plan."""
    if choices.several:
        given = zip(("MODEL", "--gpu", "--quantization", "--kv-cache-dtype"), choices.lists, strict=True)
        field = next(name for name, values in given if len(values) > 1)
        raise DeploymentError(
            "several values give a table of plans, but another option needs a single plan", field=field
        )


def grids(choices: Choices, deployment: Deployment, every: Sequence[Gpu], whole: Grid | None) -> list[Grid]:
    """Return the grids of flag values to plan, one grid per GPU in the order of --gpu.

    Args:
        choices: the values that the user gave.
        deployment: the flags that are the same in every plan.
        every: GPUs to sweep over if --gpu was not given.
        whole: the grid of --sweep, in which all flags that the user did not give vary; None without --sweep.
    """
    # lazy import: it takes 5 ms, and a single plan does not need it
    from tonnage.planner.sweep.grid import Grid

    ranks = deployment.tensor_parallel_size
    formats = tuple("as is" if name == UNQUANTIZED else name for name in choices.quantizations)
    for name in formats:
        if name != "as is":
            quantized_to(name)  # raises an error for an unknown quantization
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
    # One grid per GPU keeps the order of --gpu. dict.fromkeys drops a repeated GPU, in any spelling.
    for gpu, count in dict.fromkeys((find_gpu(name), count) for name, count in choices.gpus):
        sizes = base.tensor_parallel_sizes if count is None else (count,)
        found.append(replace(base, gpus=(gpu,), tensor_parallel_sizes=sizes))
    return found


def _parts(text: str, name: str) -> list[str]:
    """Split an option's text at commas and parse each part as a value of the flag `name`."""
    flag = flags_of(Deployment)[name]
    parts = [part.strip() for part in text.split(",")] if text else []
    if parts and not all(parts):
        raise DeploymentError(f"{text[:60]!r} has an empty name between commas", field=flag.option)
    return list(dict.fromkeys(flag.read(part) for part in parts))


def _counted(text: str) -> tuple[str, int | None]:
    match = re.fullmatch(r"(\d{1,4})\s*x\s*(.+)", text)
    if match is None:
        return text, None
    if not int(match[1]):
        raise DeploymentError(f"{text[:60]!r} asks for 0 GPUs; give at least one", field="--gpu")
    return match[2], int(match[1])
