"""Vision-language models with remote code, whose config.json has the language model's fields at the top level.

Families: Phi-3-vision and MiniCPM-V 2.5 to 4.5. Shapes follow vLLM 0.32.0 (models/phi3v.py, minicpmv.py,
layers/resampler.py) and the parameter counts in the safetensors headers of the published files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tonnage.planner.errors import ConfigError, UnsupportedArchitecture
from tonnage.planner.families import towers
from tonnage.planner.families.family import RENAMED, Family
from tonnage.planner.families.llava import CLIP
from tonnage.planner.families.multimodal import joined, text_of, vision_of
from tonnage.planner.families.tensors import Tensors
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.fields import Fields, shown

_PHI = ("img_processor", "embd_layer")
_MINICPM = (
    "vision_config", "query_num", "version", "slice_config", "slice_mode", "use_image_id", "vision_batch_size",
    "batch_vision_input", "drop_vision_last_layer", "image_size", "patch_size", "batch_3d_resampler",
)  # fmt: skip
# version of MiniCPM-V -> model_type of its language model (init_llm in models/minicpmv.py)
_LANGUAGE = {2.5: "llama", 2.6: "qwen2", 4.0: "llama", 4.5: "qwen3"}
_SIGLIP = {
    "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
    "num_channels": 3, "image_size": 980, "patch_size": 14,
}  # fmt: skip


def _text(fields: Fields, text_type: str, outside: tuple[str, ...]) -> Architecture:
    """Return the architecture of the language model whose fields are at the top level of a config.

    The config fields ``outside`` belong to other modules, such as the vision tower, and are left out.
    """
    left = (*outside, "architectures", "auto_map", "model_type")
    config: Mapping[str, Any] = {name: value for name, value in fields.config.items() if name not in left}
    fields.ignore(*fields.config)
    return text_of(fields, text_type, config, either=True)


def phi3_v(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of Phi-3-vision: Phi-3 and CLIP, whose patches are merged four to one."""
    told = fields.mapping("img_processor") or {}
    if told.get("model_name", CLIP) != CLIP:
        raise UnsupportedArchitecture(
            f"{shown(told['model_name'])} is not supported; only {CLIP} is", field="img_processor.model_name"
        )
    layer = fields.mapping("embd_layer") or {}
    if layer.get("projection_cls", "mlp") != "mlp":
        raise UnsupportedArchitecture(
            f"{shown(layer['projection_cls'])} is not supported; only mlp is", field="embd_layer.projection_cls"
        )
    separated = layer.get("with_learnable_separator", True) is True
    text = _text(fields, "phi3", _PHI)
    t, at = Tensors("vision"), "model.vision_embed_tokens"
    width = 4 * towers.clip(t, f"{at}.img_processor.vision_model", {}, towers.LLAVA_CLIP)
    t.role = "projector"
    if separated:
        t.add(f"{at}.glb_GN", (1, 1, width), "projector", "Phi3ImageEmbedding")
        t.add(f"{at}.sub_GN", (1, 1, 1, width), "projector", "Phi3ImageEmbedding")
    t.connector(f"{at}.img_projection", width, text.hidden_size, text.hidden_size, names=("0", "2"))
    return joined(text, model_type, "Phi3VForCausalLM", t, "model.")


def minicpmv(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of MiniCPM-V 2.5 to 4.5: a decoder, SigLIP and a resampler."""
    version = fields.raw("version")
    version = 2.5 if version is None else version  # MiniCPM-V 2.5's files state no version
    if not isinstance(version, int | float | str):
        raise ConfigError(f"{shown(version)} is not a version number such as 2.6", field="version")
    kind = _LANGUAGE.get(float(version)) if str(version).replace(".", "", 1).isdigit() else None
    if kind is None:
        raise UnsupportedArchitecture(
            f"{shown(version)} is not supported; only {', '.join(map(str, _LANGUAGE))} are", field="version"
        )
    queries = fields.integer("query_num", 64, limit="width")
    dropped = fields.boolean("drop_vision_last_layer", True)
    vision = vision_of(fields)
    text = _text(fields, kind, _MINICPM)
    t = Tensors("vision")
    layers = Fields(vision).integer("num_hidden_layers", 27, limit="layers") - dropped
    tower = {**vision, "num_hidden_layers": layers, "vision_use_head": False}
    kept = towers.siglip(t, "vpm", tower, _SIGLIP)
    t.role, at, width = "projector", "resampler", text.hidden_size
    t.add(f"{at}.query", (queries, width), "projector", "Resampler")
    t.add(f"{at}.proj", (width, width), "projector", "Resampler")
    if kept != width:
        t.linear(f"{at}.kv_proj", width, kept)
    t.add(f"{at}.attn.in_proj_weight", (3 * width, width), "projector", "MultiheadAttention")
    t.add(f"{at}.attn.in_proj_bias", (3 * width,), "projector", "MultiheadAttention")
    t.linear(f"{at}.attn.out_proj", width, width, bias=True, module_class="OutProjection")
    t.norms(at, width, "ln_q", "ln_kv", "ln_post", kind="layer")
    t.buffer(f"{at}.pos_embed", (70, 70, width), "Resampler", "float32")
    return joined(text, model_type, "MiniCPMV", t, "llm.model.")


FAMILIES = {
    "phi3_v": Family(phi3_v, files=RENAMED),
    "minicpmv": Family(minicpmv, files=RENAMED),
}
