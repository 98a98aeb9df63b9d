"""Speculative decoding: the draft's weights and its layers of the shared KV pool."""

from __future__ import annotations

from tonnage.planner.engines.registry import engine_of
from tonnage.planner.errors import DeploymentError
from tonnage.planner.families.registry import build_architecture
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.planning.stages import rank_architecture
from tonnage.planner.planning.weights import sum_weights
from tonnage.planner.plans import Deployment
from tonnage.planner.quantization.read import read_quantization
from tonnage.planner.records import dataclass, replace
from tonnage.planner.source.resolve import resolve_model

OWN_LAYERS = "mtp"
_MTP_NOTE = (
    "the weights of the checkpoint's own draft layers (mtp) are not counted: config.json does not list their "
    "tensors; their KV cache is"
)


@dataclass(frozen=True, slots=True)
class Draft:
    """``weights`` bytes of one rank; ``architecture``: the target, the draft's cache layers behind its own."""

    architecture: Architecture
    weights: int
    notes: tuple[str, ...] = ()


def add_draft(architecture: Architecture, flags: Deployment) -> Draft:
    """Pool and weights with ``--speculative-model``. Raises TonnageError naming what is wrong with it."""
    name = flags.speculative_model
    if name is None:
        return Draft(architecture, 0)
    engine = engine_of(flags.engine)
    if not engine.drafts:
        raise DeploymentError(f"{flags.engine} drafts are not planned", field="--speculative-model",
                              hint="use --engine vllm")  # fmt: skip
    if name == OWN_LAYERS:
        return Draft(architecture, 0, (_MTP_NOTE,))
    source = resolve_model(name)
    draft = build_architecture(source.config)
    if draft.vocab_size != architecture.vocab_size:
        raise DeploymentError(
            f"its vocabulary of {draft.vocab_size:,} is not the model's {architecture.vocab_size:,}",
            field="--speculative-model",
        )
    quantization = read_quantization(source.config, None)
    part = rank_architecture(draft, replace(flags, pipeline_parallel_size=1), 0)
    weights = sum_weights(part, quantization, flags).total + engine.allocator_rounding(
        part, quantization, flags
    )
    moved = tuple(replace(layer, layer=architecture.layers + layer.layer) for layer in draft.cache_layers)
    both = replace(architecture, cache_layers=(*architecture.cache_layers, *moved))
    return Draft(both, weights)
