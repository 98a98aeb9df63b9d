"""The language model InternLM2, and the vision-language models InternVL and Qianfan-OCR.

Shapes follow the published InternLM2 and InternVL files, transformers 5.19 (models/internvl) and vLLM 0.32.0
(models/internlm2.py, intern_vit.py, internvl.py). Only the text model has a KV cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tonnage.planner.errors import ConfigError, UnsupportedArchitecture
from tonnage.planner.families import common, towers
from tonnage.planner.families.family import RENAMED, Family
from tonnage.planner.families.multimodal import joined, text_of, vision_of
from tonnage.planner.families.registry import build_text
from tonnage.planner.families.tensors import Tensors
from tonnage.planner.model.architecture import Architecture, Rotary
from tonnage.planner.model.fields import Fields, shown

_TOP = (
    "text_config", "llm_config", "vision_config", "image_token_id", "image_seq_length", "projector_hidden_act",
    "vision_feature_layer", "vision_feature_select_strategy", "hidden_size", "vocab_size",
    "force_image_size", "max_dynamic_patch", "min_dynamic_patch", "dynamic_image_size", "use_thumbnail",
    "pad2square", "ps_version", "select_layer", "template", "use_backbone_lora", "use_llm_lora",
    "system_message", "image_fold", "output_attentions",
)  # fmt: skip
_DEFAULTS = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
    "num_channels": 3,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Names:
    """Names of the modules of an InternViT vision tower.

    ``inputs`` names the q, k and v projections, or their fused projection.
    """

    token: str
    positions: str
    patches: str
    layers: str
    inputs: tuple[str, ...]
    output: str
    norms: tuple[str, str]
    scales: tuple[str, str]


_PUBLISHED = _Names(
    "class_embedding", "position_embedding", "patch_embedding", "encoder.layers", ("attn.qkv",), "attn.proj",
    ("norm1", "norm2"), ("ls1", "ls2"),
)  # fmt: skip
_TRANSFORMERS = _Names(
    "cls_token", "position_embeddings", "patch_embeddings.projection", "encoder.layer",
    ("attention.q_proj", "attention.k_proj", "attention.v_proj"), "attention.projection_layer",
    ("layernorm_before", "layernorm_after"), ("lambda_1", "lambda_2"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Variant:
    """Options by which InternVL and Qianfan-OCR differ.

    Attributes:
        class_name: the model's class in transformers.
        names: module names of the vision tower.
        text: default model_type of the language model.
        tied: default of tie_word_embeddings.
        biased: default of the vision tower's attention_bias.
    """

    class_name: str
    names: _Names
    text: str
    tied: bool = False
    biased: bool = True

    def build(self, fields: Fields, model_type: str) -> Architecture:
        """Return the architecture of an InternVL or Qianfan-OCR model with transformers' config fields."""
        config = fields.mapping("text_config") or {}
        kind = config.get("model_type", self.text)
        text = text_of(fields, kind, config, tied=self.tied, either=self.tied)
        t, at = Tensors("vision"), "model.multi_modal_projector"
        tower = vision_of(fields)
        hidden = _tower(t, "model.vision_tower", tower, self.names, biased=self.biased)
        modules = (f"{at}.layer_norm", f"{at}.linear_1", f"{at}.linear_2")
        _connector(t, modules, fields, hidden, text.hidden_size)
        return joined(text, model_type, self.class_name, t)


def internlm2(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of an InternLM2 model, whose q, k and v projections are one matrix."""
    dims = common.heads_of(fields)
    layers, vocab = common.layers_and_vocab(fields)
    inner = fields.integer("intermediate_size", limit="width")
    bias = fields.boolean("bias", False)
    tied = fields.boolean("tie_word_embeddings", False)
    fields.ignore("pretraining_tp", "reward_token_id")
    t = Tensors()
    t.vocabulary("model.tok_embeddings", vocab, dims.hidden)
    for _, at in t.layers(layers, "model.layers"):
        t.fused_attention(f"{at}.attention", dims, qkv="wqkv", out="wo", bias=bias, out_bias=bias)
        t.gated_mlp(f"{at}.feed_forward", dims.hidden, inner, names=("w1", "w3", "w2"))
        t.norms(at, dims.hidden, "attention_norm", "ffn_norm")
    t.norm("model.norm", dims.hidden)
    t.head("output", vocab, dims.hidden, "model.tok_embeddings.weight" if tied else None)
    t.rotary(dims.head_size, "model.rotary_emb.")
    return common.decoder(
        fields, model_type, "InternLM2ForCausalLM", t, dims, layers=layers, inner=inner, vocab=vocab,
        rotary=Rotary(dims.head_size, 1),
    )  # fmt: skip


def _side(v: Fields, name: str, default: int) -> int:
    """Return the side length of an image or patch, in pixels, from a vision config's field.

    The field holds one number or a pair of equal numbers.
    """
    value = v.raw(name)
    if isinstance(value, list) and len(value) == 2 and value[0] == value[1]:
        return Fields({name: value[0]}).integer(name, limit="width")
    return v.integer(name, default, limit="width")


def _tower(t: Tensors, at: str, config: Mapping[str, Any], names: _Names, *, biased: bool = False) -> int:
    """Add the tensors of an InternViT tower and return its hidden size.

    ``names`` are the names of its modules. ``biased`` is the default of attention_bias.
    """
    v = Fields(config)
    sizes = towers.sizes(v, _DEFAULTS)
    hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
    common.divisible(hidden, sizes["num_attention_heads"], "hidden_size", "num_attention_heads")
    patch = _side(v, "patch_size", 14)
    side = _side(v, "image_size", 448) // patch
    fused = len(names.inputs) == 1
    normed = v.boolean("qk_normalization" if fused else "use_qk_norm", False)
    bias = v.boolean("qkv_bias", True) if fused else v.boolean("attention_bias", biased)
    kind = v.raw("norm_type") or "layer_norm"
    if kind not in ("layer_norm", "rms_norm"):
        raise UnsupportedArchitecture(
            f"{shown(kind)} is not layer_norm or rms_norm", field="vision_config.norm_type"
        )
    form = "layer" if kind == "layer_norm" else "rms"
    t.add(f"{at}.embeddings.{names.token}", (1, 1, hidden), "vision", "VisionEmbeddings")
    t.add(f"{at}.embeddings.{names.positions}", (1, side * side + 1, hidden), "vision", "VisionEmbeddings")
    towers.conv(t, f"{at}.embeddings.{names.patches}", (hidden, sizes["num_channels"], patch, patch), True)
    for i in range(sizes["num_hidden_layers"]):
        here = f"{at}.{names.layers}.{i}"
        for name in names.inputs:
            t.linear(f"{here}.{name}", 3 * hidden // len(names.inputs), hidden, bias=bias, shard="column")
        t.linear(f"{here}.{names.output}", hidden, hidden, bias=True, shard="row")
        if normed:
            for name in ("q_norm", "k_norm"):
                t.norm(f"{here}.{names.output.partition('.')[0]}.{name}", hidden)
        t.plain_mlp(f"{here}.mlp", hidden, inner, bias=True, names=("fc1", "fc2"))
        t.norms(here, hidden, *names.norms, kind=form)
        for name in names.scales:
            t.add(f"{here}.{name}", (hidden,), "vision", "VisionLayer")
    return hidden


def _connector(t: Tensors, modules: tuple[str, str, str], fields: Fields, hidden: int, out: int) -> None:
    """Add the tensors of the connector between vision tower (after pixel shuffling) and text model.

    ``modules`` are the names of the connector's norm and its two matrices.
    """
    ratio = fields.raw("downsample_ratio")
    ratio = 0.5 if ratio is None else ratio
    if not isinstance(ratio, int | float) or not 0 < ratio <= 1 or (1 / ratio) % 1:
        raise ConfigError(f"{shown(ratio)} is not 1 / n for a whole number n", field="downsample_ratio")
    merged = hidden * int(1 / ratio) ** 2
    t.role = "projector"
    norm, first, second = modules
    t.norm(norm, merged, "layer")
    t.linear(first, out, merged, bias=True)
    t.linear(second, out, out, bias=True)


def internvl_chat(fields: Fields, model_type: str, *, class_name: str = "InternVLChatModel") -> Architecture:
    """Return the architecture of an InternVL 1.5 to 3.5 model with the published field names (llm_config).

    H2OVL and Skywork-R1V have the same parts around other decoders (vLLM 0.32, models/h2ovl.py, skyworkr1v.py).
    """
    config = fields.mapping("llm_config")
    if config is None:
        raise ConfigError("missing", field="llm_config")
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise ConfigError(f"{shown(kind)} is not a string", field="llm_config.model_type")
    text = build_text(config, kind)
    fields.ignore("tie_word_embeddings")  # the language model's config decides if the head is tied
    t = Tensors("vision")
    hidden = _tower(t, "vision_model", vision_of(fields), _PUBLISHED)
    _connector(t, ("mlp1.0", "mlp1.1", "mlp1.3"), fields, hidden, text.hidden_size)
    return joined(text, model_type, class_name, t, "language_model.model.")


_family = partial(Family, ignored=_TOP, files=RENAMED)
FAMILIES = {
    "internlm2": Family(internlm2, files=RENAMED),
    "internvl": _family(
        _Variant("InternVLForConditionalGeneration", _TRANSFORMERS, "qwen2", tied=True, biased=False).build
    ),
    "qianfan_ocr": _family(
        _Variant("QianfanOCRForConditionalGeneration", replace(_TRANSFORMERS, layers="layers"), "qwen3").build
    ),
    # Intern-S1 has InternVL's tower and connector in front of a Qwen3 model (models/interns1.py of vLLM 0.32)
    "interns1": _family(_Variant("InternS1ForConditionalGeneration", _TRANSFORMERS, "qwen3").build),
    "internvl_chat": _family(internvl_chat),
    "h2ovl_chat": _family(partial(internvl_chat, class_name="H2OVLChatModel")),
    "skywork_chat": _family(partial(internvl_chat, class_name="SkyworkR1VChatModel")),
}
