"""Sweeps of training setups, with one plan and one result row per combination of flag values."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from tonnage.planner.errors import DeploymentError, TonnageError
from tonnage.planner.flags import flags_of
from tonnage.planner.training.build import Planner
from tonnage.planner.training.setup import TrainingSetup

MAX_SETTINGS = 1_000_000


@dataclass(frozen=True, slots=True)
class Row:
    """One training setup of a sweep, with its planned memory.

    Attributes:
        values: the values of the swept flags in this setup.
        gpu_bytes: planned GPU bytes per rank, None for a rejected setup.
        cpu_bytes: planned bytes of CPU memory per node, None for a rejected setup.
        nvme_bytes: planned NVMe bytes per node, None for a rejected setup.
        fits: whether the setup fits into memory, None if it is rejected or no memory size was given.
        refused: the reason why the setup is rejected, else None.
    """

    values: tuple[Any, ...]
    gpu_bytes: int | None
    cpu_bytes: int | None
    nvme_bytes: int | None
    fits: bool | None
    refused: str | None = None


def parse_axis(text: str) -> tuple[str, tuple[Any, ...]]:
    """Parse a --sweep value such as `micro-batch=1,2,4` into the field name and its values.

    Raises:
        DeploymentError: for an unknown flag or an invalid value.
    """
    name, _, values = text.partition("=")
    flag = flags_of(TrainingSetup).get(name.strip().lstrip("-").replace("-", "_"))
    if flag is None or not values:
        raise DeploymentError(
            f"{text[:60]!r} is not FLAG=VALUE,VALUE", field="--sweep", hint="for example micro-batch=1,2,4"
        )
    items = [item.strip() for item in values.split(",")]
    return flag.name, tuple(flag.read(item.replace("+", ","), f"--sweep {name}") for item in items)


def sweep(
    planner: Planner, setup: TrainingSetup, axes: list[tuple[str, tuple[Any, ...]]],
    made: Callable[[dict[str, Any]], TrainingSetup] | None = None,
) -> Iterator[Row]:  # fmt: skip
    """Yield the planned memory of each combination of the swept values, or why it is rejected.

    By default, the swept values replace fields of `setup`. If a swept flag changes the defaults of other flags
    (--stack), the function `made` makes the setup from the swept values.
    """
    count = math.prod(len(values) for _, values in axes)
    if count > MAX_SETTINGS:
        raise DeploymentError(
            f"the lists of values make {count:,} setups; at most {MAX_SETTINGS:,} are planned", field="--sweep",
            hint="give fewer values",
        )  # fmt: skip
    names = [name for name, _ in axes]
    for values in itertools.product(*(values for _, values in axes)):
        try:
            changes = dict(zip(names, values, strict=True))
            plan = planner.plan(made(changes) if made else replace(setup, **changes), brief=True)
        except TonnageError as error:
            yield Row(values, None, None, None, None, str(error))
            continue
        yield Row(values, plan.total(), plan.total("cpu"), plan.total("nvme"), plan.fits)
