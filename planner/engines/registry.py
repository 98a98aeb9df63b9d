"""The engines by name, each imported when it is asked for: a plan needs one."""

from __future__ import annotations

from importlib import import_module

from tonnage.planner.engines.base import Engine
from tonnage.planner.errors import DeploymentError

# --engine -> the module here that has its ``ENGINE``
_MODULES = {"hf": "hf", "vllm": "vllm.engine", "sglang": "sglang", "llama.cpp": "llama_cpp"}
ENGINES = tuple(_MODULES)


def engine_of(name: str) -> Engine:
    """Raises DeploymentError for a name that is none of ENGINES."""
    if name not in _MODULES:
        raise DeploymentError(f"{name!r} is not one of {', '.join(ENGINES)}", field="--engine")
    engine: Engine = import_module(f"tonnage.planner.engines.{_MODULES[name]}").ENGINE
    return engine
