"""Vision towers, which encode images for the language model, and the image sizes of their processors."""

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
    """The largest input item (image, video, audio) of one modality.

    Attributes:
        tokens: embeddings that the language model receives for the item.
        patches: patches that the vision tower encodes; 0 if another tower encodes the item.
        frames: number of images in the item.
    """

    modality: str
    tokens: int
    patches: int = 0
    frames: int = 1


@dataclass(frozen=True, slots=True)
class Vision:
    """A vision tower, its input sizes, and the processor's limit on a picture's size.

    A picture is cut into patches; merge x merge patches become one embedding of `width` elements.

    `bound` says how the processor limits a picture:

    - `pixels`: at most `image` pixels. A video has at most `video` pixels in total. If `video` is 0, a video
      has at most `frames` frames, of which `left` remain (0: all). A frame has at most `frame` pixels (0: as
      large as a picture).
    - `edge`: at most `image` pixels on the longer side.
    - `patches`: at most `image` patches, from pictures of `side` pixels.
    - `fixed`: `image` embeddings from `patches` patches. A video has at most `frames` frames, each of `frame`
      embeddings from `left` patches.

    Attributes:
        tower: the forward pass that an engine runs for this tower.
        hidden: width of the tower's layers.
        inner: width of the MLP in these layers.
        head_size: elements per attention head.
        patch: pixels on the side of a patch.
        values: input values of one patch.
        deep: layers of the language model with picture features of their own (`width` includes these).
        places: rows of a position table that is interpolated by a matrix product per patch; 0 without one.
        projector: inner and outer width of a projector applied to each patch before merging.
        pooled: number of layers whose hidden states are read at the end.
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
        """Return the modalities that the tower accepts: image, video and the modalities of `others`."""
        mine = ("image", "video") if self.frames else ("image",)
        return mine + tuple(item.modality for item in self.others)
