"""Vision-language models that only vLLM has a class for: dots.ocr, Step 3 and Eagle 2.5.

Shapes follow vLLM 0.32.0 (models/dots_ocr.py, step3_vl.py, eagle2_5_vl.py) and its config classes.
Only the text model has a KV cache.
"""

from __future__ import annotations

from functools import partial

from tonnage.planner.errors import ConfigError
from tonnage.planner.families import common, towers
from tonnage.planner.families.family import RENAMED, Family
from tonnage.planner.families.multimodal import joined, text_of, vision_of
from tonnage.planner.families.registry import build_text
from tonnage.planner.families.tensors import Tensors
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.fields import Fields

_TOP = (
    "text_config", "vision_config", "image_token_id", "video_token_id", "image_token_index", "image_token_len",
    "patch_token_len", "img_start_token_id", "img_end_token_id", "force_image_size", "select_layer", "template",
    "dynamic_image_size", "use_thumbnail", "min_dynamic_tiles", "max_dynamic_tiles", "pad2square",
    "mlp_checkpoint", "loss_version", "use_backbone_lora", "use_llm_lora", "hidden_size", "vocab_size",
    "projector_hidden_act",
)  # fmt: skip
_DOTS = {
    "embed_dim": 1536, "hidden_size": 1536, "intermediate_size": 4224, "num_hidden_layers": 42,
    "num_attention_heads": 12, "num_channels": 3, "patch_size": 14, "spatial_merge_size": 2,
}  # fmt: skip
_STEP3 = {
    "hidden_size": 1792, "intermediate_size": 3072, "output_hidden_size": 4096, "num_hidden_layers": 63,
    "num_channels": 3, "image_size": 728, "patch_size": 14,
}  # fmt: skip


def dots(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of dots.ocr: a Qwen2 model, whose fields are at the top level, and a tower."""
    vision = vision_of(fields)
    own = ("architectures", "vision_config", "model_type", "image_token_id", "video_token_id", "auto_map")
    text = build_text({k: v for k, v in fields.config.items() if k not in own}, "qwen2")
    fields.ignore(*fields.config)
    f = Fields(vision)
    v = towers.sizes(f, _DOTS)
    width, bias = v["embed_dim"], f.boolean("use_bias", False)
    t, at = Tensors("vision"), "vision_tower"
    shape = (width, v["num_channels"], v["patch_size"], v["patch_size"])
    towers.conv(t, f"{at}.patch_embed.patchifier.proj", shape, True)
    t.norm(f"{at}.patch_embed.patchifier.norm", width)
    for i in range(v["num_hidden_layers"]):
        here = f"{at}.blocks.{i}"
        t.norm(f"{here}.norm1", width)
        t.linear(f"{here}.attn.qkv", 3 * width, width, bias=bias, shard="column")
        t.linear(f"{here}.attn.proj", width, width, bias=bias, shard="row")
        t.norm(f"{here}.norm2", width)
        t.gated_mlp(f"{here}.mlp", width, v["intermediate_size"], bias=bias, names=("fc1", "fc3", "fc2"))
    if f.boolean("post_norm", True):
        t.norm(f"{at}.post_trunk_norm", width)
    t.role, merged = "projector", width * v["spatial_merge_size"] ** 2
    t.norm(f"{at}.merger.ln_q", width, "layer")
    t.linear(f"{at}.merger.mlp.0", merged, merged, bias=True, shard="column")
    t.linear(f"{at}.merger.mlp.2", v["hidden_size"], merged, bias=True, shard="row")
    if v["hidden_size"] != text.hidden_size:
        raise ConfigError(
            f"{v['hidden_size']} is not the text model's hidden size, {text.hidden_size}",
            field="vision_config.hidden_size",
        )
    return joined(text, model_type, "DotsOCRForCausalLM", t, "model.")


def step3(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of the multimodal Step 3 from its checked config."""
    text = text_of(fields, "step3_text", fields.mapping("text_config"), tie=False)
    v = towers.sizes(Fields(vision_of(fields)), _STEP3)
    hidden, out = v["hidden_size"], v["output_hidden_size"]
    t, at = Tensors("vision"), "vision_model"
    t.add(f"{at}.embeddings.class_embedding", (1, hidden), "vision", "VisionEmbeddings")
    shape = (hidden, v["num_channels"], v["patch_size"], v["patch_size"])
    towers.conv(t, f"{at}.embeddings.patch_embedding", shape, True)
    t.embedding(f"{at}.embeddings.position_embedding", (v["image_size"] // v["patch_size"]) ** 2 + 1, hidden)
    for i in range(v["num_hidden_layers"]):
        here = f"{at}.transformer.layers.{i}"
        t.norm(f"{here}.layer_norm1", hidden, "layer")
        t.linear(f"{here}.self_attn.qkv_proj", 3 * hidden, hidden, bias=True, shard="column")
        t.linear(f"{here}.self_attn.out_proj", hidden, hidden, bias=True, shard="row")
        t.norm(f"{here}.layer_norm2", hidden, "layer")
        t.plain_mlp(f"{here}.mlp", hidden, v["intermediate_size"], bias=True, names=("fc1", "fc2"))
    t.role = "projector"
    towers.conv(t, "vit_downsampler", (out, hidden, 2, 2), True)
    towers.conv(t, "vit_downsampler2", (2 * out, out, 3, 3), True)
    bias = fields.boolean("projector_bias", True)
    t.linear("vit_large_projector", text.hidden_size, 2 * out, bias=bias)
    fields.ignore("understand_projector_stride")
    return joined(text, model_type, "Step3VLForConditionalGeneration", t, "model.")


def eagle(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of Eagle 2.5: SigLIP, pixel shuffling and a Qwen2 model."""
    text = text_of(fields, "qwen2", fields.mapping("text_config"), either=True)
    t = Tensors("vision")
    tower = {"vision_use_head": False, **vision_of(fields)}
    common.only(fields, select_layer=-1, downsample_ratio=0.5)  # -1 selects the vision tower's last layer
    hidden = towers.siglip(t, "vision_model.vision_model", tower)
    t.role, merged = "projector", 4 * hidden
    t.norm("mlp1.0", merged, "layer")
    t.connector("mlp1", merged, text.hidden_size, text.hidden_size, names=("1", "3"))
    return joined(text, model_type, "Eagle2_5_VLForConditionalGeneration", t, "language_model.model.")


_family = partial(Family, ignored=_TOP, files=RENAMED)
FAMILIES = {
    "dots_ocr": _family(dots),
    "step3_vl": _family(step3),
    "eagle_2_5_vl": _family(eagle),
}
