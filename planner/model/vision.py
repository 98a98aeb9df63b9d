"""Vision: the tower that reads pictures for the language model, and how large its processor lets them be."""

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
    """The largest of a modality: ``tokens`` embeddings, of ``patches`` patches (0: another tower's) in
    ``frames`` pictures."""

    modality: str
    tokens: int
    patches: int = 0
    frames: int = 1


@dataclass(frozen=True, slots=True)
class Vision:
    """One tower. A picture is cut into patches, and ``merge`` x ``merge`` of them become one embedding of
    ``width`` elements for the language model.

    ``tower``: whose forward pass an engine runs. ``hidden``, ``inner``, ``head_size``: widths of its layers.
    ``values``: of one patch, as it comes from the processor. ``deep``: layers of the language model that are
    given features of their own (they are in ``width``). ``places``: rows of its table of positions, where
    each patch is given its own by a product with the table. ``projector``: inner and outer width of one that
    takes each patch before they are merged. ``pooled``: hidden states of so many layers are read in the end.

    ``bound``, what the processor keeps a picture to: ``pixels``, at most ``image`` of them (of a video
    ``video``, in ``frames`` at most that are each of ``frame`` pixels where ``video`` is 0, as large as a
    picture where that is 0, and of which the processor leaves ``left``, if that is not 0); ``edge``, ``image``
    pixels on the longer side; ``patches``, at most ``image`` of them, of pictures of ``side`` pixels;
    ``fixed``: ``image`` embeddings, of ``patches`` patches (of a video ``frames`` at most, each of ``frame``
    embeddings, of ``left`` patches). ``others``: what is fixed of other modalities.
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
        mine = ("image", "video") if self.frames else ("image",)
        return mine + tuple(item.modality for item in self.others)
