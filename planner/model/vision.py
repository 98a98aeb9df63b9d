"""Vision: the tower that reads pictures for the language model, and how large its processor lets them be."""

from __future__ import annotations

from typing import Literal

from tonnage.planner.records import dataclass

Tower = Literal["qwen2", "qwen2_5", "qwen3", "siglip", "clip", "pixtral", "moonvit"]


@dataclass(frozen=True, slots=True)
class Vision:
    """One tower. A picture is cut into patches, and ``merge`` x ``merge`` of them become one embedding of
    ``width`` elements for the language model.

    ``tower``: whose forward pass an engine runs. ``hidden``, ``inner``, ``head_size``: widths of its layers.
    ``values``: of one patch, as it comes from the processor. ``deep``: layers of the language model that are
    given features of their own (they are in ``width``).

    ``bound``, what the processor keeps a picture to: ``pixels``, at most ``image`` of them (of a video
    ``video``, in ``frames`` at most that are each as large as a picture where ``video`` is 0); ``edge``,
    ``image`` pixels on the longer side; ``patches``, at most ``image`` of them, of pictures of ``side`` pixels;
    ``fixed``: ``image`` embeddings, of ``patches`` patches.
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
    side: int = 0
    patches: int = 0
    deep: int = 0

    @property
    def modalities(self) -> tuple[str, ...]:
        return ("image", "video") if self.frames else ("image",)
