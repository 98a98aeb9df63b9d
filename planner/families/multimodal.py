"""Multimodal models: a vision or audio tower, and a text model that is built as its own model family.

The names of the text model's tensors get the prefix that they have in the multimodal model.

Shapes follow transformers 5.19 / 5.23, models/<family>/. The parameters of towers and projectors are counted
separately (``Architecture.tower_parameters``). Only the text model has a KV cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tonnage.planner.errors import ConfigError
from tonnage.planner.families import image_limits
from tonnage.planner.families.registry import build_text
from tonnage.planner.families.tensors import Tensors
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.fields import Fields
from tonnage.planner.model.vision import Vision

TOP = (
    "image_token_id", "image_token_index", "video_token_id", "video_token_index", "vision_start_token_id",
    "vision_end_token_id", "vision_token_id", "boi_token_index", "eoi_token_index", "boi_token_id",
    "eoi_token_id",
    "boa_token_id", "eoa_token_id", "eoa_token_index", "audio_token_id", "audio_config", "mm_tokens_per_image",
    "vision_soft_tokens_per_image", "ignore_index", "image_seq_length", "media_placeholder_token_id",
    "projector_hidden_act", "vision_feature_layer", "vision_feature_select_strategy", "text_config",
    "vision_config", "use_unified_vision_chunk", "video_placeholder", "language_model_only",
    "image_grid_pinpoints", "vision_aspect_ratio",
    "image_placeholder", "img_token_compression_config", "num_reward_heads", "process_image_mode",
    "projection_layer_norm_eps", "projection_hidden_size", "vocab_size", "vision_token_index",
    *image_limits.FILES,
)  # fmt: skip


def text_of(
    fields: Fields, text_type: str, config: Mapping[str, Any] | None, *, tie: bool = True, tied: bool = False,
    either: bool = False,
) -> Architecture:  # fmt: skip
    """Return the architecture of the language model inside a multimodal model.

    The head is tied if the multimodal config's tie_word_embeddings, or the default of its class, is true
    (transformers 5.19, modeling_utils.py).

    Args:
        fields: the config of the multimodal model.
        text_type: model_type of the language model.
        config: the language model's config; None raises ConfigError.
        tie: whether the multimodal config decides if the head is tied; if False, the language model's config
            decides.
        tied: default of tie_word_embeddings in the multimodal config class.
        either: whether the head is also tied if only the config of the language model says so.
    """
    if config is None:
        raise ConfigError("missing", field="text_config")
    if not tie:
        return build_text(config, text_type)
    tied = fields.boolean("tie_word_embeddings", tied)
    if either:
        tied = tied or config.get("tie_word_embeddings") is True
    elif "tie_word_embeddings" not in fields.config and config.get("tie_word_embeddings", tied) != tied:
        raise ConfigError(
            f"{not tied} contradicts the multimodal model's tie_word_embeddings, which is missing and defaults "
            f"to {tied}",
            field="text_config.tie_word_embeddings",
        )
    return build_text({**config, "tie_word_embeddings": tied}, text_type)


def vision_of(fields: Fields) -> Mapping[str, Any]:
    """Return the object ``vision_config`` of config.json, empty without this field."""
    return fields.mapping("vision_config") or {}


def joined(
    text: Architecture, model_type: str, class_name: str, t: Tensors, new: str = "model.language_model.",
    *, old: str = "model.", vision: Vision | None = None,
) -> Architecture:  # fmt: skip
    """Return the architecture of a multimodal model: its text model ``text`` and its tower's tensors ``t``.

    The tower's tensors come first. The text model's tensors follow; where their names begin with ``old``, that
    prefix is replaced by ``new``.
    """

    def name(at: str) -> str:
        return new + at[len(old) :] if at.startswith(old) else at

    moved = (
        replace(s, name=name(s.name), tied_to=name(s.tied_to) if s.tied_to else None) for s in text.tensors
    )
    tensors = (*t.specs, *moved)
    return replace(
        text, model_type=model_type, class_name=class_name, tensors=tensors, recipe=None, vision=vision
    )
