"""Many settings at once: every combination of the swept flags, one row each."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from tonnage.planner.errors import DeploymentError, TonnageError
from tonnage.planner.records import dataclass, replace
from tonnage.planner.training.build import Planner
from tonnage.planner.training.setup import TrainingSetup

MAX_SETTINGS = 1_000_000


@dataclass(frozen=True, slots=True)
class Row:
    """One setting: the swept values, bytes per rank (GPU) and node (CPU, NVMe), or the refusal."""

    values: tuple[Any, ...]
    gpu_bytes: int | None
    cpu_bytes: int | None
    nvme_bytes: int | None
    fits: bool | None
    refused: str | None = None


def parse_axis(text: str) -> tuple[str, tuple[Any, ...]]:
    """``micro-batch=1,2,4`` -> ("micro_batch", (1, 2, 4)). Raises DeploymentError."""
    name, found, values = text.partition("=")
    field = name.strip().lstrip("-").replace("-", "_")
    kinds = TrainingSetup.__annotations__
    if not found or field not in kinds or not values:
        raise DeploymentError(
            f"{text[:60]!r} is not FLAG=VALUE,VALUE", field="--sweep", hint="for example micro-batch=1,2,4"
        )
    kind = str(kinds[field])
    out: list[Any] = []
    for item in values.split(","):
        item = item.strip()
        if kind.startswith("int") or kind == "float":
            if not item.isdecimal():
                raise DeploymentError(f"{item[:40]!r} is not a number", field=f"--sweep {name}")
            out.append(int(item))
        elif kind == "bool":
            if item not in ("true", "false"):
                raise DeploymentError(f"{item[:40]!r} is not true or false", field=f"--sweep {name}")
            out.append(item == "true")
        else:
            out.append(item)
    return field, tuple(out)


def sweep(planner: Planner, setup: TrainingSetup, axes: list[tuple[str, tuple[Any, ...]]]) -> Iterator[Row]:
    """Every combination; a combination that contradicts itself is a row with its refusal."""
    count = 1
    for _, values in axes:
        count *= len(values)
    if count > MAX_SETTINGS:
        raise DeploymentError(f"{count:,} settings are more than {MAX_SETTINGS:,}", field="--sweep")
    names = [name for name, _ in axes]
    for values in itertools.product(*(values for _, values in axes)):
        try:
            plan = planner.plan(replace(setup, **dict(zip(names, values, strict=True))), brief=True)
        except TonnageError as error:
            yield Row(values, None, None, None, None, str(error))
            continue
        yield Row(values, plan.total(), plan.total("cpu"), plan.total("nvme"), plan.fits)
