"""The multimodal Gemma 3, Gemma 3n and Gemma 4.

Shapes follow transformers 5.19 / 5.23, models/<family>/. Only the text model has a KV cache.
"""

from __future__ import annotations

from functools import partial

from tonnage.planner.families import gemma3n_towers, gemma4_towers, image_limits, towers
from tonnage.planner.families.family import RENAMED, Family
from tonnage.planner.families.multimodal import TOP, joined, text_of, vision_of
from tonnage.planner.families.tensors import Tensors
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.fields import Fields


def gemma3(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of the multimodal Gemma 3 from its checked config."""
    text = text_of(fields, "gemma3_text", fields.mapping("text_config"), tied=True)
    t = Tensors("vision")
    vision = vision_of(fields)
    hidden = towers.siglip(t, "model.vision_tower", vision)
    t.role = "projector"
    at = "model.multi_modal_projector"
    t.add(
        f"{at}.mm_input_projection_weight", (hidden, text.hidden_size), "projector", "Gemma3MultiModalProjector"
    )
    t.norm(f"{at}.mm_soft_emb_norm", hidden)
    seen = image_limits.gemma3(fields, vision, text.hidden_size)
    return joined(text, model_type, "Gemma3ForConditionalGeneration", t, vision=seen)


def gemma3n(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of the multimodal Gemma 3n, which reads images and audio."""
    text = text_of(fields, "gemma3n_text", fields.mapping("text_config"), tied=True)
    fields.ignore("audio_soft_tokens_per_image")
    t = Tensors("vision")
    vision, sound = vision_of(fields), fields.mapping("audio_config") or {}
    gemma3n_towers.vision(t, "model.vision_tower", vision)
    t.role = "audio"
    width = gemma3n_towers.audio(t, "model.audio_tower", sound)
    t.role = "projector"
    stated = Fields(vision).integer("hidden_size", gemma3n_towers.VISION_WIDTH, limit="width")
    gemma3n_towers.embedder(t, "model.embed_vision", vision, stated, text.hidden_size)
    gemma3n_towers.embedder(t, "model.embed_audio", sound, width, text.hidden_size)
    seen = image_limits.gemma3n(text.hidden_size)
    return joined(text, model_type, "Gemma3nForConditionalGeneration", t, vision=seen)


def gemma4(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of the multimodal Gemma 4, which reads images and may read audio."""
    text = text_of(fields, "gemma4_text", fields.mapping("text_config"), tied=True)
    t = Tensors()
    sound, seen = fields.mapping("audio_config"), None
    if fields.raw("vision_config") is not None:
        t.role = "vision"
        vision = vision_of(fields)
        hidden = towers.gemma4(t, "model.vision_tower", vision)
        t.role = "projector"
        t.linear("model.embed_vision.embedding_projection", text.hidden_size, hidden)
        seen = image_limits.gemma4(fields, vision, text.hidden_size, sound is not None)
    if sound is not None:
        t.role = "audio"
        width = gemma4_towers.audio(t, "model.audio_tower", sound)
        t.role = "projector"
        t.linear("model.embed_audio.embedding_projection", text.hidden_size, width)
    return joined(text, model_type, "Gemma4ForConditionalGeneration", t, vision=seen)


_family = partial(Family, ignored=TOP, final_norm="rms-one")
FAMILIES = {
    "gemma3": _family(gemma3, files=RENAMED),
    "gemma3n": _family(gemma3n),
    "gemma4": _family(gemma4, files=RENAMED),
}
