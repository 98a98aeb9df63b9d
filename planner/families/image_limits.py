"""Sizes of a model's vision tower, and the largest images, videos and audio clips that its processor allows.

Each function returns a ``Vision`` for one family. The image sizes come from the processor's files beside
config.json. Without these files, the values of the family's published files are used:

- Qwen2-VL and Qwen2.5-VL: 12,845,056 pixels (max_pixels in preprocessor_config.json)
- Qwen3-VL to Qwen3.8: 16,777,216 pixels, and 25,165,824 for a video (video_preprocessor_config.json)
- Mistral Small 3.1: 1,540 pixels on the longer side
- Kimi-VL: 4,096 patches; Kimi-K2.5: 16,384 patches
- Llama 4: 16 tiles

Source files named without a version are those of vLLM 0.32.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import isqrt
from typing import Any, Literal

from tonnage.planner.errors import ConfigError
from tonnage.planner.families import towers
from tonnage.planner.model.fields import LIMITS, Fields, shown
from tonnage.planner.model.vision import Item, Tower, Vision

FILES = ("preprocessor_config", "video_preprocessor_config")
"""Config fields in which read_config stores the content of the processor's files for the builders."""

_QWEN_PIXELS = {"qwen2": (12_845_056, 0), "qwen2_5": (12_845_056, 0), "qwen3": (16_777_216, 25_165_824)}
# Maximum number of frames in a video whose frames are not scaled down. For Qwen2-VL and Qwen2.5-VL, this is
# vLLM's limit for all videos (_MAX_FRAMES_PER_VIDEO in models/qwen2_vl.py). Qwen3-VL limits the pixels of all
# frames together, so it scales the frames of longer videos down.
_FRAMES = {"qwen2": 14, "qwen2_5": 14, "qwen3": 2}


def longest_edge(processor: Mapping[str, Any], default: int, where: str = FILES[0]) -> int:
    """Return the image size limit, in pixels, of an image processor's config file, else ``default``.

    The limit is ``max_pixels``, else ``size.longest_edge``. ``where`` is the file's name, for error messages.
    """
    size = processor.get("size")
    found = processor.get("max_pixels")
    if found is None and isinstance(size, dict):
        found = size.get("longest_edge")
    if found is None:
        return default
    if type(found) is not int or not 0 < found < 1 << 40:
        raise ConfigError(f"{shown(found)} is not a number of pixels", field=f"{where}.size.longest_edge")
    return found


def qwen(
    fields: Fields, vision: Mapping[str, Any], tower: Tower, width: int, *, deepstack: bool = True
) -> Vision:
    """Return the image limits of Qwen2-VL to Qwen3.5; ``width`` is the language model's hidden size.

    With ``deepstack``, a qwen3 tower also gives the language model the outputs of some of its layers.
    """
    f = Fields(vision)
    hidden, inner, channels, frames, patch = towers.qwen_sizes(f, tower)
    deep = 0
    if tower == "qwen3" and deepstack:
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


def omni(fields: Fields, vision: Mapping[str, Any], tower: Tower, width: int) -> Vision:
    """Return the image, video and audio limits of Qwen's Omni models.

    Images and video frames are processed as in Qwen2.5-VL; audio clips have up to 30 s. The processors scale a
    frame down to at most 768 embeddings (_defaults in transformers' processing_qwen2_5_omni.py and
    processing_qwen3_omni_moe.py), but vLLM counts a frame like an image of full size.
    """
    made = qwen(Fields({FILES[0]: fields.raw(FILES[0])}), vision, tower, width)
    image = longest_edge(fields.mapping(FILES[0]) or {}, _QWEN_PIXELS["qwen2_5"][0])
    left = 768 * (made.patch * made.merge) ** 2
    return replace(
        made, image=image, video=0, frames=_FRAMES["qwen2_5"], left=left, others=(Item("audio", 750),)
    )  # fmt: skip


def square(
    tower: Literal["siglip", "clip"], vision: Mapping[str, Any], defaults: Mapping[str, int], width: int,
    tokens: int | None = None,
) -> Vision:  # fmt: skip
    """Return the image limits of a CLIP or SigLIP tower, which scales all images to one fixed size.

    ``tokens`` is the number of embeddings per image if patches are pooled; by default each patch gives one
    embedding.
    """
    f = Fields(vision)
    v = towers.sizes(f, defaults)
    side = v["image_size"] // v["patch_size"]
    if not side:
        raise ConfigError(f"{v['image_size']} is smaller than patch_size", field="vision_config.image_size")
    extra = 1 if tower == "clip" else 0  # CLIP's class token is one more embedding
    return Vision(
        tower, v["hidden_size"], v["intermediate_size"], v["hidden_size"] // v["num_attention_heads"],
        v["patch_size"], 1, v["num_channels"] * v["patch_size"] ** 2, width, "fixed",
        side * side if tokens is None else tokens, patches=side * side + extra,
    )  # fmt: skip


def gemma3(fields: Fields, vision: Mapping[str, Any], width: int) -> Vision | None:
    """Return Gemma 3's image limits; None with pan-and-scan, where the number of crops depends on the image."""
    if (fields.mapping(FILES[0]) or {}).get("do_pan_and_scan"):
        return None
    tokens = fields.integer("mm_tokens_per_image", 256, limit="width")
    return square("siglip", vision, towers.SIGLIP, width, tokens)


def pixtral(
    vision: Mapping[str, Any], defaults: Mapping[str, int], width: int, merge: int, fields: Fields | None = None
) -> Vision:
    """Return the image limits of a Pixtral tower, which takes images of any aspect ratio.

    The longer side of an image is limited. For Mistral 3 (``fields`` given) the processor's file states the
    limit. For LLaVA the limit is the tower's image_size (PixtralHFEncoderInfo, models/pixtral.py).
    """
    f = Fields(vision)
    v = towers.sizes(f, defaults)
    edge = v["image_size"] if fields is None else longest_edge(fields.mapping(FILES[0]) or {}, 1540)
    return Vision(
        "pixtral", v["hidden_size"], v["intermediate_size"], v["hidden_size"] // v["num_attention_heads"],
        v["patch_size"], merge, v["num_channels"] * v["patch_size"] ** 2, width, "edge", edge,
    )  # fmt: skip


# Default grids of LlavaNextConfig (transformers 5.19): height x width in pixels
_PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]


def _checked(listed: list[Any], least: int) -> list[list[int]]:
    """Return ``listed``, a config's list of image sizes, if each entry is [height, width] in pixels.

    Height and width must be at least ``least``.

    Raises:
        ConfigError: an entry is anything else.
    """
    for place in listed:
        if not (
            isinstance(place, list) and len(place) == 2
            and all(type(n) is int and least <= n <= LIMITS["width"] for n in place)
        ):  # fmt: skip
            raise ConfigError(
                f"{shown(place)} is not [height, width] with at least {least} pixels each",
                field="image_grid_pinpoints",
            )
    return listed


def tiles(fields: Fields, vision: Vision | None, size: int) -> Vision | None:
    """Return LLaVA-NeXT's image limits: those of the image with the most embeddings, or None.

    An image is cut into a grid of square tiles of ``size`` pixels per side. The whole image, scaled down, is
    one more tile. Each patch gives one embedding, and so does the end of each line of patches
    (get_num_image_tokens, models/llava_next.py). Returns None if a grid's size is not a multiple of ``size``.
    """
    listed = fields.raw("image_grid_pinpoints") or _PINPOINTS
    if vision is None or not isinstance(listed, list):
        return None
    side = isqrt(vision.image)
    best = (0, 0)
    for place in _checked(listed, 1):
        rows, columns = place[0] // size, place[1] // size
        if place[0] % size or place[1] % size:
            return None  # the grid's size is no multiple of the tile size
        best = max(best, (rows * side * (columns * side + 1) + vision.image, rows * columns + 1))
    return replace(vision, image=best[0], patches=best[1] * vision.patches)


# (height, width) in pixels of the image that vLLM profiles. vLLM assumes that this image has the most
# embeddings with every list of grids. _MOST_TILES is the maximum number of tiles that are not scaled down.
# Sources: get_image_size_with_most_features and _get_num_unpadded_features in models/llava_onevision.py.
_ONEVISION = (944, 1153)
_MOST_TILES = 9


def onevision(fields: Fields, vision: Vision | None, size: int) -> Vision | None:
    """Return the size, tiles and embeddings of LLaVA-OneVision's largest image.

    It is the image with the most embeddings. Rows and columns of patches that the image does not cover in its
    grid of tiles are left out. A video has up to 16 frames, and four embeddings of a frame are pooled into one.
    Returns None if the pooling is not 2 x 2.
    """
    listed = fields.raw("image_grid_pinpoints") or [
        [rows * size, columns * size] for rows in range(1, 7) for columns in range(1, 7)
    ]
    if vision is None or not isinstance(listed, list) or fields.raw("spatial_pool_stride") not in (None, 2):
        return None
    _checked(listed, size)
    height, width = _ONEVISION

    def fits(place: list[int]) -> tuple[int, int]:
        """Return the sort key of the grid size ``place``: (pixels of the scaled image, -(unused pixels)).

        The grid with the largest key fits the image best (select_best_resolution).
        """
        scale = min(place[1] / width, place[0] / height)
        left = min(int(width * scale) * int(height * scale), height * width)
        return left, left - place[0] * place[1]

    best = max(listed, key=fits)
    side = isqrt(vision.image)
    rows, columns = best[0] // size, best[1] // size
    high, wide = side * rows, side * columns
    if width / height > wide / high:
        high -= 2 * ((high - int(round(height * (wide / width), 7))) // 2)
    else:
        wide -= 2 * ((wide - int(round(width * (high / height), 7))) // 2)
    ratio = (high * wide / (_MOST_TILES * side**2)) ** 0.5
    if ratio > 1.1:
        high, wide = int(high // ratio), int(wide // ratio)
    frame = (side + 1) // 2
    return replace(
        vision, image=high * wide + high + vision.image, patches=(rows * columns + 1) * vision.patches,
        frames=16, frame=frame * frame, left=vision.patches,
    )  # fmt: skip


def kimi_vl(fields: Fields, vision: Mapping[str, Any], width: int) -> Vision:
    """Return Kimi-VL's image limits.

    vLLM profiles an image of 1,024 x 1,024 pixels (MaxImageTokenMeta, models/kimi_vl.py).
    """
    limit = _patches(fields.mapping(FILES[0]) or {}, "in_token_limit", 4096)
    return _moonvit(Fields(vision), width, limit, 1024)


def kimi_k25(fields: Fields, vision: Mapping[str, Any], width: int) -> Vision:
    """Return Kimi-K2.5's image limits; vLLM profiles an image of 3,000 x 3,000 pixels.

    vLLM would profile a group of four video frames instead if the group had more embeddings than this image.
    The group has fewer as long as an image may have more patches than a frame, because the patches of a video
    are also pooled over time (models/kimi_k25.py, processors/kimi_k25_vision_fused.py).
    """
    told = (fields.mapping(FILES[0]) or {}).get("media_proc_cfg")
    told = told if isinstance(told, Mapping) else {}
    limit = _patches(told, "in_patch_limit", 16_384)
    return _moonvit(Fields(vision, towers.MOONVIT), width, limit, 3000)


def _moonvit(f: Fields, width: int, limit: int, side: int) -> Vision:
    """Return the image limits of a MoonViT vision tower, which accepts at most ``limit`` patches per image.

    vLLM profiles a square image of ``side`` x ``side`` pixels.
    """
    hidden = f.integer("hidden_size", 1152, limit="width")
    inner = f.integer("intermediate_size", 4304, limit="width")
    heads = f.integer("num_attention_heads", 16, limit="heads")
    patch = f.integer("patch_size", 14, limit="width")
    return Vision(
        "moonvit", hidden, inner, hidden // heads, patch, 2, 3 * patch * patch, width, "patches", limit,
        side=side,
    )  # fmt: skip


def _patches(told: Mapping[str, Any], name: str, default: int) -> int:
    """Return the maximum number of patches per image, from the field ``name`` of an image processor's file."""
    limit = told.get(name, default)
    if type(limit) is not int or limit < 4:
        raise ConfigError(
            f"{shown(limit)} is not an integer of at least 4 (a number of patches)", field=f"{FILES[0]}.{name}"
        )
    return limit


def llama4(fields: Fields, vision: Mapping[str, Any], width: int) -> Vision:
    """Return Llama 4's image limits: the maximum number of tiles, and one more tile for the whole image.

    The largest image is a column of tiles (get_image_size_with_most_features, models/mllama4.py).
    """
    f = Fields(vision)
    v = towers.sizes(f, towers.LLAMA4)
    whole = (v["image_size"] // v["patch_size"]) ** 2
    ratio = f.number("pixel_shuffle_ratio", 0.5)
    if not 0.05 <= ratio <= 1:
        raise ConfigError(f"{ratio} is not between 0.05 and 1", field="vision_config.pixel_shuffle_ratio")
    tokens = whole // round(1 / ratio**2)
    most = _patches(fields.mapping(FILES[0]) or {}, "max_patches", 16)
    return Vision(
        "llama4", v["hidden_size"], v["intermediate_size"], v["hidden_size"] // v["num_attention_heads"],
        v["patch_size"], 1, v["num_channels"] * v["patch_size"] ** 2, width, "fixed", (most + 1) * tokens,
        patches=(most + 1) * (whole + 1),
    )  # fmt: skip


def minimax(fields: Fields, vision: Mapping[str, Any], width: int) -> Vision:
    """Return MiniMax-M3's image and video limits.

    MiniMax-M3 processes images like Qwen2-VL, with two differences. A video has up to 500 frames, whose size
    limit differs from that of images. Each patch is projected before four patches are merged
    (models/minimax_m3/common/mm_preprocess.py, vision_tower.py; defaults of processors/minimax_m3.py).
    """
    f = Fields(vision)
    v = towers.sizes(f, towers.MINIMAX)
    head = v["hidden_size"] // v["num_attention_heads"]
    image = fields.mapping(FILES[0]) or {}
    frame = fields.mapping(FILES[1]) or image
    return Vision(
        # The head size is rounded down to a multiple of 6, because three axes share its rotary pairs equally.
        "minimax", v["hidden_size"], v["intermediate_size"], head // 6 * 6,
        v["patch_size"], 2, v["num_channels"] * v["temporal_patch_size"] * v["patch_size"] ** 2, width,
        "pixels", _bounded(image, 451_584, FILES[0]), frames=500, frame=_bounded(frame, 602_112, FILES[1]),
        projector=(fields.integer("projector_hidden_size", width, limit="width"), width),
    )  # fmt: skip


def _bounded(told: Mapping[str, Any], default: int, where: str) -> int:
    """Return the maximum number of pixels of an image or video frame, from a processor's file.

    If the processor's file limits the longer side, the limit is at most the square of that side.
    """
    pixels = longest_edge(told, default, where)
    edge = told.get("max_long_side_pixel")
    if edge is None:
        return pixels
    if type(edge) is not int or not 0 < edge < 1 << 20:
        raise ConfigError(f"{shown(edge)} is not a side length in pixels", field=f"{where}.max_long_side_pixel")
    return min(edge * edge, 12_845_056 if where == FILES[0] else pixels)


def gemma4(fields: Fields, vision: Mapping[str, Any], width: int, sound: bool) -> Vision:
    """Return Gemma 4's image, video and, with ``sound``, audio limits.

    An image has ``max_soft_tokens`` embeddings, each of which is pooled from a square of patches. Images are
    padded to the number of patches that gives this number of embeddings. A video has 32 frames, each with 70
    embeddings and eight tokens of its time stamp (get_mm_max_tokens_per_item, models/gemma4_mm.py). An audio
    clip has up to 30 s.
    """
    f = Fields(vision)
    v = towers.sizes(f, towers.GEMMA4)
    soft = fields.integer("vision_soft_tokens_per_image", 280, limit="width")
    most = f.integer("default_output_length", soft, limit="width")
    pooled = f.integer("pooling_kernel_size", 3, limit="width") ** 2
    others = (Item("video", 32 * (70 + 8), 32 * 70 * pooled, 32), Item("audio", 750))
    return Vision(
        "gemma4", v["hidden_size"], v["intermediate_size"], f.integer("head_dim", 64, limit="width"),
        v["patch_size"], 1, 3 * v["patch_size"] ** 2, width, "fixed", most, patches=most * pooled,
        places=v["position_embedding_size"], others=others if sound else others[:1],
    )  # fmt: skip


def gemma3n(width: int) -> Vision:
    """Return Gemma 3n's limits: images of 768 x 768 pixels and audio clips of 30 s.

    Sources: get_mm_max_tokens_per_item in models/gemma3n_mm.py, image_seq_length and audio_seq_length of the
    processor. MobileNet's first convolution (the stem) halves height and width and has 64 output channels. A
    patch is therefore 2 x 2 pixels here, with 64 channels.
    """
    side = 768 // 2
    return Vision(
        "mobilenet", 64, 64, 1, 2, 1, 3 * 2 * 2, width, "fixed", 256, patches=side * side,
        others=(Item("audio", 188),),
    )  # fmt: skip
