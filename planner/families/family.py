"""``Family``: what the planner, the engines and PEFT need to know about one model type.

A module of this folder that defines families has a dict ``FAMILIES`` (model_type -> Family), which registry.py
reads. A new family therefore needs only one new file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.fields import Fields
from tonnage.planner.model.recipe import NormKind

Values = tuple[object, ...] | str
"""Harmless values of a leftover field: a tuple of values, an empty tuple for any value, or the name of a field
whose value it must repeat."""

Paged = Literal[
    "served", "unreviewed", "encoder-decoder", "encoder", "latent", "recurrent", "own attention",
    "keywords lost", "routing", "alibi", "sinks", "two attentions", "page sizes", "chunked masks",
]  # fmt: skip
"""Whether the Hugging Face engine's paged path serves a family: ``served`` after a trial, else the reason.

``unreviewed`` means that the family was never tried. server/engines/hf/model/support.py has the messages."""


@dataclass(frozen=True, slots=True)
class VLLMTraits:
    """Properties of a model family in vLLM 0.32.0 that differ from most families.

    Attributes:
        float16: whether vLLM accepts float16; False for the models in _FLOAT16_NOT_SUPPORTED_MODELS
            (config/model.py).
        float32_states: whether the recurrent state is float32 by default (NemotronHForCausalLMConfig in
            model_executor/models/config.py; Qwen3.5 by mamba_ssm_dtype of its config; KDA in mamba_utils.py).
        alternating: whether a layer's index, not the config, decides if it has a sliding window
            (model_executor/models/gpt_oss.py).
        expanded_mla: whether latent attention (MLA) is computed and cached as ordinary full attention, with V
            padded to K's head size (model_executor/models/minicpm3.py).
        one_mrope_length: whether rotary tables have a single length although positions are three-dimensional
            (models/qwen3_vl.py, mrope_positions_factor).
        wide_router: whether the router matrix is kept in float32 (params_dtype of GateLinear in
            model_executor/models).
        embeddings: encoder class whose embeddings vLLM serves (_EMBEDDING_MODELS,
            model_executor/models/registry.py).
        masked: encoder class with a masked-language-model head, also in _EMBEDDING_MODELS.
        lora_vocabulary: 2 if the class supports LoRA on the embedding and the head, 1 if only on the embedding
            (Cohere), else 0 (``embedding_modules`` in model_executor/models). Each of these layers has LoRA
            slots over the whole vocabulary on every rank, even if embedding and head are tied
            (lora/layers/vocab_parallel_embedding.py, logits_processor.py).
    """

    float16: bool = True
    float32_states: bool = False
    alternating: bool = False
    expanded_mla: bool = False
    one_mrope_length: bool = False
    wide_router: bool = False
    embeddings: str | None = None
    masked: str | None = None
    lora_vocabulary: int = 0


@dataclass(frozen=True, slots=True)
class GGUFTraits:
    """How a GGUF file stores a family (transformers 5.19, integrations/ggml.py; gguf package 0.19.0).

    Attributes:
        name: value of general.architecture in the GGUF file.
        class_name: the causal language model's class in transformers.
        norms: norms of a layer other than attn_norm: name in the GGUF file -> name in transformers' state dict.
        rotary_head: whether rope.dimension_count is the head size if the file does not state
            attention.key_length.
        window: whether the GGUF file states the sliding window.
        bias: whether the GGUF file's tensors decide if attention has biases: it has them if bias tensors exist.
    """

    name: str
    class_name: str
    norms: Mapping[str, str]
    rotary_head: bool = False
    window: bool = False
    bias: bool = False


@dataclass(frozen=True, slots=True)
class FileTraits:
    """Differences between a family's published files and the modules that transformers loads from them.

    Attributes:
        renamed: whether most tensors have other names, which transformers changes while loading (5.19,
            conversion_mapping.py).
        tied_head: whether the file stores the output head although the head is tied to the embedding.
        masks_before: transformers version. A file written by an older version stores three buffers in every
            layer: a boolean mask over all pairs of positions, the score that masked pairs get, and the rotary
            frequencies. The total size in the checkpoint's index counts a mask entry as one bit.
        exponent_scales: whether FP8 scales named ue8m0 are stored as one exponent byte. In other families the
            name ue8m0 only means that the scales are powers of two: DeepSeek-V3.1 stores them as fp32.
        sentence_length: whether the maximum text length is in a file of sentence-transformers beside
            config.json, which vLLM also reads (get_sentence_transformer_tokenizer_config,
            transformers_utils/config.py 0.32.0).
    """

    renamed: bool = False
    tied_head: bool = False
    masks_before: tuple[int, int] | None = None
    exponent_scales: bool = False
    sentence_length: bool = False


NO_TRAITS, _FILES = VLLMTraits(), FileTraits()


@dataclass(frozen=True, slots=True)
class Family:
    """Facts about one model type that the planner, the engines and PEFT need.

    Attributes:
        build: function that builds an Architecture from a checked config. None means that the planner has no
            such function; the plan then uses transformers' own modules (planner/families/meta.py).
        ignored: config fields that change neither tensor shapes nor the KV cache.
        aliases: standard config field -> the family's name for it (attribute_map of the config classes,
            transformers 5.19).
        absent: config field -> default value in transformers 5.19 if config.json lacks the field; null does not
            count as lacking. Defaults of the basic sizes are in config_defaults.json.
        leftovers: config fields whose names suggest a shape, but which neither transformers 5.19 nor vLLM
            0.32.0 reads, with their harmless values. tests/planner/test_leftovers.py checks this against the
            code of both. Most of these fields come from the remote code with which a model was first published.
        refusal: why the planner cannot build the family from its config, for the error message; empty when no
            reason is known.
        first_class: class name in the first published files, from their remote code.
        other_classes: further classes of vLLM's registry with the same tensors and KV cache.
        reads_class: whether ``build`` reads the config field ``architectures`` itself.
        attentions: attention implementations other than eager that transformers 5.19 supports for the class
            (_supports_sdpa, _supports_flash_attn).
        final_norm: kind of the final norm; used to estimate activations of models without a recipe (layer
            description).
        every_expert: whether transformers computes all experts for each token (modeling_llama4.py,
            hidden_states.repeat(num_experts, 1)); used to estimate activations of models without a recipe.
        lora: target modules that PEFT 0.21 chooses for LoRA (peft/utils/constants.py), None when it has none.
        ia3: target modules that PEFT 0.21 chooses for IA3, None when it has none.
        hf: whether the Hugging Face engine serves the family, or the reason why not.
        vllm: properties of the family in vLLM that differ from most families.
        gguf: how a GGUF file stores the family; None if GGUF files of the family are not supported.
        files: how published files differ from the loaded modules.
    """

    build: Callable[[Fields, str], Architecture] | None
    ignored: tuple[str, ...] = ()
    aliases: Mapping[str, str] | None = None
    absent: Mapping[str, int] | None = None
    leftovers: Mapping[str, Values] | None = None
    refusal: str = ""
    first_class: str | None = None
    other_classes: tuple[str, ...] = ()
    reads_class: bool = False
    attentions: tuple[str, ...] = ("sdpa", "flash")
    final_norm: NormKind = "rms"
    every_expert: bool = False
    lora: tuple[str, ...] | None = None
    ia3: tuple[str, ...] | None = None
    hf: Paged = "unreviewed"
    vllm: VLLMTraits = NO_TRAITS
    gguf: GGUFTraits | None = None
    files: FileTraits = _FILES


NO_FAMILY = Family(None)

# values of `Family` fields that several families share
QV = ("q_proj", "v_proj")
QV_DOWN = (*QV, "down_proj")
GPT2_NAMES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
EAGER: tuple[str, ...] = ()
LORA_ON_VOCABULARY = VLLMTraits(lora_vocabulary=2)
RENAMED = FileTraits(renamed=True)
