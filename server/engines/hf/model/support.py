"""Which architectures the paged path serves, and why the known others are refused. Imports no torch.

transformers 5.19.0: an architecture qualifies when every layer calls the registered attention function with the
step's own K/V, hands keyword arguments down, and depends on positions and masks only token by token. The
self-check at start (:mod:`.selfcheck`) proves it for the model at hand; the list keeps surprises out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tonnage.planner.errors import UnsupportedArchitecture

# Each gives the tokens of transformers' generate as a tiny random model in float32, passes the self-check in
# bfloat16 and holds the planned bytes (tests/server/test_hf_runner.py, test_hf_families.py).
ALLOWED = frozenset(
    """
    apertus arcee biogpt bitnet cohere cohere2 ctrl cwm doge ernie4_5 exaone4 flex_olmo gemma gemma2 gemma3_text
    glm glm4 glm4_moe gpt2 gpt_bigcode gpt_neox granite helium hunyuan_v1_dense hyperclovax jais2 llama
    ministral ministral3 mistral modernbert-decoder nanochat olmo olmo2 olmo3 olmoe opt persimmon phi phi3
    qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 starcoder2 vaultgemma
    """.split()  # noqa: SIM905
)

# Why the others are not served, and what it would take; then the model types it is true of.
_REASONS = {
    "it is an encoder-decoder model, and needs the encoder's run and a cache of cross-attention for each "
    "request": """
    bart bigbird_pegasus blenderbot blenderbot-small led longt5 m2m_100 marian mbart moonshine moshi mt5
    musicgen musicgen_melody mvp nllb-moe pegasus pegasus_x plbart prophetnet seamless_m4t speech_to_text
    switch_transformers t5 t5gemma trocr udop umt5 whisper
    """,
    "it is an encoder that looks both ways, and has no KV cache": """
    bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert modernbert rembert roberta
    roberta-prelayernorm roc_bert roformer xlm xlm-roberta xlm-roberta-xl xlnet xmod
    """,
    "MLA hands over expanded K and V (71 times the latent), and needs a latent pool and kernels that absorb "
    "the projections": """
    deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa kimi_k2 longcat_flash minicpm3 mistral4 youtu
    """,
    "its recurrent layers mix the sequences of a flat batch, and need a pool of states and a scan for each "
    "sequence": """
    bamba falcon_h1 falcon_mamba granitemoehybrid jamba kimi_linear lfm2 lfm2_moe mamba mamba2 minimax
    nemotron_h olmo_hybrid qwen3_5_moe_text qwen3_5_text qwen3_next recurrent_gemma rwkv xlstm zamba zamba2
    """,
    "its attention does not go through the attention interface, and needs a port of its attention classes": """
    codegen cpmant falcon gpt_neo gpt_neox_japanese gptj openai-gpt reformer xglm
    """,
    "it does not hand keyword arguments down to attention, and needs that in its layers": "nemotron stablelm",
    "in bfloat16 rounding makes its router choose other experts, which the self-check cannot tell from an "
    "error: it needs a check that follows the routing": "minimax_m2 mixtral phimoe",
    "it adds ALiBi inside its own attention, and needs a bias for each head in the kernels": "bloom mpt",
    "its softmax has a sink for each head, which the kernels would have to add": "gpt_oss mimo_v2_flash",
    "it takes the difference of two attentions, and needs both in one slot of the pool": "diffllama",
    "its layers share K and V or have two head sizes, and need pages of more than one size": """
    gemma3n_text gemma4_text gemma4_unified_text
    """,
    "its chunked masks are built for the whole batch, and need chunked windows in the layout": """
    llama4 llama4_text
    """,
}
REFUSED = {name: reason for reason, names in _REASONS.items() for name in names.split()}


def require_supported(model_type: str) -> None:
    """Raise UnsupportedArchitecture unless the Hugging Face engine serves this ``model_type``."""
    if model_type in ALLOWED:
        return
    reason = REFUSED.get(model_type, "it is not on the reviewed list")
    raise UnsupportedArchitecture(
        f"{model_type!r} is not served by the hf backend: {reason}",
        field="model_type",
        hint=f"use --backend vllm, or one of {', '.join(sorted(ALLOWED))}",
    )


def require_fixed_rotary(config: Mapping[str, Any], max_model_len: int) -> None:
    """Raise UnsupportedArchitecture where rotary frequencies would depend on what else is in the batch.

    transformers takes LongRoPE's and dynamic NTK's frequencies from the largest position of the whole forward
    (5.19, modeling_rope_utils.py dynamic_rope_update): up to the original context they are the same for all.
    """
    for name in ("rope_parameters", "rope_scaling"):
        found = config.get(name)
        if not isinstance(found, Mapping):
            continue
        tables = [value for value in found.values() if isinstance(value, Mapping)] or [found]
        for table in tables:
            kind = table.get("rope_type", table.get("type"))
            if kind not in ("longrope", "su", "dynamic"):
                continue
            original = config.get("max_position_embeddings")
            if kind != "dynamic":
                key = "original_max_position_embeddings"
                original = table.get(key, config.get(key))
            if not isinstance(original, int) or max_model_len > original:
                raise UnsupportedArchitecture(
                    f"{kind!r} picks its frequencies by the longest sequence of the batch: beyond the original "
                    f"context of {original} tokens answers would depend on other requests",
                    field=f"{name}.rope_type",
                    hint=f"--max-model-len {original}" if isinstance(original, int) else "use --backend vllm",
                )
