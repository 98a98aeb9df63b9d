"""Gemma 1, 2 and 3 (text) and VaultGemma. Shapes follow transformers 5.19, models/{gemma,gemma2,gemma3}/.

Gemma 2 and 3 put four norms into a layer. Gemma 3 adds norms of q and k and a second rotary table. The
multimodal Gemma 3 is in gemma_vision.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from tonnage.planner.errors import ConfigError, UnsupportedArchitecture
from tonnage.planner.families import common
from tonnage.planner.families.family import QV, QV_DOWN, Family, GGUFTraits, VLLMTraits
from tonnage.planner.model.architecture import Architecture, Rotary
from tonnage.planner.model.fields import Fields, shown
from tonnage.planner.model.recipe import (
    Attention,
    Embedding,
    Flow,
    Head,
    Heads,
    Layer,
    Mlp,
    Norm,
    Recipe,
    Rope,
    Table,
    layer_of,
)  # fmt: skip
from tonnage.planner.model.tensor import TensorSpec


@dataclass(frozen=True, slots=True)
class GemmaVariant:
    """Options by which a Gemma text model differs from Gemma 1; the default values describe Gemma 1.

    Attributes:
        class_name: the causal language model's class in transformers.
        kv_heads: default of num_key_value_heads.
        norms: norms of a layer in the order they run.
        qk_norm: whether q and k have a norm per head.
        pattern: without layer_types, every n-th layer has full attention; 0 means every layer has full
            attention.
        pattern_field: whether the config field sliding_window_pattern replaces ``pattern``.
        by_kind: whether full layers and sliding layers have different rotary tables; max_position_embeddings is
            then the length after rotary scaling.
        attention_cap: default of attn_logit_softcapping.
        final_cap: default of final_logit_softcapping.
    """

    class_name: str
    kv_heads: int = 4
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    qk_norm: bool = False
    pattern: int = 0
    pattern_field: bool = False
    by_kind: bool = False
    attention_cap: float | None = None
    final_cap: float | None = None

    def build(self, fields: Fields, model_type: str) -> Architecture:
        """Return the architecture of a Gemma text model of this family from its checked config."""
        hidden = fields.integer("hidden_size", limit="width")
        layers = fields.integer("num_hidden_layers", limit="layers")
        heads = fields.integer("num_attention_heads", limit="heads")
        kv_heads = fields.integer("num_key_value_heads", self.kv_heads, limit="heads")
        common.divisible(heads, kv_heads, "num_attention_heads", "num_key_value_heads")
        # transformers' config class also requires that the number of heads divides hidden_size
        common.divisible(hidden, heads, "hidden_size", "num_attention_heads")
        head_size = fields.integer("head_dim", _HEAD_DIM, limit="width")
        inner = fields.integer("intermediate_size", limit="width")
        vocab = fields.integer("vocab_size", limit="vocab")
        bias = fields.boolean("attention_bias", False)
        tied = fields.boolean("tie_word_embeddings", True)
        fields.ignore(
            "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping", "cache_implementation"
        )
        kinds, window = _kinds(fields, self, layers)
        prefixes, factor = _rotary(fields, self, kinds)
        dims = Heads(hidden, heads, kv_heads, head_size)
        q_norm, k_norm = (
            Norm(name, head_size, "rms-one", count) if self.qk_norm else None
            for name, count in (("q_norm", heads), ("k_norm", kv_heads))
        )
        norms = tuple(Norm(name, hidden, "rms-one") for name in self.norms)
        mlp = Mlp(
            "mlp", hidden, inner, common.act_of(fields, "gelu_pytorch_tanh", "hidden_activation", "hidden_act")
        )
        flow: Flow = "sandwich" if len(norms) == 4 else "pre"

        def layer(table: str) -> Layer:
            attention = Attention(
                "self_attn", dims, bias=bias, out_bias=bias, q_norm=q_norm, k_norm=k_norm,
                rope=Rope(head_size, table),
                # Gemma 3's attention does not read attn_logit_softcapping.
                softcap=bool(self.attention_cap and fields.config.get("attn_logit_softcapping", True)),
                dropout=common.number(fields, "attention_dropout", 0.0),
            )  # fmt: skip
            return layer_of(flow, attention, mlp, norms)

        made = {table: layer(table) for table in prefixes}
        # The embedding is multiplied by a scalar buffer that holds sqrt(hidden_size) in the model's dtype.
        scale = TensorSpec("model.embed_tokens.embed_scale", (), "buffer", "ScaledWordEmbedding")
        recipe = Recipe(
            "model.layers",
            Embedding("model.embed_tokens", vocab, hidden, buffers=(scale,)),
            tuple(made.get(f"{_TABLE}{kind}_", made[prefixes[0]]) for kind in kinds),
            Norm("model.norm", hidden, "rms-one"),
            Head(tied, softcap=fields.config.get("final_logit_softcapping", self.final_cap) is not None),
            tuple(Table(prefix, head_size) for prefix in prefixes),
        )  # fmt: skip
        return common.described(
            fields, model_type, self.class_name, recipe, dims, inner, common.cache_layers(kinds, window, dims),
            rotary=Rotary(head_size, len(prefixes)),
            max_model_len=int(fields.integer("max_position_embeddings", limit="positions") * factor),
        )  # fmt: skip


_TABLE = "model.rotary_emb."
_HEAD_DIM = 256  # default of head_dim in the config classes, whatever hidden_size / num_attention_heads is
_WINDOW = 4096  # default of sliding_window in Gemma2Config and Gemma3TextConfig


def _kinds(fields: Fields, variant: GemmaVariant, layers: int) -> tuple[tuple[str, ...], int | None]:
    """Return (attention kind of each layer, sliding window in tokens or None) of a Gemma text model."""
    if not variant.pattern:
        return ("full_attention",) * layers, None
    window = common.window_of(fields, _WINDOW)
    kinds = fields.layer_types(layers)
    pattern = variant.pattern
    if variant.pattern_field:
        fields.ignore("_sliding_window_pattern")
        pattern = fields.integer("sliding_window_pattern", pattern, limit="layers")
        stated = fields.config.get("_sliding_window_pattern")
        if kinds is None and stated not in (None, pattern):
            raise ConfigError(
                f"{shown(stated)} contradicts sliding_window_pattern = {pattern}",
                field="_sliding_window_pattern",
            )
    if kinds is None:
        kinds = common.alternating_kinds(layers, pattern)
    return kinds, window


def _rotary(fields: Fields, variant: GemmaVariant, kinds: tuple[str, ...]) -> tuple[tuple[str, ...], float]:
    """Return (name prefixes of the rotary tables, factor by which rotary scaling extends the length)."""
    if not variant.by_kind:
        return (_TABLE,), common.read_rope(fields)[1]
    fields.ignore("rope_theta", "rope_local_base_freq")
    new = fields.raw("rope_parameters")
    common.rope_kind(fields.raw("rope_scaling"), "rope_scaling")
    if isinstance(new, dict):
        for kind in ("full_attention", "sliding_attention"):
            common.rope_kind(new.get(kind), f"rope_parameters.{kind}")
    elif new is not None:
        raise ConfigError(f"{shown(new)} is not an object", field="rope_parameters")
    return tuple(f"{_TABLE}{kind}_" for kind in dict.fromkeys(kinds)), 1.0


_GGUF_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA3 = GemmaVariant(
    "Gemma3ForCausalLM",
    # every sixth layer has full attention unless the file says otherwise (configuration_gemma3.py)
    norms=common.FOUR_NORMS, qk_norm=True, pattern=6, pattern_field=True, by_kind=True,
)  # fmt: skip


def _gemma3_text(fields: Fields, model_type: str) -> Architecture:
    """Return the architecture of Gemma 3's text model, or of RNJ-1, which vLLM runs with a class of its own.

    RNJ-1's class has no sliding windows (models/rnj1.py of vLLM 0.32), so its config must state full attention
    for every layer.
    """
    kinds = fields.raw("layer_types")
    if fields.raw("architectures") == ["Rnj1ForCausalLM"] and (
        not isinstance(kinds, list) or set(map(str, kinds)) != {"full_attention"}
    ):
        raise UnsupportedArchitecture(
            f"{shown(kinds)} is not supported for Rnj1ForCausalLM; full attention in all layers is",
            field="layer_types",
        )
    return _GEMMA3.build(fields, model_type)


FAMILIES = {
    "gemma": Family(
        GemmaVariant("GemmaForCausalLM", kv_heads=16).build,
        final_norm="rms-one", lora=QV, ia3=QV_DOWN, hf="served",
    ),
    "gemma2": Family(
        GemmaVariant(
            "Gemma2ForCausalLM",
            # Sliding and full layers alternate, the first is sliding (configuration_gemma2.py).
            norms=common.FOUR_NORMS, pattern=2, attention_cap=50.0, final_cap=30.0,
        ).build,
        # the 9B and 27B files state the sliding window in two config fields
        leftovers={"sliding_window_size": "sliding_window"},
        final_norm="rms-one", lora=QV, ia3=QV_DOWN, hf="served",
        vllm=VLLMTraits(float16=False),
        gguf=GGUFTraits("gemma2", "Gemma2ForCausalLM", _GGUF_NORMS, window=True),
    ),
    "gemma3_text": Family(
        _gemma3_text, other_classes=("Rnj1ForCausalLM",),
        final_norm="rms-one", lora=QV, ia3=QV_DOWN, hf="served", vllm=VLLMTraits(float16=False),
        gguf=GGUFTraits("gemma3", "Gemma3ForCausalLM", _GGUF_NORMS, window=True),
    ),
    "vaultgemma": Family(
        GemmaVariant(
            "VaultGemmaForCausalLM", norms=("input_layernorm", "pre_feedforward_layernorm"), pattern=2,
            attention_cap=50.0, final_cap=30.0,
        ).build,
        hf="served",
    ),
}  # fmt: skip
