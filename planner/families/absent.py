"""What the config classes of transformers 5.19 put in place of a field that a file does not have, where that is
a number of their own: a default that depends on nothing else. A field that is null is not absent. Basic sizes
have no default here: a file without them is refused.
"""

from __future__ import annotations

# field -> default -> model types
_DEFAULTS = {
    "num_key_value_heads": {
        2: "glm glm4 ernie4_5 starcoder2 qwen3_next qwen3_5_moe_text",
        4: "minimax_m3 smollm3 qwen3_moe ernie4_5_moe mimo_v2_flash qwen3_5_text",
        5: "bitnet",
        8: "step3p7_text mistral seed_oss mixtral phimoe minimax_m2 glm4_moe gpt_oss laguna "
            "llama4_text minimax lfm2 lfm2_moe bamba falcon_h1 jamba nemotron_h mllama_text_model",
        16: "qwen2_moe",
        20: "helium",
        32: "qwen2 qwen3 exaone4 stablelm dots1",
    },
    "head_dim": {
        64: "gpt_oss",
        128: "minimax_m3 step3p7_text qwen3 helium seed_oss glm glm4 ernie4_5 minimax_m2 laguna llama4_text",
        192: "mimo_v2_flash",
        256: "qwen3_next qwen3_5_text qwen3_5_moe_text",
    },
    "v_head_dim": {
        128: "mimo_v2_flash",
        256: "glm_moe_dsa glm4_moe_lite",
    },
    "qk_nope_head_dim": {
        64: "mistral4",
        192: "glm_moe_dsa glm4_moe_lite",
    },
    "kv_lora_rank": {
        256: "mistral4",
    },
    "index_n_heads": {
        32: "glm_moe_dsa",
    },
    "num_shared_experts": {
        1: "kimi_linear",
    },
    "q_lora_rank": {
        768: "glm4_moe_lite minicpm3",
        1024: "mistral4",
        1536: "deepseek_v2 deepseek_v3 deepseek_v32 longcat_flash kimi_k2",
        2048: "glm_moe_dsa",
    },
    "n_shared_experts": {
        1: "glm4_moe deepseek_v3 deepseek_v32 glm_moe_dsa glm4_moe_lite mistral4 kimi_k2",
        2: "deepseek_v2",
    },
    "moe_num_shared_experts": {
        2: "ernie4_5_moe",
    },
    "zero_expert_num": {
        256: "longcat_flash",
    },
}  # fmt: skip
ABSENT: dict[str, dict[str, int]] = {}
"""model_type -> field -> default."""
for _field, _values in _DEFAULTS.items():
    for _value, _types in _values.items():
        for _type in _types.split():
            ABSENT.setdefault(_type, {})[_field] = _value
