"""A second, small implementation of KV and state bytes, straight from config.json.

It is the oracle of section ``kv`` and of tests/planner/test_kv_oracle.py, and shares no code with the
planner. ``expected(config, tokens)`` returns the bytes that grow with the sequence and the bytes of state.
Caches and states have 16 bits (fp32 where the model says so).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def sixteen_bits(elements: int) -> int:
    """Return the bytes of ``elements`` 16-bit values."""
    return 2 * elements


def vllm_index_bytes(elements: int) -> int:
    """Return the bytes of an indexer key in vLLM: fp8, and one fp32 scale per 128 elements.

    The source is vLLM 0.32, v1/attention/backends/mla/indexer.py.
    """
    return elements + 4 * (elements // 128)


MLA = {
    "deepseek_v3", "deepseek_v32", "kimi_k2", "glm4_moe_lite", "glm_moe_dsa", "minicpm3", "mistral4",
}  # fmt: skip
SPARSE = {"deepseek_v32", "glm_moe_dsa"}
DENSE = {
    "llama", "qwen2", "qwen2_vl", "qwen2_5_vl", "qwen3_vl_text", "qwen3_vl_moe_text", "qwen3", "qwen3_moe",
    "qwen2_moe", "granite", "granitemoe", "granitemoeshared",
    "smollm3", "glm",
    "glm4", "glm4_moe", "olmo", "olmo2", "olmoe", "flex_olmo", "arcee", "apertus", "bitnet", "diffllama",
    "doge",
    "ernie4_5", "ernie4_5_moe", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "nemotron", "persimmon",
    "phi", "seed_oss", "internlm2", "internlm3",
    "stablelm", "xverse", "baichuan", "exaone", "mimo", "minimax_m2", "gptj", "codegen", "gpt2", "bloom",
    "opt", "qwen",
    "gpt_neox", "gemma", "llava", "mpt", "phi3small",
    
    "mixformer-sequential", "deepseek_vl_v2",
}  # fmt: skip


LLAMA_7B = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}  # LlamaConfig's defaults


def text_of(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config of the text model."""
    for name in ("text_config", "language_config"):
        inner = config.get(name)
        if isinstance(inner, dict):
            base = LLAMA_7B if inner.get("model_type") == "llama" else {}
            return {**base, **inner, "model_type": inner.get("model_type", config["model_type"])}
    return config


def first(config: dict[str, Any], *names: str, default: Any = None) -> Any:
    """Return the first of the fields ``names`` that is set, or ``default``."""
    return next((config[n] for n in names if config.get(n) is not None), default)


def geometry(c: dict[str, Any], kv_default: int | None = None) -> tuple[int, int, int]:
    """Return (layers, KV heads, head size) under every spelling."""
    layers = first(c, "num_hidden_layers", "n_layer", "num_layers", "n_layers")
    heads = first(c, "num_attention_heads", "n_head", "num_heads", "n_heads")
    hidden = first(c, "hidden_size", "n_embd", "n_embed", "d_model")
    kv = first(c, "num_key_value_heads", "n_head_kv", default=kv_default or heads)
    return layers, kv, first(c, "head_dim", "kv_channels", default=hidden // heads)


def indexers(c: dict[str, Any]) -> int:
    """Return the number of layers with their own indexer keys (vLLM 0.32, models/deepseek_v32/attention.py)."""
    layers, pattern = c["num_hidden_layers"], c.get("index_topk_pattern")
    if pattern is not None:
        return sum(letter != "S" for letter in pattern[:layers])
    offset, step = c.get("index_skip_topk_offset", 2), c.get("index_topk_freq", 1)
    return sum(max(i - offset + 1, 0) % step == 0 for i in range(layers))


def windows(kinds: list[bool], window: int | None, tokens: int) -> int:
    """Return the token-layers: a sliding layer (True) keeps its window, another layer all tokens."""
    return sum(min(tokens, window) if slides and window else tokens for slides in kinds)


def expected(
    config: dict[str, Any], tokens: int, index_bytes: Callable[[int], int] = sixteen_bits
) -> tuple[int, int] | None:
    """Return (bytes that grow with the sequence, bytes of state), or None for an unknown model.

    ``index_bytes`` maps the elements of an indexer's key to its bytes.
    """
    c = text_of(config)
    kind = c["model_type"]
    if "block_configs" in c:  # pruned Llama: heads per layer
        heads, hidden = c["num_attention_heads"], c["hidden_size"]
        kv = [
            heads // b["attention"]["n_heads_in_group"]
            for b in c["block_configs"]
            if not b["attention"]["no_op"]
        ]
        return sum(kv) * (hidden // heads) * 2 * tokens * 2, 0
    if kind in ("RefinedWeb", "falcon"):
        layers = first(c, "n_layer", "num_hidden_layers")
        heads = first(c, "n_head", "num_attention_heads")
        kv = first(c, "n_head_kv", "num_kv_heads", default=1)
        return layers * kv * (c["hidden_size"] // heads) * 2 * tokens * 2, 0
    if kind == "gpt_bigcode":
        return c["n_layer"] * (c["n_embd"] // c["n_head"]) * 2 * tokens * 2, 0
    if kind == "chatglm":
        return c["num_layers"] * c["multi_query_group_num"] * c["kv_channels"] * 2 * tokens * 2, 0
    if kind == "dbrx":
        kv = c["attn_config"]["kv_n_heads"]
        return c["n_layers"] * kv * (c["d_model"] // c["n_heads"]) * 2 * tokens * 2, 0
    if kind in MLA or (kind == "deepseek_v2" and c.get("kv_lora_rank")):
        entry = c["kv_lora_rank"] + c["qk_rope_head_dim"]
        keys = index_bytes(c.get("index_head_dim", 128)) * indexers(c) if kind in SPARSE else 0
        return (c["num_hidden_layers"] * entry * 2 + keys) * tokens, 0
    if kind in ("deepseek_v4", "deepseek_ref"):
        return deepseek_v4(c, tokens)
    if kind in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"):
        return delta_net(c, tokens)
    if kind == "nemotron_h":
        return nemotron(c, tokens)
    if kind == "lfm2" and c.get("full_attn_idxs"):
        full, (layers, kv, size) = len(c["full_attn_idxs"]), geometry(c)
        return full * kv * size * 4 * tokens, (layers - full) * (c["conv_L_cache"] - 1) * c["hidden_size"] * 2
    hybrid = sliding(c, kind, tokens, index_bytes)
    if hybrid is not None:
        return hybrid, 0
    if kind in DENSE:
        layers, kv, size = geometry(c, 32 if kind in ("qwen2", "qwen3") else None)
        if kind == "deepseek_v2":
            kv = c["num_key_value_heads"]
        return layers * kv * size * 2 * tokens * 2, 0
    if kind == "deepseek_v2" or config["model_type"] == "deepseek_vl_v2":
        layers, kv, size = geometry(c)
        return layers * kv * size * 2 * tokens * 2, 0
    if kind == "bert":
        return 0, 0
    return None


def sliding(c: dict[str, Any], kind: str, tokens: int, index_bytes: Callable[[int], int]) -> int | None:
    """Return the growing bytes of a model with windows, by its own rule, or None for another model."""
    listed = c.get("layer_types")
    layers, kv, size = (0, 0, 0) if kind == "step3p7" and not listed else geometry_or_zero(c)
    window = c.get("sliding_window")
    if kind in ("mistral", "mixtral", "phi3", "phimoe"):
        kv = c.get("num_key_value_heads") or 8
        return windows([True] * layers, window, tokens) * kv * size * 4
    if kind in ("gemma2", "gemma3_text"):
        size = c.get("head_dim", 256)
        every = 2 if kind == "gemma2" else c.get("sliding_window_pattern", 6)
        kinds = (
            [bool((i + 1) % every) for i in range(layers)] if listed is None else [k[0] == "s" for k in listed]
        )
        return windows(kinds, window or 4096, tokens) * kv * size * 4
    if kind in ("gpt_oss", "laguna", "step3p7"):
        return windows([k.startswith("sliding") for k in listed], window, tokens) * kv * size * 4
    if kind == "gemma4_text":
        wide = c["num_global_key_value_heads"] * c["global_head_dim"]
        return sum(
            (min(tokens, window) * kv * size if k.startswith("sliding") else tokens * wide) * 4 for k in listed
        )
    if kind == "mimo_v2_flash":
        full = c["num_key_value_heads"] * (c["head_dim"] + c["v_head_dim"])
        local = c["swa_num_key_value_heads"] * (c["swa_head_dim"] + c["swa_v_head_dim"])
        return sum((min(tokens, window) * local if s else tokens * full) * 2 for s in c["hybrid_layer_pattern"])
    if kind == "llama4_text":
        chunk = c["attention_chunk_size"]
        return windows([(i + 1) % 4 != 0 for i in range(layers)], chunk, tokens) * kv * size * 4
    if kind in ("minimax_m3", "minimax_m3_vl"):
        sparse = c["sparse_attention_config"]
        keys = sum(sparse["sparse_attention_freq"]) * index_bytes(sparse["sparse_index_dim"])
        return (layers * kv * size * 4 + keys) * tokens
    if kind == "mllama_text_model":  # cross-attention layers cache the image instead of the text
        return (layers - len(c["cross_attention_layers"])) * kv * size * tokens * 4
    return None


def geometry_or_zero(c: dict[str, Any]) -> tuple[int, int, int]:
    """Return ``geometry``, or zeros for a config without a hidden size."""
    return geometry(c) if first(c, "hidden_size", "n_embd", "n_embed", "d_model") else (0, 0, 0)


def delta_net(c: dict[str, Any], tokens: int) -> tuple[int, int]:
    """Return the bytes of gated delta net models.

    A quarter of the layers have attention; the others keep a convolution and one matrix per head.
    """
    layers, kv, size = geometry(c)
    full = c["layer_types"].count("full_attention")
    keys = c["linear_num_key_heads"] * c["linear_key_head_dim"]
    values = c["linear_num_value_heads"] * c["linear_value_head_dim"]
    conv = (c["linear_conv_kernel_dim"] - 1) * (2 * keys + values) * 2
    state = c["linear_num_value_heads"] * c["linear_key_head_dim"] * c["linear_value_head_dim"]
    state *= 4 if c.get("mamba_ssm_dtype") == "float32" else 2
    return full * kv * size * 4 * tokens, (layers - full) * (conv + state)


def nemotron(c: dict[str, Any], tokens: int) -> tuple[int, int]:
    """Return the bytes of Nemotron-H: Mamba-2 where the pattern has M, attention where it has *."""
    pattern = c.get("hybrid_override_pattern") or "".join(
        {"mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*"}.get(k, "-")
        for k in c["layers_block_type"]
    )
    size = c.get("head_dim") or c["attention_head_dim"]
    inner = c["mamba_num_heads"] * c["mamba_head_dim"]
    conv = (c["conv_kernel"] - 1) * (inner + 2 * c["n_groups"] * c["ssm_state_size"]) * 2
    state = inner * c["ssm_state_size"] * (4 if c.get("mamba_ssm_cache_dtype") == "float32" else 2)
    return pattern.count("*") * c["num_key_value_heads"] * size * 4 * tokens, pattern.count("M") * (
        conv + state
    )


def deepseek_v4(c: dict[str, Any], tokens: int) -> tuple[int, int]:
    """Return the bytes of DeepSeek-V4, which has one shared head.

    Each layer keeps a window, and entries of 4 tokens with an indexer key or of 128 tokens without one. Its
    state is the tokens that are collected for the next entry.
    """
    size, key, window = c["head_dim"], c["index_head_dim"], c["sliding_window"]
    ratios = c["compress_ratios"][: c["num_hidden_layers"]]
    grow = len(ratios) * min(tokens, window) * size
    grow += ratios.count(4) * (tokens // 4) * (size + key) + ratios.count(128) * (tokens // 128) * size
    state = ratios.count(4) * 2 * 8 * 2 * (size + key) + ratios.count(128) * 2 * 128 * size
    return grow * 2, state * 2
