"""Speculative decoding: the draft's weights and its layers of the shared KV pool."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tonnage.planner.deployment import Deployment
from tonnage.planner.engines.registry import engine_of
from tonnage.planner.errors import DeploymentError
from tonnage.planner.families.registry import build_architecture
from tonnage.planner.headers.hub import endpoint
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.dtypes import ELEMENT_BYTES
from tonnage.planner.planning.stages import rank_architecture
from tonnage.planner.planning.weights import sum_weights
from tonnage.planner.plans import Drafting, Resolved
from tonnage.planner.quantization.read import read_quantization
from tonnage.planner.quantization.scheme import Quantization
from tonnage.planner.records import dataclass, replace
from tonnage.planner.source.resolve import ModelSource, resolve_model

OWN_LAYERS = "mtp"


@dataclass(frozen=True, slots=True)
class Draft:
    """``weights`` bytes of one rank, at most ``high``; ``architecture``: the target, the draft's cache layers
    behind its own; ``beside``: the draft as it runs."""

    architecture: Architecture
    weights: int = 0
    high: int = 0
    notes: tuple[str, ...] = ()
    beside: Drafting | None = None


def add_draft(source: ModelSource, architecture: Architecture, flags: Deployment) -> Draft:
    """Pool and weights with ``--speculative-model``. Raises TonnageError naming what is wrong with it."""
    name = flags.speculative_model
    if name is None:
        return Draft(architecture)
    if not engine_of(flags.engine).drafts:
        raise DeploymentError(f"{flags.engine} drafts are not planned", field="--speculative-model",
                              hint="use --engine vllm")  # fmt: skip
    if name == OWN_LAYERS:
        from tonnage.planner.planning.mtp import own_draft, streams_of

        own = own_draft(
            architecture, source.config, source.tensors if source.kind != "gguf" else None,
            flags.num_speculative_tokens, flags.pipeline_parallel_size,
        )  # fmt: skip
        return _held(
            architecture,
            own,
            read_quantization(source.config, flags.quantization),
            flags,
            follows=streams_of(architecture, source.config),
        )
    from tonnage.planner.planning import eagle

    draft = _found(name)
    quantization = read_quantization(draft.config, None)
    if eagle.is_eagle(draft.config, name):
        made = eagle.eagle_draft(draft.config, name, architecture, draft.tensors)
        # its rotary table is as long as the model's context (_maybe_override_draft_max_position_embeddings)
        longest = max(made.architecture.max_model_len, flags.max_model_len or architecture.max_model_len)
        own = replace(made.architecture, max_model_len=longest)
        found = _held(architecture, own, quantization, flags, follows=1, reads=made.reads)
        found = replace(found, notes=(engine_of(flags.engine).draft_note(made.method),))
        if made.optional is None:
            return found
        more = made.optional.elements * ELEMENT_BYTES[flags.dtype] // flags.tensor_parallel_size
        note = "the draft stores an embedding: it is held beside the model's own only if a value differs"
        return replace(found, high=found.high + more, notes=(*found.notes, note))
    other = build_architecture(draft.config)
    if other.vocab_size != architecture.vocab_size:
        raise DeploymentError(
            f"its vocabulary of {other.vocab_size:,} is not the model's {architecture.vocab_size:,}",
            field="--speculative-model",
        )
    return _held(architecture, other, quantization, flags)


_FETCHED: dict[tuple[str, str], ModelSource] = {}


def _found(name: str) -> ModelSource:
    """The draft. One whose files the hub was asked for is asked for once in a process: a plan needs it twice, a
    table for each of its rows."""
    known = name, endpoint()
    if known in _FETCHED:
        return _FETCHED[known]
    source = resolve_model(name)
    if source.kind == "hub" and source.path == source.id:
        _FETCHED[known] = source
    return source


# Rotary embeddings that a longer table extends (config/speculative.py _CACHE_ONLY_ROPE_TYPES, vLLM 0.33)
_EXTENDED = {"default", "linear", "llama3", "ntk", "proportional"}


def draft_limit(architecture: Architecture, chosen: Resolved) -> int | None:
    """The draft's own length where it is less than ``chosen`` has and the engine goes no further
    (VllmConfig._limit_max_model_len_to_draft, vLLM 0.33). Raises TonnageError as ``add_draft``."""
    flags = chosen.flags
    name = flags.speculative_model
    if name is None or name == OWN_LAYERS or not engine_of(flags.engine).draft_limits(chosen.version):
        return None
    from tonnage.planner.planning import eagle

    draft = _found(name)
    if not eagle.is_eagle(draft.config, name):
        own = build_architecture(draft.config).max_model_len
    elif _rotary_types(draft.config) <= _EXTENDED:  # shares the model's positions
        return None
    else:
        own = eagle.eagle_draft(draft.config, name, architecture, draft.tensors).architecture.max_model_len
    return own if own < chosen.max_model_len else None


def _rotary_types(config: Mapping[str, Any]) -> set[object]:
    layer = config.get("transformer_layer_config", config)
    found = layer.get("rope_parameters") or layer.get("rope_scaling") or {}
    nested = [value for value in found.values() if isinstance(value, Mapping)]
    return {each.get("rope_type", each.get("type", "default")) for each in nested or [found]}


def _held(
    target: Architecture, draft: Architecture, quantization: Quantization, flags: Deployment, *,
    follows: int = 0, reads: int = 0,
) -> Draft:  # fmt: skip
    """The draft's share of one rank: its layers are not divided over pipeline stages."""
    part = rank_architecture(draft, replace(flags, pipeline_parallel_size=1), 0)
    rounding = engine_of(flags.engine).allocator_rounding(part, quantization, flags)
    weights = sum_weights(part, quantization, flags).total + rounding
    moved = tuple(replace(layer, layer=target.layers + layer.layer) for layer in draft.cache_layers)
    both = replace(target, cache_layers=(*target.cache_layers, *moved))
    return Draft(both, weights, weights, beside=Drafting(part, follows, reads))
