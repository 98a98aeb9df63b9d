"""vLLM's budget for images and videos: how many items of the largest size its profile run encodes.

The source is vLLM 0.32.0: MultiModalBudget (multimodal/encoder_budget.py), compute_mm_encoder_budget
(v1/core/encoder_cache_manager.py), and each model's processing info (get_max_image_tokens,
get_max_video_tokens, get_image_size_with_most_features in model_executor/models). The rules are the same since
0.10; 0.9 subtracted an image's tokens from a video's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isqrt
from typing import Any

from tonnage.planner.deployment import Deployment
from tonnage.planner.engines.version import Version
from tonnage.planner.engines.vllm.versions import rules
from tonnage.planner.errors import DeploymentError, EngineRefusal
from tonnage.planner.flags import flags_of
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.fields import shown
from tonnage.planner.model.tensor import TensorSpec
from tonnage.planner.model.vision import Vision
from tonnage.planner.plans import Resolved
from tonnage.planner.units import ceil_div

_LIMIT = "--limit-mm-per-prompt"
_KWARGS = "--mm-processor-kwargs"
IMAGE_FLAGS = (
    "limit_mm_per_prompt", "mm_processor_kwargs", "language_model_only", "skip_mm_profiling",
    "disable_chunked_mm_input", "mm_encoder_tp_mode",
)  # fmt: skip
# Image flags whose effect is known even if the model's image sizes are not.
_COUNTS = ("limit_mm_per_prompt", "language_model_only", "skip_mm_profiling")
_MODALITIES = ("image", "video", "audio")
_UNLIMITED = 999  # vLLM's default limit of items per prompt (get_limit_per_prompt, config/multimodal.py)

# Tokens that vLLM 0.11 and 0.12 count for each embedding of Qwen3-VL's videos (get_max_video_tokens in
# models/qwen3_vl.py). A start of 0.11.0 prints a budget of 153,600 tokens, 12.5 x 12,288.
_FORMATTED = 12.5
_ASPECT = 200  # largest aspect ratio of Qwen's images (closest_factor_pair in models/qwen2_vl.py)

# Vision towers whose model class sets supports_encoder_tp_data.
_DATA_PARALLEL = ("qwen2", "qwen2_5", "qwen3", "moonvit", "llama4", "minimax")
# Arguments of --mm-processor-kwargs that cannot make images larger.
_HARMLESS = ("min_pixels", "fps", "do_resize", "use_fast")


@dataclass(frozen=True, slots=True)
class Profiled:
    """The items of the largest size that vLLM's profile run encodes.

    Attributes:
        modality: Modality of the items: image, video or audio.
        count: Number of items.
        tokens: Embeddings of one item.
        patches: Patches of one item.
        budget: Number of embeddings that the encoder cache holds.
    """

    modality: str
    count: int
    tokens: int
    patches: int
    budget: int


def limits(flags: Deployment) -> dict[str, int]:
    """Return the configured maximum number of images, videos and audio clips per prompt, by modality.

    Raises:
        DeploymentError: --limit-mm-per-prompt is not understood.
    """
    if flags.language_model_only:
        return dict.fromkeys(_MODALITIES, 0)
    found = {}
    for name, value in _object(flags.limit_mm_per_prompt, _LIMIT).items():
        if name not in _MODALITIES:
            raise DeploymentError(f"{shown(name)} is not a modality", field=_LIMIT, hint=", ".join(_MODALITIES))
        if isinstance(value, dict) and value.keys() <= {"count"}:
            value = value.get("count", _UNLIMITED)
        if type(value) is not int or value < 0:
            raise DeploymentError(
                f"{shown(value)} is not a number of {name} items", field=_LIMIT, hint='such as {"image": 2}'
            )
        found[name] = value
    return found


def _given(flags: Deployment) -> list[str]:
    """Return the names of the image flags that differ from their defaults."""
    return [name for name in IMAGE_FLAGS if getattr(flags, name) != flags_of(Deployment)[name].default]


def check(architecture: Architecture, flags: Deployment) -> None:
    """Raise DeploymentError for an image flag whose effect on the model's memory is not known."""
    given = _given(flags)
    if not given:
        return
    limits(flags)
    if architecture.tower_parameters and architecture.vision is None:
        unknown = [name for name in given if name not in _COUNTS]
        if unknown:
            raise DeploymentError(
                f"the planner does not know how large images of {architecture.class_name} are",
                field=flags_of(Deployment)[unknown[0]].option,
                hint="leave out the option: the plan's interval has room for images",
            )  # fmt: skip


def notes(architecture: Architecture, chosen: Resolved) -> tuple[str, ...]:
    """Return a note if image flags are set for a text model, or for a model with unknown image sizes."""
    flags = chosen.flags
    if not architecture.tower_parameters:
        # A text model has no multimodal_config, and vLLM ignores its image flags (config/model.py).
        options = ", ".join(flags_of(Deployment)[name].option for name in _given(flags))
        return (f"{architecture.class_name} reads no pictures: {options} changes nothing",) if options else ()
    if architecture.vision is not None or not any(limits(flags).values()):
        return ()
    return (
        f"how large pictures of {architecture.class_name} are is not known here: --limit-mm-per-prompt changes "
        "nothing, the interval has room for them",
    )


def _object(text: str, option: str) -> dict[str, Any]:
    """Return the JSON object in a flag's ``text``, which may use the older notation ``image=2,video=0``."""
    if text and not text.lstrip().startswith("{"):
        parts = [part.partition("=") for part in text.split(",")]
        if all(value.strip().isdigit() for _, _, value in parts):
            return {name.strip(): int(value) for name, _, value in parts}
    try:
        found = json.loads(text or "{}")
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise DeploymentError(f"{shown(text)} is not a JSON object", field=option, hint='such as {"image": 2}')
    return found


def lost_towers(architecture: Architecture, flags: Deployment, version: Version) -> frozenset[str]:
    """Return the roles of towers that vLLM does not load, because all their modalities have a limit of zero.

    The rule is _mark_tower_model in models/interfaces.py.
    """
    if not rules(version).drops_towers or not (flags.language_model_only or flags.limit_mm_per_prompt != "{}"):
        return frozenset()
    # Whether a tower without known image sizes reads videos is not known, so the limits of images and videos
    # must be zero.
    sees = ("image", "video") if architecture.vision is None else architecture.vision.modalities
    reads = {"vision": tuple(name for name in sees if name != "audio"), "audio": ("audio",)}
    given = limits(flags)
    has = {tensor.role for tensor in architecture.tensors if tensor.role in reads}
    return frozenset(role for role in has if all(given.get(name) == 0 for name in reads[role]))


def drops_towers(architecture: Architecture, flags: Deployment, version: Version) -> bool:
    """Return whether vLLM loads no vision or audio tower, because their modalities have a limit of zero."""
    lost = lost_towers(architecture, flags, version)
    return bool(lost) and lost >= {tensor.role for tensor in architecture.tensors} & {"vision", "audio"}


def is_lost(tensor: TensorSpec, lost: frozenset[str]) -> bool:
    """Return whether a tensor belongs to a tower in ``lost``, which vLLM does not load, or to its projector."""
    role = tensor.role
    if role == "projector":
        role = "audio" if "audio" in tensor.name else "vision"
    return role in lost


def shares_pictures(architecture: Architecture, flags: Deployment) -> bool:
    """Return whether every tensor-parallel rank has a whole vision tower, and the ranks divide the images.

    This is the case with --mm-encoder-tp-mode data. Otherwise the ranks divide the tower.
    """
    vision = architecture.vision
    return flags.mm_encoder_tp_mode == "data" and vision is not None and vision.tower in _DATA_PARALLEL


def profiled(architecture: Architecture, chosen: Resolved) -> Profiled | None:
    """Return the images, videos or audio clips that vLLM's profile run encodes, or None if it encodes none.

    Raises:
        DeploymentError: a flag is not understood.
        EngineRefusal: a step cannot hold one item.
    """
    vision, flags = architecture.vision, chosen.flags
    if vision is None:
        return None
    given = limits(flags)
    sized = _with_kwargs(vision, flags)
    items = {
        name: size
        for name, size in _counted(architecture, sized, chosen).items()
        if given.get(name, _UNLIMITED) > 0 and size[0] > 0
    }
    if not items:
        return None
    modality, (tokens, patches) = max(items.items(), key=lambda item: (item[1][0], item[0]))
    step = chosen.max_num_batched_tokens
    if flags.disable_chunked_mm_input and tokens > step:
        raise EngineRefusal(
            f"{tokens:,} tokens of one {modality} do not fit in a step of {step:,}",
            field="--disable-chunked-mm-input", hint=f"--max-num-batched-tokens {tokens}",
            cause="mm_input", facts={"tokens": tokens, "step": step},
        )  # fmt: skip
    if flags.skip_mm_profiling:
        return None
    budget = max(step, tokens)
    each = max(1, min(given.get(modality, _UNLIMITED), chosen.max_model_len // tokens))
    count = max(1, min(budget // tokens, chosen.max_num_seqs * each))
    return Profiled(modality, count, tokens, patches, budget)


def _with_kwargs(vision: Vision, flags: Deployment) -> Vision:
    """Return ``vision`` with the image sizes that --mm-processor-kwargs requests.

    Raises:
        DeploymentError: an argument is not understood.
    """
    given = dict(_object(flags.mm_processor_kwargs, _KWARGS))
    for name in _HARMLESS:
        given.pop(name, None)
    found = given.pop("max_pixels", None) if vision.bound == "pixels" else None
    size = given.pop("size", {}) if vision.bound in ("pixels", "edge") else {}
    if not isinstance(size, Mapping) or not size.keys() <= {"longest_edge", "shortest_edge"} or given:
        name = next(iter(given), "size")
        raise DeploymentError(
            f"the planner does not know the argument {shown(name)} of this model's processor", field=_KWARGS
        )
    found = size.get("longest_edge") if found is None else found
    if found is None:
        return vision
    if type(found) is not int or not (vision.patch * vision.merge) <= found < 1 << 40:
        raise DeploymentError(f"{shown(found)} is not a valid max_pixels or longest_edge", field=_KWARGS)
    return replace(vision, image=found, video=found if vision.video else 0)


def _counted(architecture: Architecture, vision: Vision, chosen: Resolved) -> dict[str, tuple[int, int]]:
    """Return modality -> (tokens, patches) of the largest image or video, as the vLLM version counts them."""
    found = _largest(vision, chosen.max_model_len)
    if rules(chosen.version).formatted_videos and architecture.model_type.startswith("qwen3_vl"):
        tokens, patches = found["video"]
        found["video"] = int(tokens * _FORMATTED), patches
    return found


def _largest(vision: Vision, max_model_len: int) -> dict[str, tuple[int, int]]:
    """Return modality -> (embeddings, patches) of the largest image or video."""
    unit = vision.patch * vision.merge
    others = {item.modality: (item.tokens, item.patches) for item in vision.others}
    if vision.bound == "fixed":
        if vision.frames:  # one learned end-of-line embedding follows all frames
            frames = max(1, min(vision.frames, (max_model_len - 1) // vision.frame))
            others["video"] = (frames * vision.frame + 1, frames * vision.left)
        return {"image": (vision.image, vision.patches)} | others
    if vision.bound == "pixels":
        image = _most_square(vision.image // unit**2)
        if vision.video:
            video = _most_square(vision.video // 2 // unit**2)
        else:
            frame = _most_square(vision.frame // unit**2) if vision.frame else image
            frames = max(1, min(vision.frames, 2 * max(1, max_model_len // frame)))
            video = frame * ceil_div(frames, 2)
        seen = video
        # Before the tower, the processor scales a frame down to a square of at most vision.left pixels.
        if vision.left:
            seen = min(image, (isqrt(vision.left) // unit) ** 2) * (video // image)
        found = {"image": (image, image * vision.merge**2), "video": (video, seen * vision.merge**2)}
        return found | others
    side = ceil_div(vision.image, unit) if vision.bound == "edge" else _padded(vision, unit)
    return {"image": (side * side, (side * vision.merge) ** 2)}


def _most_square(most: int) -> int:
    """Return the most embeddings, up to ``most``, of an image whose aspect ratio vLLM accepts.

    The number is a product height x width, both counted in embeddings.
    """
    for count in range(most, 0, -1):
        height = next(d for d in range(isqrt(count), 0, -1) if count % d == 0)
        if count // height <= _ASPECT * height:
            return count
    return 1


def _padded(vision: Vision, unit: int) -> int:
    """Return the embeddings per side of the largest square image; one covers ``unit`` x ``unit`` pixels.

    An image with more patches than the model's limit is scaled down to the limit, and then padded to whole
    embeddings. The rule is get_num_image_tokens in models/kimi_vl.py.
    """
    whole = (vision.side // vision.patch) ** 2
    side = vision.side
    if whole > vision.image:
        side = int(side * (vision.image / whole) ** 0.5)
    return ceil_div(side, unit)
