"""Llama 3.2 with images: layers with cross attention read the output of a vision tower.

Shapes follow transformers 5.19, models/mllama/.
"""

from __future__ import annotations

from tonnage.planner.families import common, towers
from tonnage.planner.families.family import RENAMED, Family
from tonnage.planner.families.multimodal import TOP, joined, text_of, vision_of
from tonnage.planner.families.tensors import Tensors
from tonnage.planner.model.architecture import Architecture, CacheLayer
from tonnage.planner.model.fields import Fields


def mllama(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of the multimodal Llama 3.2 from its checked config."""
    text = text_of(fields, "mllama_text_model", fields.mapping("text_config"))
    t = Tensors("vision")
    width = towers.mllama(t, "model.vision_model", vision_of(fields))
    t.role = "projector"
    t.linear("model.multi_modal_projector", text.hidden_size, width, bias=True)
    return joined(text, model_type, "MllamaForConditionalGeneration", t)


def mllama_text(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of Llama 3.2's text model: Llama with gated cross-attention layers.

    The K and V of these layers come from the image and are computed once per sequence.
    """
    dims = common.heads_of(fields)
    layers, vocab = common.layers_and_vocab(fields)
    inner = fields.integer("intermediate_size", limit="width")
    tied = fields.boolean("tie_word_embeddings", False)
    default = [3, 8, 13, 18, 23, 28, 33, 38]
    crossing = common.layer_indices(fields, "cross_attention_layers", layers, default)
    fields.ignore("dropout")
    t = Tensors()
    # the embedding has eight more rows than the head, for image tokens
    t.vocabulary("model.embed_tokens", vocab + 8, dims.hidden)
    cache = []
    for i, at in t.layers(layers, "model.layers"):
        if i in crossing:
            t.attention(f"{at}.cross_attn", dims, qk_norm="head")
            t.add(f"{at}.cross_attn_attn_gate", (1,), "attention", "CrossAttentionDecoderLayer")
            t.add(f"{at}.cross_attn_mlp_gate", (1,), "attention", "CrossAttentionDecoderLayer")
            cache.append(CacheLayer(i, "cross", None, dims.kv_heads, dims.head_size))
        else:
            t.attention(f"{at}.self_attn", dims)
            cache.append(CacheLayer(i, "full", None, dims.kv_heads, dims.head_size))
        t.gated_mlp(f"{at}.mlp", dims.hidden, inner)
        t.layer_norms(at, dims.hidden)
    t.close("model.norm", "model.embed_tokens", vocab, dims.hidden, tied)
    t.rotary(dims.head_size, "model.rotary_emb.")
    return common.decoder(
        fields, model_type, "MllamaForCausalLM", t, dims, tuple(cache), layers=layers, inner=inner, vocab=vocab
    )


FAMILIES = {
    "mllama": Family(mllama, ignored=TOP, files=RENAMED),
    "mllama_text_model": Family(mllama_text, ignored=TOP, absent={"num_key_value_heads": 8}),
}
