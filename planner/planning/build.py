"""Entry points that compute the memory plan (`Plan`) of a model and a deployment, without loading the model."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Literal

from tonnage.planner.deployment import Deployment
from tonnage.planner.engines.registry import engine_of
from tonnage.planner.errors import printable
from tonnage.planner.flags import flags_of
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.planning.calibration import calibration_notes, read_calibration
from tonnage.planner.planning.checkpoint import against_index
from tonnage.planner.planning.deployment import memory_notes, version_notes
from tonnage.planner.planning.files import auto_dtype
from tonnage.planner.planning.host import host_memory, host_terms
from tonnage.planner.planning.size import Size, Sizer, request_law
from tonnage.planner.planning.terms import (
    environment_notes,
    kv_terms,
    other_terms,
    quantization_notes,
    quantized_terms,
)
from tonnage.planner.plans import KVCachePlan, ModelInfo, Plan
from tonnage.planner.source.resolve import ModelSource, resolve_model

PLANNER_RULES = "1"
"""Version of the planning rules, part of plan_id; it increases when the same inputs may give another plan."""


def make_plan(model: str, deployment: Deployment) -> Plan:
    """Return the memory plan of `model` (`demo`, a folder, a .gguf file or a hub id) for `deployment`.

    A deployment that does not fit also returns a plan, with `fits` False and the `reasons`.

    Raises:
        TonnageError: the model or a flag is not understood. The error is one of the subclasses ModelNotFound,
            ConfigError, CheckpointError, UnsupportedArchitecture or DeploymentError.
    """
    return plan_source(resolve_model(model), deployment)


def plan_source(source: ModelSource, deployment: Deployment, sizer: Sizer | None = None) -> Plan:
    """Return the memory plan of the model `source` for the flags `deployment`.

    Pass the same `sizer` for several plans of one source, so that its weights are summed once. The function
    raises the errors that `make_plan` raises.
    """
    sizer = sizer or Sizer(source)
    size = sizer.size(deployment)
    architecture, chosen, pool, worst = size.architecture, size.chosen, size.pool, size.worst
    flags, held = chosen.flags, size.held
    # bytes of CUDA graphs that the engine does not count in its memory budget
    extra_graphs = 0 if worst.runtime.beside is None else worst.runtime.beside.value
    law, no_law = request_law(size)
    terms = (
        *worst.weights.loaded.terms,
        *worst.runtime_terms(),
        *other_terms(worst.rank, flags),
        *quantized_terms(architecture, size.quantization, source.config, flags),
        *worst.weights.added_terms(),
        *kv_terms(pool, held.num_blocks, chosen, (size.bounds[0].num_blocks, size.bounds[1].num_blocks)),
    )
    # All ranks of a pipeline stage hold the same bytes.
    ranks = tuple(stage.rank for stage in size.stages for _ in range(flags.tensor_parallel_size))
    dtype = auto_dtype(source)
    file_notes: tuple[str, ...] = ()
    if source.index is not None:
        files, file_notes = against_index(architecture, source.index, source.config, dtype)
        terms = (*terms, *files)
    host, tiers = host_memory(source, dtype, architecture, chosen, size.stages, ranks, pool, held, size.bounds)
    if host is not None:
        terms = (*terms, *host_terms(host))
    return Plan(
        engine_name=engine_of(flags.engine).shown_name(flags),
        plan_id=_plan_id(sizer, flags),
        revision=0,
        model=_model_info(source, architecture, flags),
        deployment=flags,
        ranks=ranks,
        host=host,
        tiers=tiers,
        worst_rank=size.place * flags.tensor_parallel_size,
        kv_cache=KVCachePlan(
            layout=pool.layout,
            num_blocks=held.num_blocks,
            usable_blocks=held.usable_blocks,
            tokens=held.tokens,
            max_concurrency=held.max_concurrency,
            bytes_per_sequence=size.bytes_per_sequence,
            longest=size.longest,
            law=law,
            no_law=no_law,
        ),
        fits=not size.reasons,
        reasons=size.reasons,
        unsupported=size.support.refused,
        defaults=frozenset(
            name for name, flag in flags_of(Deployment).items() if getattr(deployment, name) == flag.default
        ),
        unknown=size.support.unknown,
        stops_with=None if size.failure is None or not size.reasons else size.failure.sentence,
        intervals=size.intervals(),
        terms=terms,
        weight_formats=worst.weights.loaded.formats,
        notes=(
            *source.notes,
            *_family_notes(architecture),
            *file_notes,
            *_margin_notes(size),
            *memory_notes(deployment),
            *pool.notes,
            *size.support.notes,
            *size.draft_notes,
            *version_notes(deployment, chosen),
            *engine_of(flags.engine).length_notes(chosen.max_model_len, architecture),
            *engine_of(flags.engine).start_notes(architecture, chosen, worst.rank, extra_graphs),
            *calibration_notes(chosen),
            *environment_notes(flags, deployment.gpu),
            *quantization_notes(source.config, deployment.quantization, flags.engine),
        ),
    )


def _family_notes(architecture: Architecture) -> tuple[str, ...]:
    """Return notes for the plan about unknown fields in config.json, and about an unknown model family."""
    if architecture.assumed:
        sizes = ", ".join(architecture.assumed)
        note = f"config.json leaves out {sizes}: these are the defaults of transformers' config class"
        return (note, *_family_notes(replace(architecture, assumed=())))
    if architecture.unread:
        names = printable(", ".join(architecture.unread))
        return (
            f"{names}: not known for {architecture.model_type}; the interval of the weights has room for "
            "biases and norms in every layer",
        )
    if architecture.via == "adapter":
        return ()
    return (
        f"no adapter for {architecture.model_type}: tensors and cache come from transformers' own modules, "
        "built on the meta device (via: meta)",
    )


def _margin_notes(size: Size) -> tuple[str, ...]:
    """Return a warning if the planned KV pool holds one sequence, but the pool's lower bound does not."""
    low = size.bounds[0]
    if size.reasons or low.blocks_per_sequence <= low.usable_blocks:
        return ()
    return (
        f"at the lower end of its interval the pool has {low.usable_blocks:,} usable blocks, and one sequence "
        f"of {size.chosen.max_model_len:,} tokens needs {low.blocks_per_sequence:,}: the engine may not start",
    )


def _model_info(source: ModelSource, architecture: Architecture, flags: Deployment) -> ModelInfo:
    """Return the plan's description of the model, with the source of its tensor shapes as `via`."""
    via: Literal["gguf", "adapter", "headers", "index", "meta"] = architecture.via
    if source.tensors is not None and via == "adapter":
        via = "adapter" if source.file_type else "gguf" if source.kind == "gguf" else "headers"
    elif source.index is not None and via == "adapter":
        via = "index"
    return ModelInfo(
        id=source.id,
        path=source.path,
        architecture=architecture.class_name,
        parameters=architecture.parameters,
        active_parameters=architecture.active_parameters,
        attention=architecture.attention,
        via=via,
        max_model_len=architecture.max_model_len,
        vocab_size=architecture.vocab_size,
        dtype=flags.dtype,
    )


def _plan_id(sizer: Sizer, flags: Deployment) -> str:
    """Return the plan's id: 16 hex digits of a SHA-256 over everything that determines the plan.

    The hash covers the config, the tensor headers, the flags, the planner's rules and the engine version.
    """
    content: list[object] = [asdict(flags), PLANNER_RULES, flags.engine, flags.engine_version]
    index = sizer.source.index
    if index is not None:
        content.append([sorted(index.files), index.total_bytes])
    if flags.calibration is not None:
        content.append(read_calibration(flags.calibration))
    whole = sizer.hash()
    # The hash so far is of an unclosed JSON list: the model's id, config and tensors (`Sizer.hash`). The flags
    # continue and close this list.
    whole.update(f", {json.dumps(content, sort_keys=True)[1:]}".encode())
    digest: str = whole.hexdigest()
    return digest[:16]
