"""Speculative decoding: the weights of the draft model and its layers in the shared KV pool."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tonnage.planner.deployment import Deployment
from tonnage.planner.engines.registry import engine_of
from tonnage.planner.errors import DeploymentError
from tonnage.planner.families.registry import build_architecture
from tonnage.planner.headers.hub import endpoint
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.dtypes import ELEMENT_BYTES
from tonnage.planner.planning import eagle
from tonnage.planner.planning.mtp import mtp_draft, streams_of
from tonnage.planner.planning.stages import rank_architecture
from tonnage.planner.planning.weights import sum_weights
from tonnage.planner.plans import Drafting, Resolved
from tonnage.planner.quantization.read import read_quantization
from tonnage.planner.quantization.scheme import Quantization
from tonnage.planner.source.resolve import ModelSource, resolve_model

OWN_LAYERS = "mtp"


@dataclass(frozen=True, slots=True)
class Draft:
    """A draft model for speculative decoding, together with its target model.

    Attributes:
        architecture: the target model, with the draft's KV cache layers appended to its own.
        weights: bytes of the draft's weights on one rank.
        high: upper bound of these bytes.
        notes: notes for the plan.
        drafting: the draft's tensors on one rank, and the hidden states that it reads; None without a draft.
    """

    architecture: Architecture
    weights: int = 0
    high: int = 0
    notes: tuple[str, ...] = ()
    drafting: Drafting | None = None


def add_draft(source: ModelSource, architecture: Architecture, flags: Deployment) -> Draft:
    """Return the draft model of --speculative-model, with its weight bytes and its KV cache layers.

    Raises:
        TonnageError: the draft is invalid; the error names the flag or config field.
    """
    name = flags.speculative_model
    if name is None:
        return Draft(architecture)
    if not engine_of(flags.engine).drafts:
        raise DeploymentError(f"{flags.engine} drafts are not planned", field="--speculative-model",
                              hint="use --engine vllm")  # fmt: skip
    if name == OWN_LAYERS:
        own = mtp_draft(
            architecture, source.config, source.tensors if source.kind != "gguf" else None,
            flags.num_speculative_tokens, flags.pipeline_parallel_size,
        )  # fmt: skip
        quantization = read_quantization(source.config, flags.quantization)
        return _on_rank(architecture, own, quantization, flags, follows=streams_of(architecture, source.config))
    draft = _draft_source(name)
    quantization = read_quantization(draft.config, None)
    if eagle.is_eagle(draft.config, name):
        made = eagle.eagle_draft(draft.config, name, architecture, draft.tensors)
        # The draft's rotary table has the target model's length
        # (_maybe_override_draft_max_position_embeddings).
        longest = max(made.architecture.max_model_len, flags.max_model_len or architecture.max_model_len)
        own = replace(made.architecture, max_model_len=longest)
        found = _on_rank(architecture, own, quantization, flags, follows=1, reads=made.reads)
        found = replace(found, notes=(engine_of(flags.engine).draft_note(made.method),))
        if made.optional is None:
            return found
        more = made.optional.elements * ELEMENT_BYTES[flags.dtype] // flags.tensor_parallel_size
        note = "the draft stores an embedding: it is held beside the model's own only if a value differs"
        return replace(found, high=found.high + more, notes=(*found.notes, note))
    other = build_architecture(draft.config)
    if other.vocab_size != architecture.vocab_size:
        raise DeploymentError(
            f"the draft's vocabulary of {other.vocab_size:,} is not the model's {architecture.vocab_size:,}",
            field="--speculative-model",
            hint="name a draft with the model's tokenizer",
        )
    return _on_rank(architecture, other, quantization, flags)


_FETCHED: dict[tuple[str, str], ModelSource] = {}


def _draft_source(name: str) -> ModelSource:
    """Return the source (config and tensor headers) of the draft model `name`, cached for hub models.

    Without the cache, one plan would fetch the draft's files twice, and a table of plans would fetch them again
    for each plan.
    """
    known = name, endpoint()
    if known in _FETCHED:
        return _FETCHED[known]
    source = resolve_model(name)
    if source.kind == "hub" and source.path == source.id:
        _FETCHED[known] = source
    return source


# With these types of rotary scaling, vLLM can extend the draft's maximum length by computing a longer rotary
# table (_CACHE_ONLY_ROPE_TYPES in config/speculative.py, vLLM 0.33).
_EXTENDED = {"default", "linear", "llama3", "ntk", "proportional"}


def draft_limit(architecture: Architecture, chosen: Resolved) -> int | None:
    """Return the draft model's max_model_len if it limits the length of the engine's sequences, else None.

    The limit applies if it is below the target model's max_model_len and the engine does not extend the draft.
    Source: VllmConfig._limit_max_model_len_to_draft, vLLM 0.33. Raises the errors that `add_draft` raises.
    """
    flags = chosen.flags
    name = flags.speculative_model
    if name is None or name == OWN_LAYERS or not engine_of(flags.engine).draft_limits(chosen.version):
        return None
    draft = _draft_source(name)
    if not eagle.is_eagle(draft.config, name):
        own = build_architecture(draft.config).max_model_len
    elif _rotary_types(draft.config) <= _EXTENDED:  # vLLM extends the draft's maximum length
        return None
    else:
        own = eagle.eagle_draft(draft.config, name, architecture, draft.tensors).architecture.max_model_len
    return own if own < chosen.max_model_len else None


def within_draft(architecture: Architecture, chosen: Resolved) -> tuple[Resolved, tuple[str, ...]]:
    """Return the flags with max_model_len limited to the draft model's, and a note about the limit."""
    limit = draft_limit(architecture, chosen)
    if limit is None:
        return chosen, ()
    note = f"max_model_len is {limit:,}, the draft's own, not {chosen.max_model_len:,}"
    return replace(chosen, max_model_len=limit, flags=replace(chosen.flags, max_model_len=limit)), (note,)


def _rotary_types(config: Mapping[str, Any]) -> set[object]:
    """Return the set of RoPE scaling types in a draft model's config."""
    layer = config.get("transformer_layer_config", config)
    found = layer.get("rope_parameters") or layer.get("rope_scaling") or {}
    nested = [value for value in found.values() if isinstance(value, Mapping)]
    return {each.get("rope_type", each.get("type", "default")) for each in nested or [found]}


def _on_rank(
    target: Architecture, draft: Architecture, quantization: Quantization, flags: Deployment, *,
    follows: int = 0, reads: int = 0,
) -> Draft:  # fmt: skip
    """Return the draft model as one rank holds it; pipeline parallelism does not divide its layers.

    `follows` and `reads` are the numbers of the target's hidden states that the draft reads per token: from the
    last layer, and from inner layers.
    """
    part = rank_architecture(draft, replace(flags, pipeline_parallel_size=1), 0)
    rounding = engine_of(flags.engine).allocator_rounding(part, quantization, flags)
    weights = sum_weights(part, quantization, flags).total + rounding
    moved = tuple(replace(layer, layer=target.layers + layer.layer) for layer in draft.cache_layers)
    both = replace(target, cache_layers=(*target.cache_layers, *moved))
    return Draft(both, weights, weights, drafting=Drafting(part, follows, reads))
