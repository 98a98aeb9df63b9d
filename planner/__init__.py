"""Memory planner for language models, from a model's config to tensors, bytes and KV cache capacity.

The planner imports no torch, transformers or numpy. Example:

    from tonnage.planner import plan found = plan("demo", gpu="h100-80g", max_model_len=8192) found.fits,
    found.rank.weights_bytes, found.kv_cache.tokens

The names below are the public interface and stay importable from here; the modules that define them may move.
Each name is imported on first access, so that a command loads only what it uses.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tonnage.planner.api import plan as plan
    from tonnage.planner.deployment import Deployment as Deployment
    from tonnage.planner.errors import CheckpointError as CheckpointError
    from tonnage.planner.errors import ConfigError as ConfigError
    from tonnage.planner.errors import DeploymentError as DeploymentError
    from tonnage.planner.errors import ModelNotFound as ModelNotFound
    from tonnage.planner.errors import TonnageError as TonnageError
    from tonnage.planner.errors import UnsupportedArchitecture as UnsupportedArchitecture
    from tonnage.planner.output.json import plan_to_dict as plan_to_dict
    from tonnage.planner.planning.build import make_plan as make_plan
    from tonnage.planner.plans import KVCachePlan as KVCachePlan
    from tonnage.planner.plans import ModelInfo as ModelInfo
    from tonnage.planner.plans import Plan as Plan
    from tonnage.planner.plans import RankPlan as RankPlan
    from tonnage.planner.plans import Term as Term
else:  # Type checkers must not see __getattr__, because with it they accept any name.
    _HOME = {
        "plan": "api",
        "make_plan": "planning.build",
        "CheckpointError": "errors",
        "ConfigError": "errors",
        "DeploymentError": "errors",
        "ModelNotFound": "errors",
        "TonnageError": "errors",
        "UnsupportedArchitecture": "errors",
        "Deployment": "deployment",
        "KVCachePlan": "plans",
        "ModelInfo": "plans",
        "Plan": "plans",
        "RankPlan": "plans",
        "Term": "plans",
        "plan_to_dict": "output.json",
    }
    __all__ = list(_HOME)

    def __getattr__(name: str) -> object:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        found = globals()[name] = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *_HOME})
