"""The other direction: the largest micro-batch or sequence that fits."""

from __future__ import annotations

from tonnage.planner.errors import DeploymentError, DoesNotFit
from tonnage.planner.records import dataclass, replace
from tonnage.planner.training.build import Planner
from tonnage.planner.training.plans import TrainingPlan
from tonnage.planner.training.setup import TrainingSetup

FIELDS = ("micro_batch", "sequence_length")
_CEILING = 1 << 24


@dataclass(frozen=True, slots=True)
class Largest:
    """``value``: the largest that fits; ``aligned``: rounded down to a multiple of ``multiple`` (tensor cores
    work on tiles of 8, on A100 of 64: NVIDIA's matrix multiplication guide), None when below it."""

    field: str
    value: int
    aligned: int | None
    multiple: int
    plan: TrainingPlan


def largest(planner: Planner, setup: TrainingSetup, field: str, multiple: int = 8) -> Largest:
    """The largest ``micro_batch`` or ``sequence_length`` that fits into the memory given.

    Raises DeploymentError when no memory was given, DoesNotFit with the numbers when not even 1 fits.
    """
    if setup.device_memory is None:
        raise DeploymentError("a device is needed to search", field="--device-memory", hint="or --gpu NAME")
    ceiling = planner.model.architecture.max_model_len if field == "sequence_length" else _CEILING

    def fits(value: int) -> TrainingPlan | None:
        plan = planner.plan(replace(setup, **{field: value}))  # type: ignore[arg-type]
        return plan if plan.fits else None

    best = fits(1)
    if best is None:
        plan = planner.plan(replace(setup, **{field: 1}))  # type: ignore[arg-type]
        raise DoesNotFit(
            f"not even {field.replace('_', ' ')} 1 fits: {plan.reasons[0]}", field="--find",
            hint="--tricks shows what would",
        )  # fmt: skip
    low, high = 1, 2
    while high <= ceiling and (found := fits(high)):
        low, best, high = high, found, high * 2
    high = min(high, ceiling + 1)
    while high - low > 1:
        middle = (low + high) // 2
        found = fits(middle)
        if found:
            low, best = middle, found
        else:
            high = middle
    return Largest(field, low, low // multiple * multiple or None, multiple, best)
