"""The description of a model for training plans: its tensors, and the operations of its layers (`Recipe`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from tonnage.planner.errors import UnsupportedArchitecture
from tonnage.planner.families.registry import build_architecture, family_of
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.recipe import Recipe
from tonnage.planner.source.resolve import resolve_model
from tonnage.planner.training.activations import ShapeSum, bare_recipe, shape_sums, taped


@dataclass(frozen=True)
class TrainingModel:
    """The training planner's description of a model.

    Attributes:
        id: name of the model.
        architecture: the model's tensors and dimensions, which the serving planner uses as well.
        recipe: the model's layers as operations; None if activations are not planned (encoder-decoder models).
        estimated: sums of tensor shapes of a decoder whose layers have no recipe, empty otherwise.
        notes: notes on where the config comes from, if it is not the model's own config.json.
    """

    id: str
    architecture: Architecture
    recipe: Recipe | None
    estimated: tuple[ShapeSum, ...] = ()
    notes: tuple[str, ...] = ()

    @cached_property
    def tied(self) -> bool:
        """Return whether the model has tied tensors, such as embedding and head."""
        return any(t.tied_to is not None for t in self.architecture.tensors)

    @cached_property
    def windows(self) -> tuple[int, ...]:
        """Return the sliding window of each layer in tokens, 0 for full attention."""
        out = [0] * self.architecture.layers
        for layer in self.architecture.cache_layers:
            if layer.window:
                out[layer.layer] = layer.window
        return tuple(out)

    def attention(self, asked: str) -> str:
        """Return the requested attention implementation (`asked`) if the model supports it, else `eager`."""
        return asked if asked in family_of(self.architecture.model_type).attentions else "eager"

    def masked(self, length: int) -> tuple[bool, ...]:
        """Return for each layer whether it needs an explicit attention mask for sequences of `length` tokens.

        A layer needs one if its sliding window is shorter than the sequence.
        """
        return tuple(0 < window < length for window in self.windows)


def model_from(id: str, architecture: Architecture) -> TrainingModel:
    """Return the training planner's description of a model.

    If the family has no `Recipe` of its layers' operations, activations are estimated from tensor shapes.
    """
    recipe = architecture.recipe
    if taped(recipe):
        return TrainingModel(id, architecture, recipe)
    if not architecture.cache_layers or any(t.role == "encoder" for t in architecture.tensors):
        return TrainingModel(id, architecture, None)
    return TrainingModel(id, architecture, bare_recipe(architecture), shape_sums(architecture))


def load_training_model(name: str) -> TrainingModel:
    """Load the training planner's description of the model `name`: a hub id, a folder or another name.

    Raises:
        UnsupportedArchitecture: for a quantized checkpoint, which cannot be trained in place.
        TonnageError: for a model that is not found or has an unsupported architecture.
    """
    source = resolve_model(name)
    if source.kind == "gguf":
        raise UnsupportedArchitecture(
            "a GGUF file holds weights for inference only", field="model", hint="give the original checkpoint"
        )
    found = source.config.get("quantization_config")
    if isinstance(found, dict):
        raise UnsupportedArchitecture(
            f"the checkpoint is quantized already ({found.get('quant_method', 'unknown method')})",
            field="quantization_config",
            hint="plan the unquantized checkpoint; --method qlora quantizes it on loading",
        )
    return replace(model_from(name, build_architecture(source.config)), notes=source.notes)
