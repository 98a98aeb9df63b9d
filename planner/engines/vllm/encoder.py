"""Memory that vLLM's profile run allocates for images on a GPU, and the part that remains afterwards.

The rules are derived from vLLM 0.19 to 0.33 (profile_run in v1/worker/gpu_model_runner.py,
profile_encoder_cache in v1/worker/gpu/mm/encoder_runner.py, forward of the vision towers in
model_executor/models). Two things are assumed: FlashAttention in the tower, as on any NVIDIA GPU from Ampere
on, and no compilation (compile_mm_encoder is off).

Symbols: h is the hidden size, a the attention's width and i the MLP's width on one rank. At its widest, a layer
holds per patch the residual and the block's input (h each). It also holds the attention's projections, rotated
copies and output, or the MLP's inner values. A module's arguments stay alive while it runs
(nn.Module.__call__).
"""

from __future__ import annotations

from dataclasses import dataclass

from tonnage.planner.engines.vllm.multimodal import Profiled, drops_towers, profiled, shares_pictures
from tonnage.planner.engines.vllm.versions import VersionRules, on_second_runner, rules
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.dtypes import DTYPE_BYTES
from tonnage.planner.model.vision import Tower, Vision
from tonnage.planner.plans import Resolved
from tonnage.planner.units import ceil_div


@dataclass(frozen=True, slots=True)
class _Layer:
    """The elements per patch that are alive at once in one layer of a vision tower, as multiples of its widths.

    h is the hidden size, a the attention's width and i the MLP's width on one rank.

    Attributes:
        attention: Multiples of (h, a) in the attention.
        mlp: Multiples of (h, i) in the MLP.
        eager: Multiple of i with --enforce-eager, where each activation function is one kernel (CustomOp,
            config/compilation.py).
        kept: Multiple of h that is alive through all layers.
        rotary: Multiple of the head size that the rotary tables take through all layers; float32 counts twice.
    """

    attention: tuple[int, int]
    mlp: tuple[int, int]
    eager: int
    kept: int = 0
    rotary: int = 1


# Live tensors of each vision tower, where a is the attention's width and h the hidden size. They were compared
# with the allocations of vLLM's own modules on a CPU (tests/data/oracles/vllm_towers.json).
# - qwen2_vl.py, qwen2_5_vl.py and qwen3_vl.py hold the fused projection (3a), queries and keys side by
#   side (2a) and rotated (2a), the output (a) and its projection (h). qwen3 keeps the positions.
# - siglip.py and clip.py hold the projection (3a) and the output (a). siglip, clip, pixtral, moonvit and llama4
#   keep the embeddings of the patches.
# - pixtral.py holds rotated queries and keys twice (4a).
# - moonvit.py and mllama4.py hold queries and keys as complex float32 before and after rotation (8a), and their
#   final form (2a).
# - minimax_m3/common/vision_tower.py holds queries and keys beside the projection (2a), and float32 tables of
#   three axes.
# - transformers' gemma4 computes its norms in float32.
# - timm's mobilenetv5 holds the stem's output, and the first convolution's output after its norm and
#   activation.
_LAYERS: dict[Tower, _Layer] = {
    "qwen2": _Layer((3, 8), (3, 3), 2),
    "qwen2_5": _Layer((3, 8), (4, 4), 3),
    "qwen3": _Layer((3, 8), (3, 2), 2, kept=1),
    "siglip": _Layer((3, 4), (3, 2), 2, kept=1, rotary=0),
    "clip": _Layer((3, 4), (3, 3), 2, kept=1, rotary=0),
    "pixtral": _Layer((2, 8), (5, 4), 3, kept=1, rotary=2),
    "moonvit": _Layer((2, 13), (4, 2), 2, kept=1, rotary=2),
    "llama4": _Layer((2, 13), (3, 2), 2, kept=1, rotary=0),
    "minimax": _Layer((2, 6), (3, 2), 2, rotary=6),
    "gemma4": _Layer((3, 7), (4, 3), 3, rotary=2),
    "mobilenet": _Layer((4, 0), (0, 0), 0, rotary=0),
}
# MoonViT's rotation table has complex64 values for every position of a 512 x 512 grid (Rope2DPosEmb,
# moonvit.py).
_GRID, _COMPLEX64 = 512 * 512, 8
# Towers whose processors may pass pixels as bytes, which the GPU converts to the model's dtype
# (supports_mm_device_do_normalize in models).
_ON_DEVICE = ("qwen2", "qwen2_5", "qwen3")
# Towers from other libraries, which ranks do not divide (AutoModel in models/gemma4_mm.py, gemma3n_mm.py).
_WHOLE = ("gemma4", "mobilenet")
# Gemma 4 encodes images in chunks. vLLM sizes a chunk so that its 64-bit one-hot positions, counted twice, fill
# this share of the device's memory (_encoder_chunk in models/gemma4_mm.py).
_PIECE = 0.1


@dataclass(frozen=True, slots=True)
class Encoding:
    """The GPU memory that images take in vLLM's profile run.

    Attributes:
        peak: Bytes while the vision tower runs.
        kept: Bytes that stay allocated while the language model runs: the image embeddings, and in vLLM's V1
            model runner also the tower's input.
        deep: Bytes of buffers for per-token inputs of the language model's inner layers, such as Qwen3-VL's
            image features or Gemma's per-layer embeddings.
        formula: The peak's formula with its numbers.
    """

    peak: int
    kept: int
    deep: int
    formula: str


def encoding(architecture: Architecture, chosen: Resolved, first: bool = True) -> Encoding | None:
    """Return the GPU memory that images take in vLLM's profile run, or None if the tower is not known.

    ``first`` is whether this is the first pipeline stage; the V2 model runner encodes only there.
    """
    vision, found, known = architecture.vision, profiled(architecture, chosen), rules(chosen.version)
    if vision is None:
        return None
    size = DTYPE_BYTES[chosen.flags.dtype]
    if drops_towers(architecture, chosen.flags, chosen.version):
        return Encoding(0, 0, _per_layer(architecture) * chosen.max_num_batched_tokens * size, "")
    deep = (
        (vision.deep * architecture.hidden_size + _per_layer(architecture))
        * chosen.max_num_batched_tokens
        * size
    )
    second = on_second_runner(architecture, known)
    if found is None or (second and not (first and known.runner_v2_encodes)):
        return Encoding(0, 0, deep, "")
    data = shares_pictures(architecture, chosen.flags)
    ranks = chosen.flags.tensor_parallel_size
    items = ceil_div(found.count, ranks) if data else found.count
    patches = items * found.patches
    held = widest(vision, 1 if data else ranks, chosen.flags.enforce_eager)
    mask = _mask(vision, known, patches, size)
    table = table_bytes(vision)
    width = 1 if known.pixels_as_bytes and vision.tower in _ON_DEVICE else size
    given = found.count * found.patches * vision.values * width
    tokens = min(found.tokens, found.patches // vision.merge**2) if found.patches else found.tokens
    made = found.count * tokens * vision.width * size
    # While the tower's layers run, the features of its inner layers (vision.deep) are already alive. Those of
    # the last layer are not.
    running = _running(vision, known, chosen, patches, _one(vision, found), held)
    peak = given + running + mask + table + made * vision.deep // (vision.deep + 1)
    stored = made
    padded = {"": tokens, "item": found.tokens, "budget": found.budget}[known.padded_embeddings]
    if padded > tokens:  # padded copies of the embeddings exist beside the tower's output
        stored = found.count * padded * vision.width * size
        peak = max(peak, given + table + made + stored)
    kept = stored + table + (0 if second else given)
    return Encoding(peak, kept, deep, _formula(found, patches, running, given, stored, mask + table))


def _per_layer(architecture: Architecture) -> int:
    """Return the width of Gemma's per-layer token embeddings, which vLLM's multimodal class buffers."""
    name = "per_layer_model_projection.weight"
    return next((tensor.shape[0] for tensor in architecture.tensors if tensor.name.endswith(name)), 0)


def widest(vision: Vision, ranks: int, eager: bool) -> int:
    """Return the largest number of elements per patch that are alive at once in the vision tower.

    The tower's input is not counted.

    ``ranks`` is the number of ranks that divide the tower, ``eager`` whether --enforce-eager is set.
    """
    layer, h = _LAYERS[vision.tower], vision.hidden
    if vision.tower in _WHOLE:
        ranks = 1
    reduced = h if ranks > 1 else 0  # all-reduce writes a separate output tensor of width h
    attention = layer.attention[0] * h + ceil_div(layer.attention[1] * h, ranks) + reduced
    inner = ceil_div(vision.inner, ranks)
    mlp = layer.mlp[0] * h + (layer.eager if eager else layer.mlp[1]) * inner
    # Elements per patch that are alive during the MLP's last matrix product.
    last = (layer.mlp[0] + 1) * h + inner + reduced
    middle, out = vision.projector
    projected = h + max(2 * ceil_div(middle, ranks), ceil_div(middle, ranks) + out * (2 if ranks > 1 else 1))
    widest = layer.rotary * vision.head_size + max(attention, mlp, last)
    return (layer.kept + vision.pooled) * h + max(widest, projected if middle else 0)


def table_bytes(vision: Vision) -> int:
    """Return the bytes of the rotation tables that a vision tower computes once and keeps."""
    return _GRID * vision.head_size // 2 * _COMPLEX64 if vision.tower == "moonvit" else 0


def _mask(vision: Vision, known: VersionRules, patches: int, size: int) -> int:
    """Return the bytes of Pixtral's attention mask over all images of a batch.

    The source is generate_block_attention_mask. With xFormers, which vLLM does not install, no mask is needed.
    """
    return patches * patches * size if vision.tower == "pixtral" and known.pixtral_mask else 0


def _one(vision: Vision, found: Profiled) -> int:
    """Return the number of patches in an image, or in one frame of a video."""
    frames = {item.modality: item.frames for item in vision.others}
    return found.patches // frames.get(found.modality, 1)


def _running(
    vision: Vision, known: VersionRules, chosen: Resolved, patches: int, one: int, held: int
) -> int:  # fmt: skip
    """Return the bytes that the tensors of the vision tower's layers take while the tower runs.

    Most towers encode all patches at once. Gemma 4's tower encodes them in chunks and keeps each chunk's
    output. In vLLM versions that do not size chunks by memory, a chunk is one image of ``one`` patches.

    Args:
        vision: The vision tower.
        known: Rules of the vLLM version.
        chosen: Flags and sizes of the plan.
        patches: Patches of all images together.
        one: Patches of one image.
        held: Elements per patch that are alive at once.
    """
    size = DTYPE_BYTES[chosen.flags.dtype]
    if not vision.places:
        return patches * held * size
    # A patch has one-hot positions of 64 bits on two axes. vLLM counts each of them twice.
    counted = 4 * vision.places * 8
    most = max(vision.patches, int(_PIECE * chosen.device_memory) // counted)
    piece = min(patches, most) if known.gemma4_batches else one
    positions = 2 * vision.places * (8 + size) if known.one_hot_positions else 0
    return piece * max(held * size, positions) + (patches if piece < patches else 0) * vision.hidden * size


def _formula(found: Profiled, patches: int, running: int, given: int, made: int, more: int) -> str:
    beside = f" + mask and tables {more:,}" if more else ""
    return (
        f"{found.count} x the largest {found.modality} ({found.tokens:,} tokens; encoder cache "
        f"{found.budget:,}): input {given:,} + {patches:,} patches {running:,}{beside}; "
        f"embeddings {made:,}"
    )
