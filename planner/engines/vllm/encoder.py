"""vLLM on a GPU: what its profile run allocates for pictures, and what of that stays for the language model's.

Derived from vLLM 0.19 to 0.33 (profile_run in v1/worker/gpu_model_runner.py, profile_encoder_cache in
v1/worker/gpu/mm/encoder_runner.py, forward of the towers in model_executor/models). Assumed: FlashAttention in
the tower, as on any NVIDIA GPU from Ampere on; towers are not compiled (compile_mm_encoder is off).

Of each patch, a layer holds at its widest (h: hidden size, a: attention's width and i: the MLP's, of a rank):
the residual and what went into the block (h each), projections, rotated copies and the output of attention, or
the MLP's inner values. A module's arguments stay alive while it runs (nn.Module.__call__ keeps them).
"""

from __future__ import annotations

from tonnage.planner.engines.vllm.multimodal import Profiled, drops_towers, profiled, shares_pictures
from tonnage.planner.engines.vllm.versions import Rules, on_second_runner, rules
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.dtypes import DTYPE_BYTES
from tonnage.planner.model.vision import Tower, Vision
from tonnage.planner.plans import Resolved
from tonnage.planner.records import dataclass
from tonnage.planner.units import ceil_div


@dataclass(frozen=True, slots=True)
class _Layer:
    """Widths that are alive at once: ``attention`` = (h, a), ``mlp`` = (h, i), ``eager`` the i of
    --enforce-eager, where activations run as one kernel each (CustomOp, config/compilation.py). Through all
    layers: ``kept`` x h, and ``rotary`` values for each of a head's (float32 counts twice)."""

    attention: tuple[int, int]
    mlp: tuple[int, int]
    eager: int
    kept: int = 0
    rotary: int = 1


# Held against what vLLM's own modules allocate on a CPU (tests/data/oracles/vllm_towers.json):
# qwen2_vl.py, qwen2_5_vl.py, qwen3_vl.py: fused projection (3a), queries and keys side by side (2a) and rotated
# (2a), output (a) and what it is projected to (h); qwen3 keeps the positions;
# siglip.py, clip.py: projection (3a), output (a); these and the next two keep the embeddings of the patches;
# pixtral.py: rotated queries and keys twice (4a);
# moonvit.py: queries and keys as complex float32 before and after rotation (8a), and as they go on (2a).
_LAYERS: dict[Tower, _Layer] = {
    "qwen2": _Layer((3, 8), (3, 3), 2),
    "qwen2_5": _Layer((3, 8), (4, 4), 3),
    "qwen3": _Layer((3, 8), (3, 2), 2, kept=1),
    "siglip": _Layer((3, 4), (3, 2), 2, kept=1, rotary=0),
    "clip": _Layer((3, 4), (3, 3), 2, kept=1, rotary=0),
    "pixtral": _Layer((2, 8), (5, 4), 3, kept=1, rotary=2),
    "moonvit": _Layer((2, 13), (4, 2), 2, kept=1, rotary=2),
}
# MoonViT's table of rotations: complex64 for every place of a grid of 512 x 512 (Rope2DPosEmb, moonvit.py)
_GRID, _COMPLEX64 = 512 * 512, 8
# Whose processors may hand over bytes, which the GPU turns into the model's dtype
# (supports_mm_device_do_normalize in models)
_ON_DEVICE = ("qwen2", "qwen2_5", "qwen3")


@dataclass(frozen=True, slots=True)
class Encoding:
    """Bytes: ``peak`` while the tower runs; ``kept`` of its embeddings (and, on the first model runner, its
    input) while the language model runs; ``deep``: buffers of the language model for deep features."""

    peak: int
    kept: int
    deep: int
    formula: str


def encoding(architecture: Architecture, chosen: Resolved) -> Encoding | None:
    """None: nothing is encoded."""
    vision, found, known = architecture.vision, profiled(architecture, chosen), rules(chosen.version)
    if vision is None:
        return None
    if drops_towers(architecture, chosen.flags, chosen.version):
        return Encoding(0, 0, 0, "")
    size = DTYPE_BYTES[chosen.flags.dtype]
    deep = vision.deep * chosen.max_num_batched_tokens * architecture.hidden_size * size
    second = on_second_runner(architecture, known)
    if found is None or (second and not known.runner_v2_encodes):
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
    made = found.count * found.tokens * vision.width * size
    # deep features of a picture are made on the way, the last layer's come behind them
    peak = given + patches * held * size + mask + table + made * vision.deep // (vision.deep + 1)
    kept = made + table + (0 if second else given)
    return Encoding(peak, kept, deep, _formula(found, patches, held, size, given, made, mask + table))


def widest(vision: Vision, ranks: int, eager: bool) -> int:
    """Elements of a patch that are alive at once, as it came from the processor left out."""
    layer, h = _LAYERS[vision.tower], vision.hidden
    reduced = h if ranks > 1 else 0  # all-reduce writes a tensor of its own
    attention = layer.attention[0] * h + ceil_div(layer.attention[1] * h, ranks) + reduced
    inner = ceil_div(vision.inner, ranks)
    mlp = layer.mlp[0] * h + (layer.eager if eager else layer.mlp[1]) * inner
    last = (layer.mlp[0] + 1) * h + inner + reduced  # the MLP's output beside what goes in
    return layer.kept * h + layer.rotary * vision.head_size + max(attention, mlp, last)


def table_bytes(vision: Vision) -> int:
    """What a tower makes once and keeps."""
    return _GRID * vision.head_size // 2 * _COMPLEX64 if vision.tower == "moonvit" else 0


def _mask(vision: Vision, known: Rules, patches: int, size: int) -> int:
    """Pixtral's mask of all pictures of a batch (generate_block_attention_mask; xFormers, not installed with
    vLLM, does without)."""
    return patches * patches * size if vision.tower == "pixtral" and known.pixtral_mask else 0


def _formula(found: Profiled, patches: int, held: int, size: int, given: int, made: int, more: int) -> str:
    beside = f" + mask and tables {more:,}" if more else ""
    return (
        f"{found.count} x the largest {found.modality} ({found.tokens:,} tokens; encoder cache "
        f"{found.budget:,}): input {given:,} + {patches:,} patches x {held:,} x {size}{beside}; "
        f"embeddings {made:,}"
    )
