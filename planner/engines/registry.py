"""The engines by name, each imported on first use because a plan needs only one.

An engine's module is named after the engine, with an underscore for a dot or a dash, and defines ``ENGINE``.
"""

from __future__ import annotations

from importlib import import_module
from typing import get_args

from tonnage.planner.deployment import EngineName
from tonnage.planner.engines.base import Engine
from tonnage.planner.errors import DeploymentError, did_you_mean

ENGINES: tuple[str, ...] = get_args(EngineName)


def engine_of(name: str) -> Engine:
    """Return the object of the inference engine called ``name``, such as vllm.

    Raises:
        DeploymentError: ``name`` is not one of ENGINES.
    """
    if name not in ENGINES:
        raise DeploymentError(
            f"{name!r} is not one of {', '.join(ENGINES)}", field="--engine", hint=did_you_mean(name, ENGINES)
        )
    module = name.replace(".", "_").replace("-", "_")
    engine: Engine = import_module(f"tonnage.planner.engines.{module}").ENGINE
    return engine
