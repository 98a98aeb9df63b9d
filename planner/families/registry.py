"""model_type -> adapter. A new family is one file and one line here."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from tonnage.planner.errors import ConfigError, UnsupportedArchitecture
from tonnage.planner.families.absent import ABSENT
from tonnage.planner.families.leftovers import LEFTOVERS
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.fields import Fields, shown
from tonnage.planner.records import replace

# module -> the model_types it builds. A module is imported when one of its types is asked for.
_MODULES = {
    "llama": (
        "llama mistral qwen2 qwen3 granite helium smollm3 seed_oss glm glm4 ernie4_5 exaone4 olmo olmo2 "
        "olmo3 arcee apertus bitnet cohere cohere2 diffllama doge hunyuan_v1_dense starcoder2 stablelm "
        "persimmon phi phi3 nemotron xverse baichuan"
    ),
    "moe": (
        "mixtral qwen2_moe qwen3_moe olmoe flex_olmo phimoe granitemoe granitemoeshared minimax_m2 "
        "ernie4_5_moe glm4_moe dots1 hunyuan_v1_moe"
    ),
    "mla": (
        "deepseek_v2 deepseek_v3 deepseek_v32 kimi_k2 glm_moe_dsa glm4_moe_lite mistral4 minicpm3 longcat_flash"
    ),
    "moe_mixed": "gpt_oss laguna mimo_v2_flash step3p7_text minimax_m3 dbrx jetmoe",
    "llama4": "llama4_text",
    "linear": "qwen3_next qwen3_5_text qwen3_5_moe_text kimi_linear minimax lfm2 lfm2_moe",
    "mamba": "mamba mamba2 falcon_mamba",
    "mamba_hybrid": "bamba granitemoehybrid falcon_h1 jamba nemotron_h",
    "zamba": "zamba zamba2",
    "gpt": "gpt2 gpt_neo gptj codegen opt bloom mpt",
    "remote_code": "qwen chatglm exaone mimo mixformer-sequential phi3small nemotron-nas",
    "seq2seq": "bart mbart pegasus whisper t5 mt5 umt5 t5gemma moonshine moshi musicgen_decoder",
    "bert": "bert roberta xlm-roberta camembert mpnet distilbert",
    "modernbert": "modernbert",
    "recurrent": "recurrent_gemma rwkv xlstm",
    "gemma": "gemma gemma2 gemma3_text vaultgemma",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "deepseek_v4": "deepseek_v4 deepseek_ref",
    "multimodal": (
        "deepseek_vl_v2 gemma3 gemma3n gemma4 llava qwen2_vl qwen2_5_vl qwen3_vl qwen3_vl_moe qwen3_5 "
        "qwen3_5_moe mllama mllama_text_model llama4 kimi_k25 minimax_m3_vl step3p7"
    ),
    "gpt_neox": "gpt_neox",
    "falcon": "falcon RefinedWeb RefinedWebModel",
    "gpt_bigcode": "gpt_bigcode",
}
_OWN_CLASSES = ("seq2seq", "bert", "modernbert")  # adapters that read ``architectures`` themselves
_ADAPTERS = {model_type: module for module, types in _MODULES.items() for model_type in types.split()}

# Other spellings of standard fields: attribute_map of the config classes (transformers 5.19) and, for
# Falcon, the names of the first published files.
_GPT2_NAMES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
_ALIASES = {
    "gpt2": _GPT2_NAMES,
    "gptj": _GPT2_NAMES,
    "codegen": _GPT2_NAMES,
    "gpt_bigcode": _GPT2_NAMES,
    "mixformer-sequential": _GPT2_NAMES,
    "gpt_neo": {"num_attention_heads": "num_heads", "num_hidden_layers": "num_layers"},
    "bloom": {"hidden_size": "n_embed", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"},
    "mpt": {"hidden_size": "d_model", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"},
    "qwen3_moe": {"num_experts": "num_local_experts"},  # the spelling transformers 5.19 writes
    "step3p7_text": {"num_experts": "n_routed_experts"},
    "distilbert": {
        "hidden_size": "dim",
        "intermediate_size": "hidden_dim",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
    },
    "exaone": {"num_hidden_layers": "num_layers"},
    "RefinedWeb": {
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
        "num_kv_heads": "n_head_kv",
    },
}
_ALIASES["RefinedWebModel"] = _ALIASES["RefinedWeb"]


# Class names of the first published files (remote code) of a family that transformers names otherwise.
_OTHER_CLASSES = {
    "RefinedWeb": "RWForCausalLM",
    "RefinedWebModel": "RWForCausalLM",
    "phimoe": "PhiMoEForCausalLM",
    "llava": "LlavaLlamaForCausalLM",
    "kimi_k25": "KimiK25ForConditionalGeneration",
    "step3p7": "Step3p7FlashForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForConditionalGeneration",  # text-only checkpoints of a pruned model
}


def _known(model_type: str) -> str:
    from difflib import get_close_matches

    close = get_close_matches(model_type, _ADAPTERS, 5, 0.5)
    also = f"close to it: {', '.join(close)}; " if close else ""
    return f"{also}{len(_ADAPTERS)} model types are known"


def known_model_types() -> tuple[str, ...]:
    return tuple(_ADAPTERS)


_last: tuple[str, Architecture] | None = None  # advice plans one model under a dozen flags


def build_architecture(config: Mapping[str, Any]) -> Architecture:
    """The adapter's Architecture where every field is understood. Raises UnsupportedArchitecture for an
    unknown ``model_type`` or field, ConfigError for values that are missing, of the wrong type or contradict
    each other."""
    architecture = _adapted(config)
    if architecture.unread:
        raise UnsupportedArchitecture(
            f"{architecture.model_type} models are not known to have this field, and it may add biases",
            field=architecture.unread[0],
            hint="remove the field from config.json if it is a leftover",
        )
    return architecture


def _adapted(config: Mapping[str, Any]) -> Architecture:
    """:func:`_build`, remembering the last answer."""
    global _last
    small = {key: value for key, value in config.items() if key != "quantization_config"}
    written = repr(small)
    if _last is None or _last[0] != written:
        _last = (written, _build(config))
    return _last[1]


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    """The adapter's answer, also with ``unread`` switches, or, for a model_type without one, what
    transformers' own modules hold where it is installed and knows the family (meta.py). Raises what both do."""
    global _last
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type in _ADAPTERS:
        return _adapted(config)
    written = repr(config)
    if _last is None or _last[0] != written:
        from tonnage.planner.families.meta import meta_architecture

        _last = (written, meta_architecture(config, _unknown(model_type)))
    return _last[1]


def _unknown(model_type: str) -> UnsupportedArchitecture:
    return UnsupportedArchitecture(
        f"{model_type[:60]!r} is not supported", field="model_type", hint=_known(model_type)
    )


def _build(config: Mapping[str, Any]) -> Architecture:
    model_type = config.get("model_type")
    if model_type is None:
        raise ConfigError("missing", field="model_type", hint="is this the config.json of a language model?")
    if not isinstance(model_type, str):
        raise ConfigError(f"{shown(model_type)} is not a string", field="model_type")
    if model_type not in _ADAPTERS:
        raise _unknown(model_type)
    if config.get("is_encoder_decoder") and _ADAPTERS[model_type] not in _OWN_CLASSES:
        raise UnsupportedArchitecture("true is not known for this family", field="is_encoder_decoder")
    fields = Fields(config, _ALIASES.get(model_type), ABSENT.get(model_type))
    adapter = import_module(f"tonnage.planner.families.{_ADAPTERS[model_type]}")
    architecture: Architecture = adapter.build(fields, _family(model_type, fields))
    fields.ignore("is_encoder_decoder")
    return _check_class(config, model_type, _checked(fields, model_type, architecture))


def build_text(config: Mapping[str, Any], model_type: str) -> Architecture:
    """The text model of a multimodal config, whatever class its own ``architectures`` names."""
    fields = Fields(config, _ALIASES.get(model_type), ABSENT.get(model_type))
    adapter = import_module(f"tonnage.planner.families.{_ADAPTERS[model_type]}")
    architecture: Architecture = adapter.build(fields, model_type)
    return _checked(fields, model_type, architecture)


def _checked(fields: Fields, model_type: str, architecture: Architecture) -> Architecture:
    unread = fields.check_unread(model_type, LEFTOVERS.get(model_type, {}))
    return replace(architecture, unread=architecture.unread + unread) if unread else architecture


def _family(model_type: str, fields: Fields) -> str:
    if model_type == "RefinedWeb":
        # the 40B files state no flag: RefinedWeb is the new decoder architecture by definition
        fields.config = {"new_decoder_architecture": True, **fields.config}
    return "falcon" if model_type.startswith("RefinedWeb") else model_type


def _check_class(config: Mapping[str, Any], model_type: str, architecture: Architecture) -> Architecture:
    """``architectures`` must name the causal language model or its body (``MistralModel``: no head);
    other classes have other tensors."""
    names = config.get("architectures")
    if names is None or _ADAPTERS[model_type] in _OWN_CLASSES:
        return architecture
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{shown(names)} is not a list of class names", field="architectures")
    body = architecture.class_name
    for suffix in ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration"):
        body = body.removesuffix(suffix)
    body = body.removesuffix("Model") + "Model"
    if not names or {architecture.class_name, _OTHER_CLASSES.get(model_type)} & set(names):
        return architecture
    if body in names:
        tensors = tuple(t for t in architecture.tensors if t.role != "head")
        return replace(architecture, class_name=body, tensors=tensors)
    raise UnsupportedArchitecture(
        f"{shown(names)} is not {architecture.class_name}: only the causal language model of "
        f"{model_type} is planned",
        field="architectures",
    )
