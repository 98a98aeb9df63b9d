"""The tower of a multimodal model as an engine runs it, and the sizes its processor allows (``Vision``).

Sizes are those of the processor's own files beside config.json; where these are not at hand, what the family's
published files state: preprocessor_config.json of Qwen2-VL and Qwen2.5-VL (max_pixels 12,845,056), Qwen3-VL to
3.8 (16,777,216; video_preprocessor_config.json 25,165,824), Mistral Small 3.1 (1,540 pixels) and Kimi-VL (4,096
patches).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt
from typing import Any, Literal

from tonnage.planner.errors import ConfigError
from tonnage.planner.families import towers
from tonnage.planner.model.fields import Fields, shown
from tonnage.planner.model.vision import Tower, Vision
from tonnage.planner.records import replace

FILES = ("preprocessor_config", "video_preprocessor_config")
"""Under these names read_config gives a family's builder the processor's files."""

_QWEN_PIXELS = {"qwen2": (12_845_056, 0), "qwen2_5": (12_845_056, 0), "qwen3": (16_777_216, 25_165_824)}
# Frames of the longest video: vLLM's own limit for Qwen2-VL and 2.5 (_MAX_FRAMES_PER_VIDEO in
# models/qwen2_vl.py); Qwen3-VL's videos of more frames have smaller ones
_FRAMES = {"qwen2": 14, "qwen2_5": 14, "qwen3": 2}


def longest_edge(processor: Mapping[str, Any], default: int, where: str = FILES[0]) -> int:
    """``size.longest_edge`` of a processor's file, or ``max_pixels``, which comes first."""
    size = processor.get("size")
    found = processor.get("max_pixels")
    if found is None and isinstance(size, dict):
        found = size.get("longest_edge")
    if found is None:
        return default
    if type(found) is not int or not 0 < found < 1 << 40:
        raise ConfigError(f"{shown(found)} is not a size", field=f"{where}.size.longest_edge")
    return found


def qwen(fields: Fields, vision: Mapping[str, Any], model_type: str, width: int) -> Vision:
    """Qwen2-VL to Qwen3.5; what a file leaves out as in towers.qwen. ``width``: the language model's."""
    f = Fields(vision)
    tower: Tower = "qwen2" if model_type == "qwen2_vl" else "qwen2_5" if model_type == "qwen2_5_vl" else "qwen3"
    old, new = tower == "qwen2", tower == "qwen3"
    hidden = f.integer(
        "embed_dim" if old else "hidden_size", 1280 if old else 1152 if new else 3584, limit="width"
    )
    if old:
        inner = hidden * f.integer("mlp_ratio", 4, limit="width")
    else:
        inner = f.integer("intermediate_size", 4304 if new else 3420, limit="width")
    patch = f.integer("patch_size", 16 if new else 14, limit="width")
    frames = f.integer("temporal_patch_size", 2, limit="width")
    channels = f.integer("in_channels" if "in_channels" in vision else "in_chans", 3, limit="width")
    deep = 0
    if new and not model_type.startswith("qwen3_5"):
        listed = f.raw("deepstack_visual_indexes")
        deep = 3 if listed is None else len(listed)
    image, video = _QWEN_PIXELS[tower]
    image = longest_edge(fields.mapping(FILES[0]) or {}, image)
    if video:
        video = longest_edge(fields.mapping(FILES[1]) or {}, video, FILES[1])
    return Vision(
        tower, hidden, inner, hidden // f.integer("num_heads", 16, limit="heads"), patch,
        f.integer("spatial_merge_size", 2, limit="width"), channels * frames * patch * patch,
        width * (1 + deep), "pixels", image, video=video, frames=_FRAMES[tower], deep=deep,
    )  # fmt: skip


def square(
    tower: Literal["siglip", "clip"], vision: Mapping[str, Any], defaults: Mapping[str, int], width: int,
    tokens: int | None = None,
) -> Vision:  # fmt: skip
    """CLIP and SigLIP: pictures of one size. ``tokens``: embeddings, where they are pooled; else each patch."""
    f = Fields(vision)
    v = {name: f.integer(name, default, limit="width") for name, default in defaults.items()}
    side = v["image_size"] // v["patch_size"]
    extra = 1 if tower == "clip" else 0  # the class token
    return Vision(
        tower, v["hidden_size"], v["intermediate_size"], v["hidden_size"] // v["num_attention_heads"],
        v["patch_size"], 1, v["num_channels"] * v["patch_size"] ** 2, width, "fixed",
        side * side if tokens is None else tokens, patches=side * side + extra,
    )  # fmt: skip


def gemma3(fields: Fields, vision: Mapping[str, Any], width: int) -> Vision | None:
    """None with pan-and-scan, whose crops depend on the picture."""
    if (fields.mapping(FILES[0]) or {}).get("do_pan_and_scan"):
        return None
    tokens = fields.integer("mm_tokens_per_image", 256, limit="width")
    return square("siglip", vision, towers.SIGLIP, width, tokens)


def pixtral(
    vision: Mapping[str, Any], defaults: Mapping[str, int], width: int, merge: int, fields: Fields | None = None
) -> Vision:
    """Pictures of any shape, up to so many pixels on the longer side: as the processor's file says below
    Mistral 3 (``fields``), as the tower does below LLaVA (PixtralHFEncoderInfo, models/pixtral.py)."""
    f = Fields(vision)
    v = {name: f.integer(name, default, limit="width") for name, default in defaults.items()}
    edge = v["image_size"] if fields is None else longest_edge(fields.mapping(FILES[0]) or {}, 1540)
    return Vision(
        "pixtral", v["hidden_size"], v["intermediate_size"], v["hidden_size"] // v["num_attention_heads"],
        v["patch_size"], merge, v["num_channels"] * v["patch_size"] ** 2, width, "edge", edge,
    )  # fmt: skip


# What LlavaNextConfig has where a file says nothing (transformers 5.19): height x width in pixels
_PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]


def tiles(fields: Fields, vision: Vision | None) -> Vision | None:
    """LLaVA-NeXT's largest picture: the grid of tiles with most embeddings, one for each patch and end of line,
    and the whole picture as one tile more (get_num_image_tokens, models/llava_next.py)."""
    listed = fields.raw("image_grid_pinpoints") or _PINPOINTS
    if vision is None or not isinstance(listed, list):
        return None
    side = isqrt(vision.image)
    pixels = side * vision.patch
    best = (0, 0)
    for place in listed:
        if not (isinstance(place, list) and len(place) == 2 and all(type(n) is int and n > 0 for n in place)):
            raise ConfigError(f"{shown(place)} is not height and width", field="image_grid_pinpoints")
        rows, columns = place[0] // pixels, place[1] // pixels
        if place[0] % pixels or place[1] % pixels:
            return None  # tiles that the picture does not fill
        best = max(best, (rows * side * (columns * side + 1) + vision.image, rows * columns + 1))
    return replace(vision, image=best[0], patches=best[1] * vision.patches)


def kimi_vl(fields: Fields, vision: Mapping[str, Any], width: int) -> Vision:
    """Kimi-VL profiles a picture of 1,024 x 1,024 pixels (MaxImageTokenMeta, models/kimi_vl.py)."""
    f = Fields(vision)
    hidden = f.integer("hidden_size", 1152, limit="width")
    patch = f.integer("patch_size", 14, limit="width")
    limit = (fields.mapping(FILES[0]) or {}).get("in_token_limit", 4096)
    if type(limit) is not int or limit < 4:
        raise ConfigError(f"{shown(limit)} is not a number of patches", field=f"{FILES[0]}.in_token_limit")
    return Vision(
        "moonvit", hidden, f.integer("intermediate_size", 4304, limit="width"),
        hidden // f.integer("num_attention_heads", 16, limit="heads"), patch, 2, 3 * patch * patch, width,
        "patches", limit, side=1024,
    )  # fmt: skip
