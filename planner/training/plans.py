"""Result types of training planning: a `TrainingPlan` and its lines.

A plan has the bytes of one rank on GPU, CPU and NVMe, whether they fit, and the network traffic of a step.
`tonnage.planner.training.build.Planner` makes plans.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tonnage.planner.training.communication import Communication
from tonnage.planner.training.precision import Convention
from tonnage.planner.training.setup import TrainingSetup

SCHEMA_VERSION = 1

Place = Literal["gpu", "cpu", "nvme"]


@dataclass(frozen=True, slots=True)
class Line:
    """One component of a training plan, such as gradients or the CUDA context, and its bytes.

    Attributes:
        place: memory that holds the component: `gpu`, `cpu` or `nvme`.
        bytes: planned bytes, per rank on the GPU and per node on CPU and NVMe.
        low: lower bound of `bytes`.
        high: upper bound of `bytes`.
        formula: text that explains `bytes`.
        source: flag or source file behind the formula.
    """

    name: str
    place: Place
    bytes: int
    low: int
    high: int
    formula: str
    source: str


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """The memory plan of one training setup, for the rank that needs most memory.

    Attributes:
        length: sequence length in tokens.
        parameters: number of parameters of the base model.
        trainable: number of trained parameters, adapters included.
        adapters: number of adapter parameters.
        lines: the components; CPU and NVMe lines count all ranks of a node.
        moment: the moment of a step at which GPU memory peaks.
        stage: pipeline stage of the planned rank.
        fits: whether the plan fits, None if no memory size was given.
        reasons: the reasons why the plan does not fit.
        cpu_init_bytes: bytes of a node's CPU memory while its ranks build the model.
    """

    model: str
    architecture: str
    setup: TrainingSetup
    length: int
    convention: Convention
    parameters: int
    trainable: int
    adapters: int
    lines: tuple[Line, ...]
    moment: str
    stage: int
    communication: Communication
    fits: bool | None
    reasons: tuple[str, ...]
    notes: tuple[str, ...]
    cpu_init_bytes: int

    def total(self, place: Place = "gpu") -> int:
        """Return a training plan's total bytes in one memory: `gpu` per rank, `cpu` or `nvme` per node."""
        return sum(line.bytes for line in self.lines if line.place == place)

    def bounds(self, place: Place = "gpu") -> tuple[int, int]:
        """Return the lower and upper bound of a training plan's total bytes on `gpu`, `cpu` or `nvme`."""
        lines = [line for line in self.lines if line.place == place]
        return sum(line.low for line in lines), sum(line.high for line in lines)

    def line(self, name: str, place: Place = "gpu") -> int:
        """Return the planned bytes of the component `name` on `place` (gpu, cpu or nvme), 0 if it is absent."""
        return sum(line.bytes for line in self.lines if line.name == name and line.place == place)
