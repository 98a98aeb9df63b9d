"""Search for the largest micro-batch or sequence length of a training setup that fits into memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tonnage.planner.errors import DeploymentError, DoesNotFit
from tonnage.planner.training.build import Planner
from tonnage.planner.training.plans import TrainingPlan
from tonnage.planner.training.setup import TrainingSetup

FIELDS = ("micro_batch", "sequence_length")
_CEILING = 1 << 24
# Tensor cores are fastest with sizes that are multiples of 8, or on an A100 multiples of 64 (NVIDIA's matrix
# multiplication guide).
MULTIPLE = 8


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest micro-batch or sequence length with which a training setup fits into memory.

    Attributes:
        field: the searched field, `micro_batch` or `sequence_length`.
        value: the largest value that fits.
        aligned: `value` rounded down to a multiple of 8, None if the result is 0.
        plan: the training plan with `value`.
    """

    field: str
    value: int
    aligned: int | None
    plan: TrainingPlan


def largest(planner: Planner, setup: TrainingSetup, field: str) -> Largest:
    """Return the largest `micro_batch` or `sequence_length` with which a training setup fits into memory.

    Raises:
        DeploymentError: if no device memory was given.
        DoesNotFit: if even the value 1 does not fit; the message has the figures.
    """
    if setup.device_memory is None:
        raise DeploymentError(
            "the search needs the device's memory", field="--device-memory", hint="or --gpu NAME"
        )
    ceiling = planner.model.architecture.max_model_len if field == "sequence_length" else _CEILING

    def planned(value: int) -> TrainingPlan:
        """Return the training plan with `value` in the searched field."""
        return planner.plan(replace(setup, **{field: value}))  # type: ignore[arg-type]

    best = planned(1)
    if not best.fits:
        raise DoesNotFit(
            f"not even {field.replace('_', ' ')} 1 fits: {best.reasons[0]}", field="--find",
            hint="--tricks shows changes that make it fit",
        )  # fmt: skip
    low, high = 1, 2
    while high <= ceiling and (found := planned(high)).fits:
        low, best, high = high, found, high * 2
    high = min(high, ceiling + 1)
    while high - low > 1:
        middle = (low + high) // 2
        found = planned(middle)
        if found.fits:
            low, best = middle, found
        else:
            high = middle
    return Largest(field, low, low // MULTIPLE * MULTIPLE or None, best)
