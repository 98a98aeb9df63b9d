"""Data types for vision towers, which encode images for the language model, and for their input limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Tower = Literal[
    "qwen2",
    "qwen2_5",
    "qwen3",
    "siglip",
    "clip",
    "pixtral",
    "moonvit",
    "llama4",
    "minimax",
    "gemma4",
    "mobilenet",
]


@dataclass(frozen=True, slots=True)
class Item:
    """The largest input item of one modality (an image, a video or an audio clip).

    Attributes:
        tokens: embeddings that the language model receives for the item.
        patches: patches that the vision tower encodes; 0 if another tower encodes the item.
        frames: number of images in the item (frames of a video).
    """

    modality: str
    tokens: int
    patches: int = 0
    frames: int = 1


@dataclass(frozen=True, slots=True)
class Vision:
    """A vision tower with the sizes of its layers, and the processor's limits on image and video size.

    An image is cut into patches. A square of merge x merge patches becomes one embedding of `width` elements.

    `bound` is the kind of limit that the processor applies to images:

    - `pixels`: at most `image` pixels. A video has at most `video` pixels in total. If `video` is 0, a video
      has at most `frames` frames of at most `frame` pixels (0 means the limit of an image). The processor
      scales each frame down to `left` pixels (0 means that it does not).
    - `edge`: at most `image` pixels on the longer side.
    - `patches`: at most `image` patches. The engine profiles an image of `side` x `side` pixels.
    - `fixed`: `image` embeddings from `patches` patches. A video has at most `frames` frames, each of `frame`
      embeddings from `left` patches.

    Attributes:
        tower: name of the tower's implementation (forward pass) in the engine.
        hidden: width of the tower's layers.
        inner: width of the MLP in these layers.
        head_size: elements per attention head.
        patch: side length of a patch in pixels.
        values: input values of one patch.
        deep: number of language-model layers that receive additional image features; `width` includes these
            features.
        places: rows of a learned position table that the tower multiplies by one-hot vectors of the patches'
            positions; 0 without such a table.
        projector: (inner, output) width of a projector that is applied to each patch before merging.
        pooled: number of layers whose hidden states are kept until the end of the forward pass.
        others: largest items of other modalities, if their size is fixed.
    """

    tower: Tower
    hidden: int
    inner: int
    head_size: int
    patch: int
    merge: int
    values: int
    width: int
    bound: Literal["pixels", "edge", "patches", "fixed"]
    image: int
    video: int = 0
    frames: int = 0
    frame: int = 0
    left: int = 0
    side: int = 0
    patches: int = 0
    deep: int = 0
    places: int = 0
    projector: tuple[int, int] = (0, 0)
    pooled: int = 0
    others: tuple[Item, ...] = ()

    @property
    def modalities(self) -> tuple[str, ...]:
        """Return the modalities that the model accepts: image, video and the modalities of `others`."""
        mine = ("image", "video") if self.frames else ("image",)
        return mine + tuple(item.modality for item in self.others)
