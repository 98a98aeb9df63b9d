"""The planner's Python interface, whose function `plan` returns the plan that `tonnage plan` prints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any, Concatenate, ParamSpec

from tonnage.planner.deployment import Deployment
from tonnage.planner.engines.registry import engine_of
from tonnage.planner.errors import TonnageError, UnsupportedArchitecture
from tonnage.planner.flags import flags_of
from tonnage.planner.planning.advice import advise
from tonnage.planner.planning.build import plan_source
from tonnage.planner.planning.deployment import canonical_values, deployment_of
from tonnage.planner.planning.files import with_file_type
from tonnage.planner.planning.size import Sizer
from tonnage.planner.plans import Plan
from tonnage.planner.source.resolve import ModelSource, resolve_model

_Fields = ParamSpec("_Fields")


def _takes(
    made: Callable[_Fields, Deployment],
) -> Callable[[Callable[..., Plan]], Callable[Concatenate[str, _Fields], Plan]]:
    """Return a decorator that gives a function a typed signature for type checkers and editors.

    The signature is the parameter `model`, followed by the parameters of the callable `made`. At run time the
    function is unchanged.
    """
    return lambda function: function


@_takes(Deployment)
def plan(model: str, **fields: Any) -> Plan:
    """Plan the memory of a model and its KV cache before anything loads.

    Fields that are left out get the defaults of `tonnage plan`. The default engine is vllm if a GPU or an
    engine version is given, else hf. By default, a draft model drafts one token per step.

    Args:
        model: `demo`, a folder, a .gguf file or a hub id.
        **fields: fields of `Deployment`, named as vLLM's flags with underscores; sizes are in bytes.

    Returns:
        The plan. If it does not fit, `fits` is False, `reasons` says why and `advice` lists changes that make
            it fit.

    Raises:
        ModelNotFound: `model` is no folder, file or reachable hub id.
        ConfigError: config.json is broken, incomplete or contradictory.
        CheckpointError: a weight file's header is broken.
        UnsupportedArchitecture: the planner does not support the model or one of its config fields.
        DeploymentError: a field has an invalid value or contradicts another one.
        TypeError: a keyword is no field of `Deployment`.
    """
    fields, flags = canonical_values(fields), flags_of(Deployment)
    for name in fields.keys() & flags.keys():  # a Python caller's value may have any type
        flags[name].check(fields[name], "--" + name.replace("_", "-"))
    return plan_or_advise(resolve_model(model), deployment_of(fields, model), engine_given="engine" in fields)


@lru_cache(1)  # The web page plans the same model many times with different flags.
def _sizer_of(source: ModelSource) -> Sizer:
    """Return the `Sizer` of a model, which computes the memory of the model under several deployments.

    The `Sizer` of the most recent model is cached.
    """
    return Sizer(source)


def plan_or_advise(source: ModelSource, deployment: Deployment, *, engine_given: bool = True) -> Plan:
    """Plan a deployment; if it does not fit, add advice: single flag changes that make it fit.

    If the default engine does not serve the model, the plan is for the engine's fallback engine. A note of the
    plan then names the fallback engine.

    Args:
        source: the model's config and tensor headers.
        deployment: the requested flags.
        engine_given: whether the caller chose the engine; if so, no fallback engine is tried.

    Raises:
        TonnageError: the model or the flags are not supported.
    """
    source, deployment = with_file_type(source, deployment)
    sizer = _sizer_of(source)
    try:
        found = plan_source(source, deployment, sizer)
    except UnsupportedArchitecture as error:
        fallback = engine_of(deployment.engine).fallback
        if engine_given or fallback is None:
            raise
        why = f"the {deployment.engine} engine, the default, does not serve this model ({error.message}): "
        deployment = replace(deployment, engine=fallback)
        try:
            found = plan_source(source, deployment, sizer)
        except TonnageError:
            raise error from None
        found = replace(found, notes=(f"{why}planned for {fallback}", *found.notes))
    engine = engine_of(found.deployment.engine)
    if not engine_given and engine.keeps_gguf:
        why = f"planned for {engine.title}, as the model is a GGUF file; --engine vllm plans for another engine"
        found = replace(found, notes=(why, *found.notes))
    if found.fits:
        return found
    return replace(found, advice=advise(source, deployment, sizer))
