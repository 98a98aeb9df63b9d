"""Tiny decoder configs supported by transformers and the planner, by ``model_type`` (``-switch``).

Together they have each kind of layer and most switches that change which activations a layer keeps.
"""

from __future__ import annotations

from typing import Any

_NO_HEADS = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 3,
    "num_attention_heads": 8, "max_position_embeddings": 256,
}  # fmt: skip
_GROUPED = {**_NO_HEADS, "num_key_value_heads": 2}
_PLAIN = {**_GROUPED, "head_dim": 16}
_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # their defaults lie outside 512 tokens
_WINDOW = {"sliding_window": 32}
_MIXED = {**_WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_FULL = {"sliding_window": None, "layer_types": ["full_attention"] * 3}
_BIASED = {"attention_bias": True, "mlp_bias": True}
_FALCON = {
    **{k: v for k, v in _NO_HEADS.items() if k != "intermediate_size"}, "ffn_hidden_size": 192, "alibi": False,
    "bias": False,
}  # fmt: skip
_GPT = {"vocab_size": 512, "n_embd": 128, "n_inner": 192, "n_layer": 3, "n_head": 8, "n_positions": 256}
_OPT = {
    "vocab_size": 512, "hidden_size": 128, "ffn_dim": 192, "num_hidden_layers": 3, "num_attention_heads": 8,
    "max_position_embeddings": 256, **_IDS,
}  # fmt: skip
_LOCAL = {**_GROUPED, "intermediate_size": 48, "num_local_experts": 8, "num_experts_per_tok": 2}
_SMALL = {**_GROUPED, "intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 2}
_MOE = {**_SMALL, "intermediate_size": 192, "moe_intermediate_size": 48}
_ROUTED = {
    **_GROUPED, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
    "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
_LATENT = {
    "num_key_value_heads": 8, "q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 24,
}  # fmt: skip
_MLA = {**_ROUTED, **_LATENT}

# SDPA on the CPU has no fused kernel with dropout: attention's is 0 where the default is not, others stay.
ROWS: dict[str, dict[str, Any]] = {
    "llama": _PLAIN,
    "llama-wide": {**_PLAIN, **_BIASED, "head_dim": 32, "tie_word_embeddings": True},
    "mistral": {**_PLAIN, **_WINDOW},
    "mistral-full": {**_PLAIN, "sliding_window": None},
    "qwen2": _PLAIN,
    "qwen2-window": {**_GROUPED, **_WINDOW, "use_sliding_window": True, "max_window_layers": 1},
    "llama-tanh": {**_PLAIN, "hidden_act": "gelu_new"},
    "llama-fast": {**_PLAIN, "hidden_act": "gelu_fast"},
    "llama-quick": {**_PLAIN, "hidden_act": "quick_gelu"},
    "qwen3": _PLAIN,
    "qwen3-wide": {**_PLAIN, "head_dim": 32, "attention_bias": True, "tie_word_embeddings": True},
    "granite": _GROUPED,
    "granite-scaled": {
        **_GROUPED, **_BIASED, "embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22,
    },
    "helium": _PLAIN,
    "smollm3": {**_GROUPED, **_IDS},
    "smollm3-unrotated": {
        **_GROUPED, **_IDS, **_WINDOW, "no_rope_layers": [1, 0, 1], "use_sliding_window": True,
    },
    "seed_oss": {**_PLAIN, "attention_dropout": 0.0},
    "glm": {**_PLAIN, **_IDS},
    "glm4": {**_PLAIN, **_IDS},
    "ernie4_5": {**_PLAIN, "use_bias": True},
    "exaone4": {**_GROUPED, **_MIXED},
    "exaone4-full": {**_GROUPED, **_FULL},
    "olmo": {**_GROUPED, "pad_token_id": 0},
    "olmo-clipped": {**_GROUPED, "pad_token_id": 0, "clip_qkv": 8.0},
    "olmo2": _GROUPED,
    "olmo3": {**_GROUPED, **_MIXED},
    "arcee": {**_GROUPED, **_IDS},
    "apertus": _GROUPED,
    "bitnet": _GROUPED,
    "cohere": {**_GROUPED, **_IDS},
    "cohere-normed": {**_GROUPED, **_IDS, "use_qk_norm": True},
    "cohere2": {**_PLAIN, **_IDS, **_MIXED},
    "diffllama": _GROUPED,
    "doge": _GROUPED,
    "hunyuan_v1_dense": _PLAIN,
    "starcoder2": {**_GROUPED, **_WINDOW},
    "starcoder2-dropped": {**_GROUPED, "residual_dropout": 0.1, "embedding_dropout": 0.1},
    "stablelm": _GROUPED,
    "stablelm-parallel": {
        **_GROUPED, "use_parallel_residual": True, "qk_layernorm": True, "use_qkv_bias": True,
    },
    "persimmon": _NO_HEADS,
    "phi": _NO_HEADS,
    "phi-grouped": {**_GROUPED, "qk_layernorm": True},
    "phi-dropped": {**_GROUPED, "resid_pdrop": 0.1, "embd_pdrop": 0.1},
    "phi3": {**_GROUPED, **_IDS, **_WINDOW},
    "phi3-partial": {**_GROUPED, **_IDS, "sliding_window": None, "partial_rotary_factor": 0.5},
    "nemotron": _GROUPED,
    "jais2": _GROUPED,
    "gemma": _PLAIN,
    "gemma-wide": {**_PLAIN, "head_dim": 32},
    "gemma2": {**_PLAIN, **_WINDOW},
    "gemma3_text": {**_PLAIN, **_WINDOW},
    "gemma3_text-capped": {
        **_PLAIN, **_MIXED, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0,
    },
    "vaultgemma": {**_PLAIN, **_MIXED},
    "gpt_neox": _NO_HEADS,
    "gpt_neox-serial": {
        **_NO_HEADS, "use_parallel_residual": False, "attention_bias": False, "rotary_pct": 0.5,
    },
    "gpt_neox-dropped": {**_NO_HEADS, "hidden_dropout": 0.1},
    "falcon": {**_FALCON, "num_kv_heads": 2, "new_decoder_architecture": True},
    "falcon-query": {**_FALCON, "multi_query": True},
    "falcon-serial": {**_FALCON, "multi_query": True, "parallel_attn": False},
    "falcon-heads": {**_FALCON, "multi_query": False},
    "gpt_bigcode": {**_GPT, "attn_pdrop": 0.0},
    "gpt_bigcode-heads": {**_GPT, "attn_pdrop": 0.0, "multi_query": False},
    "gpt2": {**_GPT, **_IDS, "attn_pdrop": 0.0},
    "gpt2-still": {
        **_GPT, **_IDS, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "activation_function": "gelu",
    },
    "gpt_neo": {
        "vocab_size": 512, "hidden_size": 128, "intermediate_size": 192, "num_layers": 4, "num_heads": 8,
        "max_position_embeddings": 256, "attention_types": [[["global", "local"], 2]], "window_size": 32,
        **_IDS,
    },
    "gptj": {**_GPT, **_IDS, "rotary_dim": 8},
    "codegen": {**_GPT, **_IDS, "rotary_dim": 8},
    "opt": _OPT,
    "opt-unbiased": {**_OPT, "enable_bias": False, "activation_function": "gelu", "dropout": 0.0},
    "opt-projected": {**_OPT, "word_embed_proj_dim": 64, "do_layer_norm_before": False},
    "gptj-dropped": {
        **_GPT, **_IDS, "rotary_dim": 16, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1,
    },
    "bloom": {"vocab_size": 512, "hidden_size": 128, "n_layer": 3, "n_head": 8},
    "bloom-dropped": {
        "vocab_size": 512, "hidden_size": 128, "n_layer": 3, "n_head": 8, "hidden_dropout": 0.1,
        "attention_dropout": 0.1, "apply_residual_connection_post_layernorm": True,
    },
    "mpt": {"vocab_size": 512, "d_model": 128, "n_layers": 3, "n_heads": 8, "max_seq_len": 256},
    "mpt-clipped": {
        "vocab_size": 512, "d_model": 128, "n_layers": 3, "n_heads": 8, "max_seq_len": 256,
        "attn_config": {"clip_qkv": 6.0},
    },
    "mixtral": _LOCAL,
    "mixtral-window": {**_LOCAL, **_WINDOW},
    "qwen2_moe": {**_MOE, "shared_expert_intermediate_size": 96, "mlp_only_layers": [0]},
    "qwen3_moe": {**_MOE, "head_dim": 16},
    "qwen3_moe-normed": {**_MOE, "head_dim": 32, "norm_topk_prob": True, "num_experts_per_tok": 3},
    "olmoe": _SMALL,
    "olmoe-clipped": {**_SMALL, "clip_qkv": 8.0},
    "flex_olmo": {**_SMALL, **_IDS},
    "phimoe": _LOCAL,
    "phimoe-noisy": {**_LOCAL, "input_jitter_noise": 0.01, "attention_bias": True, "lm_head_bias": True},
    "granitemoe": _LOCAL,
    "granitemoeshared": {**_LOCAL, "shared_intermediate_size": 96},
    "minimax_m2": {**_LOCAL, "head_dim": 16, "rotary_dim": 8},
    "ernie4_5_moe": {
        **_GROUPED, "moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 48, "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
    },
    "glm4_moe": {**_ROUTED, "head_dim": 16, "use_qk_norm": True},
    "dots1": {**_ROUTED, "head_dim": 16},
    "dots1-normed": {**_ROUTED, "head_dim": 16, "norm_topk_prob": True, "n_group": 4, "topk_group": 2},
    "hunyuan_v1_moe": {**_PLAIN, "intermediate_size": 48, "num_experts": 8, "moe_topk": 2},
    "deepseek_v2": {**_MLA, "topk_method": "group_limited_greedy"},
    "deepseek_v3": _MLA,
    "glm4_moe_lite": _MLA,
    "minicpm3": {**_NO_HEADS, **_LATENT},
    "gpt_oss": {**_LOCAL, **_MIXED, **_IDS, "head_dim": 16},
    "llama4_text": {
        **_LOCAL, **_IDS, "head_dim": 16, "intermediate_size_mlp": 192, "num_experts_per_tok": 1,
        "attention_chunk_size": 32,
    },
}  # fmt: skip
