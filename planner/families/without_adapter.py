"""Model types without an adapter of which something is known beside: their plans come from transformers' own
modules (planner/families/meta.py)."""

from __future__ import annotations

from tonnage.planner.families.family import LORA_ON_VOCABULARY, Family, Paged

# Why the Hugging Face engine does not serve them, or that it does
_PAGED: dict[Paged, str] = {
    "served": "biogpt ctrl cwm ministral ministral3 modernbert-decoder nanochat",
    "encoder-decoder": (
        "bigbird_pegasus blenderbot blenderbot-small led longt5 m2m_100 marian musicgen musicgen_melody mvp "
        "nllb-moe pegasus_x plbart prophetnet seamless_m4t speech_to_text switch_transformers trocr udop"
    ),
    "encoder": (
        "bert-generation big_bird data2vec-text electra ernie megatron-bert rembert roberta-prelayernorm "
        "roc_bert roformer xlm xlm-roberta-xl xlnet xmod"
    ),
    "latent": "youtu",
    "recurrent": "olmo_hybrid",
    "own attention": "cpmant gpt_neox_japanese openai-gpt reformer xglm",
    "page sizes": "gemma4_unified_text",
}
FAMILIES = {name: Family(None, hf=hf) for hf, names in _PAGED.items() for name in names.split()} | {
    "hyperclovax": Family(None, hf="served", vllm=LORA_ON_VOCABULARY),
    **dict.fromkeys(("exaone_moe", "minicpm", "solar"), Family(None, vllm=LORA_ON_VOCABULARY)),
}
