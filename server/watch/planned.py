"""The plan for a watched server, made from its facts and the flags given by the user."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from tonnage.planner.deployment import Deployment, EngineName
from tonnage.planner.errors import DeploymentError, ModelNotFound, TonnageError, UnsupportedArchitecture
from tonnage.planner.flags import flags_of
from tonnage.planner.planning.build import plan_source
from tonnage.planner.planning.deployment import deployment_of
from tonnage.planner.planning.size import Sizer
from tonnage.planner.plans import Plan
from tonnage.planner.source.resolve import ModelSource, resolve_model
from tonnage.server.engines.capacity import limits_of
from tonnage.server.observe.memory_report import planned_components
from tonnage.server.observe.metrics.memory import device_name
from tonnage.server.watch.records import PlanSummary, ServerFacts

ENGINES: dict[str, EngineName] = {"vLLM": "vllm", "SGLang": "sglang", "llama.cpp": "llama.cpp"}

# When the device is unknown, the planner gets a CUDA device with so much memory that every plan fits. Figures
# that depend on the device are then left out.
_ANY_DEVICE = {"device": "cuda", "device_memory": 1 << 50}
_DECIDE_THE_POOL = ("kv_cache_memory_bytes", "num_gpu_blocks_override")


def plan_of(
    facts: ServerFacts, given: Mapping[str, Any], model: str | None
) -> tuple[PlanSummary | None, tuple[str, ...]]:
    """Return the plan for a watched server, and notes for the user.

    The plan is None for a model that the planner does not support.

    Args:
        facts: the model and settings that the server reports.
        given: fields of the Deployment that the user sets on the command line.
        model: the server's model as a path or hub id on this machine; None uses the path or id that the server
            reports.

    Raises:
        DeploymentError: a flag contradicts a setting that the server reports.
        ModelNotFound: the server's model is not found on this machine, so --model is needed.
    """
    flags, notes = _merged(facts, given)
    if missing := [name for name in facts.assumed if name not in given]:
        options = ", ".join(flags_of(Deployment)[name].option for name in missing)
        notes.append(f"{facts.title} does not report {options}: planned with its defaults unless given")
    source = _source(facts, model)
    known = "gpu" in flags or "device_memory" in flags or flags.get("device") == "cpu"
    if not known:
        notes.append(
            "the device is not known: the plan has only the weights, and a pool whose size a flag sets; "
            "--gpu NAME, or --gpu cpu, adds the rest"
        )
        flags |= _ANY_DEVICE
    try:
        plan = _plan(source, flags)
    except UnsupportedArchitecture as error:
        return None, (*notes, f"without a plan: {error}")
    deployment = plan.deployment
    components = planned_components(plan)
    sized = known or facts.title == "llama.cpp" or any(name in flags for name in _DECIDE_THE_POOL)
    hidden = set(facts.hidden)
    if not known:
        hidden |= components.keys() - {"weights", "kv_pool"}
    if not sized:
        hidden.add("kv_pool")
    if hidden:
        hidden.add("free")
    layout, cache = plan.kv_cache.layout, plan.kv_cache
    blocks, tokens = cache.num_blocks, cache.tokens
    if facts.most_tokens is not None and facts.most_tokens < tokens:
        blocks, tokens = facts.most_tokens // layout.block_size, facts.most_tokens
        components |= {"kv_pool": blocks * layout.bytes_per_block}
        hidden.add("free")
    if not plan.fits:
        notes += [f"the plan does not fit: {reason}" for reason in plan.reasons]
    return PlanSummary(
        plan_id=plan.plan_id,
        model=plan.model.id,
        architecture=plan.model.architecture,
        engine=deployment.engine,
        quantization=deployment.quantization or "none",
        device=device_name(plan, plan.worst_rank),
        components={name: size for name, size in components.items() if name not in hidden},
        block_size=layout.block_size,
        bytes_per_block=layout.bytes_per_block,
        max_model_len=deployment.max_model_len,
        num_blocks=None if "kv_pool" in hidden else blocks,
        tokens=None if "kv_pool" in hidden else tokens,
        replicas=deployment.data_parallel_size,
        limits=limits_of(plan),
    ), (*notes, *plan.notes)


def _merged(facts: ServerFacts, given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    flags: dict[str, Any] = {"engine": ENGINES[facts.title]}
    notes = list(facts.notes)
    for name, value in facts.flags.items():
        flag = flags_of(Deployment)[name]
        try:
            flag.check(value)
        except DeploymentError as error:
            notes.append(f"reported setting ignored: {error}")
            continue
        if value is not None:
            flags[name] = value
    for name, value in given.items():
        if flags.get(name, value) != value:
            raise DeploymentError(
                f"{facts.title} runs with {flags[name]}, not with {value}",
                field=flags_of(Deployment)[name].option,
                hint="leave it out",
            )
        flags[name] = value
    # drop the device that the server reports, because the GPU's name given by the user implies it
    if "gpu" in given and flags.get("device") == "cuda":
        del flags["device"]
    if facts.version is not None and "engine_version" not in given and facts.title == "vLLM":
        flags["engine_version"] = facts.version
    return flags, notes


def _source(facts: ServerFacts, model: str | None) -> ModelSource:
    if model is None and facts.model is None:
        raise ModelNotFound(
            "the server does not report its model", field="--model", hint="give the model's path or hub id"
        )
    try:
        return resolve_model(model or cast(str, facts.model))
    except ModelNotFound as error:
        if model is not None:
            raise
        raise ModelNotFound(
            f"the server's model is not found on this machine: {error.message}",
            field="--model",
            hint="give a folder with its config.json, a .gguf file or a hub id",
        ) from None


def _plan(source: ModelSource, flags: Mapping[str, Any]) -> Plan:
    """Return the memory plan for a watched server's flags.

    The server's block size is passed to the planner only if it differs from the engine's default. An engine
    that derives the block size from the model may interpret a given size differently.
    """
    own = {name: value for name, value in flags.items() if name != "block_size"}
    sizer = Sizer(source)
    plan = plan_source(source, _deployment(own), sizer)
    if flags.get("block_size", plan.kv_cache.layout.block_size) != plan.kv_cache.layout.block_size:
        plan = plan_source(source, _deployment(flags), sizer)
    return plan


def _deployment(flags: Mapping[str, Any]) -> Deployment:
    try:
        return deployment_of(flags)
    except TonnageError:
        if "engine_version" not in flags:
            raise
        return deployment_of({name: value for name, value in flags.items() if name != "engine_version"})
