"""Options of each family of dense decoders with Llama's structure; dense.py builds the architecture from them.

Shapes follow transformers 5.19, models/<family>/modeling_<family>.py. For families whose tensors these options
cannot express, a small function adds tensors.
"""

from __future__ import annotations

from dataclasses import replace

from tonnage.planner.errors import ConfigError, UnsupportedArchitecture
from tonnage.planner.families import common
from tonnage.planner.families.dense import DenseVariant, SwitchedNorms, with_sinks
from tonnage.planner.families.family import (
    LORA_ON_VOCABULARY,
    QV,
    QV_DOWN,
    Family,
    GGUFTraits,
    Values,
    VLLMTraits,
)
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.fields import Fields
from tonnage.planner.model.recipe import Attention, Layer, Mlp, Norm
from tonnage.planner.model.tensor import Role, TensorSpec

_ATTENTION_BIAS = ("attention_bias", False)
_POST_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")
_PLAIN = ("up_proj", "down_proj")
_FUSED = ("gate_up_proj", "down_proj")


def _granite(name: str) -> DenseVariant:
    """Return the options of class ``name``: Llama with biases if attention_bias or mlp_bias is set."""
    return DenseVariant(name, _ATTENTION_BIAS, _ATTENTION_BIAS, ("mlp_bias", False))


def _hyperclovax(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of a HyperCLOVA X model: Granite with norms after attention and MLP."""
    variant = _granite("HyperCLOVAXForCausalLM")
    if fields.boolean("use_post_norm", True):
        norms = ("input_layernorm", "post_norm1", "post_attention_layernorm", "post_norm2")
        variant = replace(variant, flow="sandwich", norms=norms)
    return variant.build(fields, model_type)


def _granite_swa(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of a dense Granite model with sliding windows and sinks."""
    if fields.raw("layer_types") is None:
        raise ConfigError("missing", field="layer_types")
    variant = replace(_granite("GraniteSWAForCausalLM"), window="pattern", default_window=128, tied=True)
    return with_sinks(variant.build(fields, model_type), fields)


def _internlm3(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of an InternLM3 model.

    transformers 5.23 builds the model from Llama's classes. One config field sets the biases of attention and
    MLP.
    """
    name = "attention_bias"
    if fields.boolean(name, False) != fields.boolean("mlp_bias", False):
        raise UnsupportedArchitecture(
            "differs from mlp_bias, but transformers' class has one option for both biases",
            field=fields.name(name),
        )
    return _granite("LlamaForCausalLM").build(fields, model_type)


def _iquestcoder(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of an IQuest-Coder model, which transformers 5.23 builds from Llama's classes.

    A config option that Llama's classes lack raises an error; no published config sets one.
    """
    common.refuse(fields, "clip_qkv", "use_sliding_window")
    return _granite("LlamaForCausalLM").build(fields, model_type)


def _bitnet(attention: Attention, mlp: Mlp, layer: Layer) -> Layer:
    """Return a BitNet layer's description: norms precede the output projections of attention and MLP."""
    a, m = layer.branches
    dims = attention.heads
    attention = replace(attention, before_out=Norm("attn_sub_norm", dims.heads * dims.head_size))
    mlp = replace(mlp, before_out=Norm("ffn_sub_norm", mlp.inner))
    return replace(layer, branches=(replace(a, module=attention), replace(m, module=mlp)))


def _apertus(attention: Attention, mlp: Mlp, layer: Layer) -> Layer:
    """Return an Apertus layer's description: its activation xIELU has two learned and two fixed scalars."""
    at, owner = "mlp.act_fn", "XIELUActivation"
    learned = [TensorSpec(f"{at}.{name}", (1,), "mlp", owner) for name in ("alpha_p", "alpha_n")]
    fixed = [TensorSpec(f"{at}.{name}", (), "buffer", owner, stored="model") for name in ("beta", "eps")]
    return replace(layer, extra=(*learned, *fixed))


def _diffllama(attention: Attention, mlp: Mlp, layer: Layer) -> Layer:
    """Return a DiffLlama layer's description: four vectors weight its two attention maps."""
    names = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")
    shape, owner = (attention.heads.head_size,), "DiffLlamaAttention"
    return replace(
        layer, extra=tuple(TensorSpec(f"self_attn.{name}", shape, "attention", owner) for name in names)
    )


def _doge(attention: Attention, mlp: Mlp, layer: Layer) -> Layer:
    """Return a Doge layer's description: dynamic mask attention and a residual weight per channel."""
    dims = attention.heads
    role: Role = "attention"
    extra = [
        TensorSpec("self_attn.A", (dims.kv_heads,), role, "DogeAttention", shard_dim=0),
        TensorSpec("self_attn.dt_proj.weight", (dims.kv_heads, dims.kv_heads * dims.head_size), role, "Linear"),
    ]
    if attention.bias:
        extra.append(TensorSpec("self_attn.dt_proj.bias", (dims.kv_heads,), role, "Linear"))
    weights = ("input_residual", "post_attention_residual")
    branches = (replace(b, weighted=w) for b, w in zip(layer.branches, weights, strict=True))
    return replace(layer, branches=tuple(branches), extra=tuple(extra))


_GGUF_NORMS = {"ffn_norm": "post_attention_layernorm"}
# Hunyuan's first class also built mixtures of experts, MLA and vision towers. Config files of the two text
# model types (Hunyuan-MT, HY-MT) still state fields of that class, which transformers' classes do not read.
# kv_lora_rank is not in this dict, because vLLM treats a model with that field as MLA
# (model_executor/models/transformers/base.py).
HUNYUAN_LEFTOVERS: dict[str, Values] = {
    "anyres_pooling_size": (), "anyres_vit_max_image_size": (), "attention_head_dim": "head_dim",
    "cla_share_factor": (), "moe_drop_tokens": (), "moe_random_routing_dropped_token": (),
    "norm_type": ("rms",), "num_media_embeds": (), "org_vocab_size": (), "use_qk_norm": (True,),
    "vit_input_resolution": (), "vit_norm_type": (), "vit_token": (),
}  # fmt: skip
FAMILIES = {
    "llama": Family(
        _granite("LlamaForCausalLM").build, first_class="LLaMAForCausalLM",
        lora=QV, ia3=("k_proj", "v_proj", "down_proj"), hf="served", vllm=LORA_ON_VOCABULARY,
        gguf=GGUFTraits("llama", "LlamaForCausalLM", _GGUF_NORMS, rotary_head=True, bias=True),
    ),
    "mistral": Family(
        DenseVariant("MistralForCausalLM", window="always", default_window=4096).build,
        absent={"num_key_value_heads": 8}, lora=QV, ia3=("k_proj", "v_proj", "down_proj"), hf="served",
    ),
    # Ministral 3 and Devstral 2: Mistral with scaled queries; the scaling adds no tensor
    "ministral3": Family(
        DenseVariant("Ministral3ForCausalLM", window="always").build, absent={"num_key_value_heads": 8},
        hf="served",
    ),
    "cwm": Family(
        DenseVariant(
            "CwmForCausalLM", mlp_bias=("mlp_bias", False), window="pattern", default_window=8192
        ).build,
        absent={"num_key_value_heads": 8}, leftovers={"pretraining_tp": (1,)}, hf="served",
    ),
    # In Qwen's config classes num_key_value_heads defaults to 32, not to num_attention_heads. Qwen2Config
    # declares no head_dim, but the model uses a head_dim that config.json states.
    "qwen2": Family(
        DenseVariant("Qwen2ForCausalLM", True, window="qwen", ignored=("head_dim",)).build,
        absent={"num_key_value_heads": 32}, lora=QV, ia3=QV_DOWN, hf="served",
        gguf=GGUFTraits("qwen2", "Qwen2ForCausalLM", _GGUF_NORMS),
    ),
    "qwen3": Family(
        DenseVariant("Qwen3ForCausalLM", _ATTENTION_BIAS, _ATTENTION_BIAS, qk_norm="head", window="qwen").build,
        absent={"num_key_value_heads": 32, "head_dim": 128}, lora=QV, ia3=QV_DOWN, hf="served",
        vllm=LORA_ON_VOCABULARY, gguf=GGUFTraits("qwen3", "Qwen3ForCausalLM", _GGUF_NORMS, bias=True),
    ),
    "granite": Family(_granite("GraniteForCausalLM").build, hf="served", vllm=LORA_ON_VOCABULARY),
    "granite_swa": Family(
        _granite_swa, absent={"num_key_value_heads": 4}, ignored=("layer_rope_theta",), hf="sinks",
        vllm=LORA_ON_VOCABULARY,
    ),
    "hyperclovax": Family(_hyperclovax, hf="served", vllm=LORA_ON_VOCABULARY),
    "helium": Family(
        DenseVariant(
            "HeliumForCausalLM", _ATTENTION_BIAS, mlp_bias=("mlp_bias", False), norm="rms-cast", rope="helium",
            heads_span_hidden=True,
        ).build,
        absent={"num_key_value_heads": 20, "head_dim": 128}, hf="served",
    ),
    "smollm3": Family(
        DenseVariant(
            "SmolLM3ForCausalLM", _ATTENTION_BIAS, _ATTENTION_BIAS, ("mlp_bias", False), tied=True,
            window="rotated", roped="listed",
            ignored=("no_rope_layers", "no_rope_layer_interval", "use_sliding_window"),
        ).build,
        absent={"num_key_value_heads": 4}, hf="served",
        # SmolLM3-3B's config states max_window_layers, but SmolLM3's class reads only layer_types
        leftovers={"max_window_layers": ()},
    ),
    "seed_oss": Family(
        DenseVariant(
            "SeedOssForCausalLM", ("attention_bias", True), ("attention_out_bias", False), ("mlp_bias", False),
            attention_dropout=0.1, dropout=("residual_dropout", 0.1),
        ).build,
        absent={"num_key_value_heads": 8, "head_dim": 128}, hf="served",
    ),
    "glm": Family(
        DenseVariant(
            "GlmForCausalLM", ("attention_bias", True), mlp_names=_FUSED, fused=True, rotary_share=0.5,
            rope="glm",
        ).build,
        absent={"num_key_value_heads": 2, "head_dim": 128}, hf="served",
    ),
    "glm4": Family(
        DenseVariant(
            "Glm4ForCausalLM", ("attention_bias", True), mlp_names=_FUSED, fused=True, flow="sandwich",
            norms=(
                "input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm",
            ),
            rotary_share=0.5, rope="glm",
        ).build,
        absent={"num_key_value_heads": 2, "head_dim": 128}, hf="served",
    ),
    "ernie4_5": Family(
        DenseVariant(
            "Ernie4_5ForCausalLM", ("use_bias", False), ("use_bias", False), ("use_bias", False), tied=True,
            rope="ernie",
        ).build,
        absent={"num_key_value_heads": 2, "head_dim": 128}, hf="served",
    ),
    "exaone4": Family(
        DenseVariant(
            "Exaone4ForCausalLM", qk_norm="head", flow="post", norms=_POST_NORMS, window="pattern",
            default_window=4096, roped="windowed", ignored=("sliding_window_pattern",),
        ).build,
        absent={"num_key_value_heads": 32}, hf="served", vllm=LORA_ON_VOCABULARY,
    ),
    "olmo": Family(
        DenseVariant(
            "OlmoForCausalLM", _ATTENTION_BIAS, _ATTENTION_BIAS, norm="layer-none", rope="olmo",
            clipped_field="clip_qkv", ignored=("clip_qkv",),
        ).build,
        hf="served",
    ),
    "olmo2": Family(
        DenseVariant(
            "Olmo2ForCausalLM", _ATTENTION_BIAS, _ATTENTION_BIAS, qk_norm="full", flow="post",
            norms=_POST_NORMS, norm="rms-wide", rope="olmo",
        ).build,
        hf="served",
    ),
    "olmo3": Family(
        DenseVariant(
            "Olmo3ForCausalLM", _ATTENTION_BIAS, _ATTENTION_BIAS, qk_norm="full", flow="post",
            norms=_POST_NORMS, norm="rms-wide", rope="olmo", window="pattern", default_window=4096,
            table_by_kind=True,
        ).build,
        hf="served",
    ),
    "arcee": Family(
        DenseVariant(
            "ArceeForCausalLM", _ATTENTION_BIAS, _ATTENTION_BIAS, ("mlp_bias", False), mlp_names=_PLAIN,
            act="relu2",
        ).build,
        hf="served",
    ),
    "apertus": Family(
        DenseVariant(
            "ApertusForCausalLM", _ATTENTION_BIAS, _ATTENTION_BIAS, qk_norm="head", mlp_names=_PLAIN,
            act="xielu", norms=("attention_layernorm", "feedforward_layernorm"), extra=_apertus,
        ).build,
        hf="served", vllm=LORA_ON_VOCABULARY,
    ),
    "bitnet": Family(
        DenseVariant("BitNetForCausalLM", _ATTENTION_BIAS, _ATTENTION_BIAS, act="relu2", extra=_bitnet).build,
        absent={"num_key_value_heads": 5}, hf="served",
    ),
    "cohere": Family(
        DenseVariant(
            "CohereForCausalLM", _ATTENTION_BIAS, _ATTENTION_BIAS, flow="parallel", norms=("input_layernorm",),
            norm="layer-written", rope="cohere", tied=True, ignored=("logit_scale",),
            switched_norms=SwitchedNorms("use_qk_norm", False, ("q_norm", "k_norm"), "layer-written", own=True),
        ).build,
        hf="served", vllm=VLLMTraits(lora_vocabulary=1),
    ),
    "cohere2": Family(
        DenseVariant(
            "Cohere2ForCausalLM", _ATTENTION_BIAS, _ATTENTION_BIAS, flow="parallel", norms=("input_layernorm",),
            norm="layer-written", rope="cohere", roped="sliding", tied=True, window="pattern",
            default_window=4096,
            ignored=("logit_scale", "sliding_window_pattern", "head_dim"),
        ).build,
        # Fields of Command R7B's config, which is older than the field sliding_window_pattern
        leftovers={
            "layer_switch": "sliding_window_pattern", "order_of_interleaved_layers": ("local_attn_first",),
            "position_embedding_type": ("rope_gptj",), "use_parallel_block": (True,),
        },
        hf="served", vllm=VLLMTraits(lora_vocabulary=1),
    ),
    "diffllama": Family(
        DenseVariant(
            "DiffLlamaForCausalLM", _ATTENTION_BIAS, _ATTENTION_BIAS, extra=_diffllama, taped=False,
        ).build,
        hf="two attentions",
    ),
    "doge": Family(
        DenseVariant(
            "DogeForCausalLM", _ATTENTION_BIAS, _ATTENTION_BIAS, ("mlp_bias", False), qk_norm="head",
            extra=_doge, dropout=("hidden_dropout", 0.0),
            ignored=("keep_window_size", "num_experts", "num_experts_per_tok"), taped=False,
        ).build,
        hf="served",
    ),
    "hunyuan_v1_dense": Family(
        DenseVariant(
            "HunYuanDenseV1ForCausalLM", _ATTENTION_BIAS, _ATTENTION_BIAS, qk_norm="head", normed_last=True,
            qk_norm_names=("query_layernorm", "key_layernorm"), window="unused",
        ).build,
        leftovers={
            **HUNYUAN_LEFTOVERS, "moe_intermediate_size": (), "moe_layer_num_skipped": (), "moe_topk": (),
            "num_experts": (1,), "num_shared_expert": (),
        },
        hf="served",
    ),
    "starcoder2": Family(
        DenseVariant(
            "Starcoder2ForCausalLM", ("use_bias", True), ("use_bias", True), ("use_bias", True),
            mlp_names=("c_fc", "c_proj"), act="gelu_pytorch_tanh", norm="layer", tied=True, window="always",
            dropout=("residual_dropout", 0.0), embedding_dropout="embedding_dropout",
        ).build,
        absent={"num_key_value_heads": 2}, leftovers={"norm_type": ("layer_norm",), "activation_function": ()},
        hf="served",
    ),
    "stablelm": Family(
        DenseVariant(
            "StableLmForCausalLM", ("use_qkv_bias", False), norm="layer", rotary_share=0.25, rope="joined",
            parallel_field="use_parallel_residual",
            switched_norms=SwitchedNorms("qk_layernorm", kind="layer-weight", each=True),
            dropout=("hidden_dropout", 0.0), dropped=(False, True),
        ).build,
        absent={"num_key_value_heads": 32}, hf="keywords lost",
    ),
    "persimmon": Family(
        DenseVariant(
            "PersimmonForCausalLM", True, True, True, qkv="query_key_value", out="dense",
            switched_norms=SwitchedNorms("qk_layernorm", True),
            mlp_names=("dense_h_to_4h", "dense_4h_to_h"), act="relu2", norm="layer",
            final="model.final_layernorm", rotary_share=0.5, rope="joined", dropout=("hidden_dropout", 0.0),
            dropped=(False, True),
        ).build,
        hf="served",
    ),
    "phi": Family(
        DenseVariant(
            "PhiForCausalLM", True, True, True, out="dense", switched_norms=SwitchedNorms("qk_layernorm"),
            mlp_names=("fc1", "fc2"), act="gelu_new",
            flow="parallel", norms=("input_layernorm",), norm="layer", final="model.final_layernorm",
            head_bias=True, rotary_share=0.5, rope="joined", dropout=("resid_pdrop", 0.0),
            embedding_dropout="embd_pdrop",
        ).build,
        # Config files of phi-1 also have the field names of its remote code. transformers reads
        # partial_rotary_factor and hidden_act instead (configuration_phi.py).
        leftovers={"rotary_dim": (), "activation_function": ()}, lora=("q_proj", "v_proj", "fc1", "fc2"),
        hf="served",
    ),
    "phi3": Family(
        DenseVariant(
            "Phi3ForCausalLM", qkv="qkv_proj", mlp_names=_FUSED, fused=True, rope="joined", window="always",
            dropout=("resid_pdrop", 0.0), ignored=("original_max_position_embeddings", "attention_bias"),
        ).build,
        leftovers={"full_attn_mod": (1,)}, hf="served",  # Phi-4-mini: full attention in every layer
    ),
    "nemotron": Family(
        DenseVariant(
            "NemotronForCausalLM", _ATTENTION_BIAS, _ATTENTION_BIAS, ("mlp_bias", False), mlp_names=_PLAIN,
            act="relu2", norm="layer-one", rotary_share=0.5, rope="joined",
        ).build,
        hf="keywords lost", vllm=LORA_ON_VOCABULARY,
    ),
    "jais2": Family(
        DenseVariant(
            "Jais2ForCausalLM", ("attention_bias", True), ("attention_bias", True), ("mlp_bias", True),
            mlp_names=_PLAIN, act="relu2", norm="layer",
        ).build,
        hf="served",
    ),
    "internlm3": Family(
        _internlm3, aliases={"attention_bias": "qkv_bias", "mlp_bias": "bias"},
        absent={"num_key_value_heads": 2, "head_dim": 128}, first_class="InternLM3ForCausalLM",
    ),
    "iquestcoder": Family(
        _iquestcoder, absent={"num_key_value_heads": 8, "head_dim": 128},
        first_class="IQuestCoderForCausalLM",
    ),
    # The model was published with remote code; its tensor shapes are those of Llama.
    "xverse": Family(
        DenseVariant("XverseForCausalLM", ignored=("max_tokenizer_truncation",), taped=False).build
    ),
    "baichuan": Family(
        DenseVariant(
            "BaichuanForCausalLM", qkv="W_pack", ignored=("model_max_length", "z_loss_weight"), taped=False,
        ).build,
    ),
}  # fmt: skip
