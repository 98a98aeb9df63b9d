"""Fields of published config.json files that sound like a shape and change none: neither transformers 5.19 nor
vLLM 0.32.0 reads them for these model types (tests/planner/test_leftovers.py holds that against their code).

Most were left by the remote code that a model was first published with.
"""

from __future__ import annotations

Values = tuple[object, ...] | str
"""The values for which that is known: listed, any (an empty tuple), or the same as in another field."""

_ANY: tuple[object, ...] = ()
# Hunyuan's first class also made mixtures of experts, MLA and vision towers; the text models of these two types
# carry its fields (Hunyuan-MT, HY-MT), their classes in transformers build none of it. Not its kv_lora_rank:
# vLLM takes a model with one for MLA (model_executor/models/transformers/base.py).
_HUNYUAN: dict[str, Values] = {
    "anyres_pooling_size": _ANY,
    "anyres_vit_max_image_size": _ANY,
    "attention_head_dim": "head_dim",
    "cla_share_factor": _ANY,
    "moe_drop_tokens": _ANY,
    "moe_random_routing_dropped_token": _ANY,
    "norm_type": ("rms",),
    "num_media_embeds": _ANY,
    "org_vocab_size": _ANY,
    "use_qk_norm": (True,),
    "vit_input_resolution": _ANY,
    "vit_norm_type": _ANY,
    "vit_token": _ANY,
}
LEFTOVERS: dict[str, dict[str, Values]] = {
    # Command R7B, written before sliding_window_pattern; the class has one norm and adds MLP and attention
    "cohere2": {
        "layer_switch": "sliding_window_pattern",
        "order_of_interleaved_layers": ("local_attn_first",),
        "position_embedding_type": ("rope_gptj",),
        "use_parallel_block": (True,),
    },
    "gemma2": {"sliding_window_size": "sliding_window"},  # 9B and 27B give the window twice
    "hunyuan_v1_dense": {
        **_HUNYUAN,
        "moe_intermediate_size": _ANY,
        "moe_layer_num_skipped": _ANY,
        "moe_topk": _ANY,
        "num_experts": (1,),
        "num_shared_expert": _ANY,
    },
    "hunyuan_v1_moe": _HUNYUAN,
    "phi3": {"full_attn_mod": (1,)},  # Phi-4-mini: every layer attends in full
    "smollm3": {"max_window_layers": _ANY},  # SmolLM3-3B; its class goes by layer_types alone
    "starcoder2": {"norm_type": ("layer_norm",)},
}
"""model_type -> field -> values."""
