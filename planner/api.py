"""The planner from Python: ``plan`` answers as ``tonnage plan`` does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Concatenate, ParamSpec

from tonnage.planner.deployment import Deployment
from tonnage.planner.engines.registry import engine_of
from tonnage.planner.errors import TonnageError, UnsupportedArchitecture
from tonnage.planner.flags import flags_of
from tonnage.planner.planning.build import plan_source
from tonnage.planner.planning.deployment import deployment_of, spelled
from tonnage.planner.planning.size import Sizer
from tonnage.planner.plans import Plan
from tonnage.planner.source.resolve import ModelSource, resolve_model

_Fields = ParamSpec("_Fields")


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
    fields, flags = spelled(fields), flags_of(Deployment)
    for name in fields.keys() & flags.keys():  # a command line can give text alone, Python anything
        flags[name].check(fields[name], "--" + name.replace("_", "-"))
    return plan_or_advise(resolve_model(model), deployment_of(fields), engine_given="engine" in fields)


_last: list[Sizer] = []


def _sizer_of(source: ModelSource) -> Sizer:
    """The last one again for the very same source, as in a browser, which keeps it."""
    if not _last or _last[0].source is not source:
        _last[:] = [Sizer(source)]
    return _last[0]


def plan_or_advise(source: ModelSource, deployment: Deployment, *, engine_given: bool = True) -> Plan:
    """The plan; one that does not fit says in ``advice`` which single changes would make it fit. A model that
    the default engine does not serve is planned for the one that does, and a note says so."""
    sizer = _sizer_of(source)
    try:
        found = plan_source(source, deployment, sizer)
    except UnsupportedArchitecture as error:
        elsewhere = engine_of(deployment.engine).elsewhere
        if engine_given or elsewhere is None:
            raise
        why = f"the {deployment.engine} engine, the default, does not serve this model ({error.message}): "
        deployment = replace(deployment, engine=elsewhere)
        try:
            found = plan_source(source, deployment, sizer)
        except TonnageError:
            raise error from None
        found = replace(found, notes=(f"{why}planned for {elsewhere}", *found.notes))
    if found.fits:
        return found
    from tonnage.planner.planning.advice import advise  # only where it is needed: a plan that fits takes 50 ms

    return replace(found, advice=advise(source, deployment, sizer))
