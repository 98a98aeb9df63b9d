"""The planner from Python: ``plan`` answers as ``tonnage plan`` does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Concatenate, NoReturn, ParamSpec

from tonnage.planner.errors import DeploymentError
from tonnage.planner.planning.build import plan_source
from tonnage.planner.plans import Deployment, Plan, default_engine
from tonnage.planner.records import replace
from tonnage.planner.source.model_source import ModelSource
from tonnage.planner.source.resolve import resolve_model

_Fields = ParamSpec("_Fields")

# What the annotations of Deployment's fields stand for
_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "EngineName": (str,),
    "bool": (bool,),
    "None": (type(None),),
}
# A flag without the one that gives it a meaning changes nothing: what the user wanted is not what is planned.
_NEEDS = (
    ("max_loras", "enable_lora"),
    ("max_lora_rank", "enable_lora"),
    ("num_speculative_tokens", "speculative_model"),
)
_ENGINES_OWN = {
    "mem_fraction_static": "sglang",
    "swa_full_tokens_ratio": "sglang",
    "num_gpu_blocks_override": "vllm",
    "decode_context_parallel_size": "vllm",
}


def _takes(
    made: Callable[_Fields, Deployment],
) -> Callable[[Callable[..., Plan]], Callable[Concatenate[str, _Fields], Plan]]:
    """For type checkers and editors: the model, then what ``made`` takes."""
    return lambda function: function


@_takes(Deployment)
def plan(model: str, **fields: Any) -> Plan:
    """Plan ``model`` (``demo``, a folder, a .gguf file or a hub id) before anything loads.

    ``fields``: those of `Deployment`, by keyword: vLLM's flags with underscores, sizes in bytes. What is left
    out is chosen as ``tonnage plan`` chooses it: engine vllm with a GPU or a version, else hf; with a draft
    model one token drafted a step. A plan that does not fit has ``fits`` False, ``reasons``, and in ``advice``
    what would make it fit.

    Raises TonnageError subclasses for what is not understood: ModelNotFound, ConfigError, CheckpointError,
    UnsupportedArchitecture, DeploymentError; TypeError for a keyword that is no field.
    """
    given = dict(fields)
    fields.setdefault("engine", default_engine(fields.get("gpu"), fields.get("engine_version")))
    if fields.get("speculative_model") is not None:
        fields.setdefault("num_speculative_tokens", 1)
    deployment = Deployment(**fields)
    _check_types(given)
    check_given({name: value for name, value in given.items() if value is not None}, deployment)
    return plan_or_advise(resolve_model(model), deployment)


def _check_types(given: Mapping[str, object]) -> None:
    """A command line can give text alone, Python anything."""
    for name, value in given.items():
        wanted = Deployment.__annotations__[name]
        if not isinstance(value, tuple(_TYPES[kind] for kind in wanted.split(" | "))):
            raise DeploymentError(f"{value!r} is not {wanted}", field="--" + name.replace("_", "-"))


def plan_or_advise(source: ModelSource, deployment: Deployment) -> Plan:
    """The plan; one that does not fit says in ``advice`` which single changes would make it fit."""
    found = plan_source(source, deployment)
    if found.fits:
        return found
    from tonnage.planner.planning.advice import advise  # only where it is needed: a plan that fits takes 50 ms

    return replace(found, advice=advise(source, deployment))


def check_given(given: Mapping[str, object], deployment: Deployment) -> None:
    """Raise DeploymentError where a flag means nothing without another one, belongs to another engine or
    contradicts the GPU. ``given``: name -> value of the fields of ``deployment`` that somebody gave."""

    def refuse(name: str, why: str, hint: str | None = None) -> NoReturn:
        raise DeploymentError(why, field="--" + name.replace("_", "-"), hint=hint)

    for name, other in _NEEDS:
        if name in given and not given.get(other):
            refuse(name, f"means nothing without --{other.replace('_', '-')}")
    for name, engine in _ENGINES_OWN.items():
        if name in given and deployment.engine != engine:
            refuse(name, f"is a setting of {engine}, not of {deployment.engine}", f"--engine {engine}")
    if "device" in given and deployment.gpu is not None:
        from tonnage.planner.devices.find import find_gpu  # reads the catalogue

        gpu = find_gpu(deployment.gpu)
        if deployment.device != gpu.device:
            why = f"{deployment.device} contradicts --gpu {gpu.name}, which is {gpu.device}"
            refuse("device", why, "leave it out")
