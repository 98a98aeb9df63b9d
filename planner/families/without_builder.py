"""Model types that the planner cannot build from their config, with facts such as which engine serves them.

Their plans come from transformers' own modules (planner/families/meta.py).
"""

from __future__ import annotations

from tonnage.planner.families.family import Family, Paged

# "served", or the reason why the Hugging Face engine cannot serve a type -> model types
_PAGED: dict[Paged, str] = {
    "served": "biogpt ctrl ministral modernbert-decoder nanochat",
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
_TOWERS = "the planner cannot build its towers and connectors"
_NO_TEXT = "it generates no text"
_ENCODER = "the planner cannot build its encoder"
# Model type, new in transformers 5.23 (models/<family>/) -> reason why the planner cannot build it from its
# config. With that version installed, types that generate text are planned from transformers' modules.
_REFUSED = {
    **dict.fromkeys(
        ("dots3_note", "dots3_note_text"),
        "its sliding layers keep latents of another width than the others, in a window",
    ),
    **dict.fromkeys(
        ("inkling2", "inkling2_text"), "each layer keeps four convolution states beside its keys and values"
    ),
    **dict.fromkeys(
        ("muse_spark", "muse_spark_text"),
        "the planner cannot build experts of another width than the model, gates on residuals and two towers",
    ),
    **dict.fromkeys(
        ("unlimited_ocr", "unlimited_ocr_text"),
        "its cache keeps image and prompt in full and a window of later tokens (reference_sliding_attention)",
    ),
    **dict.fromkeys(("nemo_speechlm", "moss_transcribe_diarize"), _TOWERS),
    **dict.fromkeys(
        ("gradium_phonon_tts", "jev", "pocket_tts", "pocket_tts_audio_tokenizer", "pp_doclayout_v4"), _NO_TEXT
    ),
    **dict.fromkeys(("ultrabert", "ultravbert"), _ENCODER),
}
FAMILIES = {name: Family(None, hf=hf) for hf, names in _PAGED.items() for name in names.split()} | {
    **{name: Family(None, refusal=why) for name, why in _REFUSED.items()},
}
