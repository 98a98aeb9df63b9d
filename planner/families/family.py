"""What a model type is, to the planner and to the engines: one ``Family``, in the module that builds it.

A module of this folder keeps its rows in ``FAMILIES`` (model_type -> Family); registry.py finds them there, so
that a new family is one file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.fields import Fields
from tonnage.planner.model.recipe import NormKind
from tonnage.planner.records import dataclass

Values = tuple[object, ...] | str
"""Of a leftover: the values known to be harmless, listed, any (an empty tuple), or those of another field."""

Paged = Literal[
    "served", "unreviewed", "encoder-decoder", "encoder", "latent", "recurrent", "own attention",
    "keywords lost", "routing", "alibi", "sinks", "two attentions", "page sizes", "chunked masks",
]  # fmt: skip
"""``served``: the Hugging Face engine's paged path was tried with the family. Else why it does not serve it
(server/engines/hf/model/support.py has the sentences); ``unreviewed``: nobody looked."""


@dataclass(frozen=True, slots=True)
class InVLLM:
    """What vLLM does otherwise with a family. Files named are those of vLLM 0.32.0.

    ``float16``: False where it is refused (_FLOAT16_NOT_SUPPORTED_MODELS, config/model.py).
    ``float32_states``: recurrent state kept in float32 by default (model_executor/models/config.py,
    NemotronHForCausalLMConfig; Qwen3.5 by its config's mamba_ssm_dtype; KDA in mamba_utils.py).
    ``alternating``: windows given out by the layer's number (model_executor/models/gpt_oss.py).
    ``expanded_mla``: latent attention that is run, and stored, as full attention, V padded to K's head size
    (model_executor/models/minicpm3.py).
    ``one_mrope_length``: rotary tables of one length although positions are three-dimensional
    (models/qwen3_vl.py, mrope_positions_factor).
    ``wide_router``: the matrix that chooses experts is kept in float32 (GateLinear's params_dtype in
    model_executor/models).
    ``embeddings``: the encoder class whose vectors it gives (model_executor/models/registry.py,
    _EMBEDDING_MODELS).
    ``lora_vocabulary``: how many of embedding and head its class names as modules for LoRA
    (``embedding_modules`` in model_executor/models): these have slots over the whole vocabulary on each rank,
    also where the two are one tensor (lora/layers/vocab_parallel_embedding.py, logits_processor.py). Cohere's
    names the embedding alone.
    """

    float16: bool = True
    float32_states: bool = False
    alternating: bool = False
    expanded_mla: bool = False
    one_mrope_length: bool = False
    wide_router: bool = False
    embeddings: str | None = None
    lora_vocabulary: int = 0


@dataclass(frozen=True, slots=True)
class InGGUF:
    """The family in GGUF files (transformers 5.19, integrations/ggml.py; gguf package 0.19.0).

    ``name``: general.architecture. ``norms``: names of a layer's norms besides attn_norm -> state dict.
    ``rotary_head``: rope.dimension_count is the head size where no key length is given. ``window``: the file
    says the sliding window. ``bias``: attention biases are seen from the tensors.
    """

    name: str
    class_name: str
    norms: Mapping[str, str]
    rotary_head: bool = False
    window: bool = False
    bias: bool = False


@dataclass(frozen=True, slots=True)
class InFiles:
    """How published files differ from the modules that transformers makes of them.

    ``renamed``: they name most modules otherwise; transformers renames them while loading (5.19,
    conversion_mapping.py). ``tied_head``: they store the head beside the embedding it is tied to.
    ``masks_before``: written by transformers older than this, they store in every layer a boolean mask of all
    positions (an index counts a bit for each), the masked value and the rotary frequencies.
    ``exponent_scales``: FP8 scales called ue8m0 are stored as the exponent alone (elsewhere the name is about
    values: DeepSeek-V3.1 stores fp32). ``sentence_length``: sentence-transformers adds the longest text beside
    the config, for vLLM (transformers_utils/config.py 0.32.0, get_sentence_transformer_tokenizer_config) as for
    itself.
    """

    renamed: bool = False
    tied_head: bool = False
    masks_before: tuple[int, int] | None = None
    exponent_scales: bool = False
    sentence_length: bool = False


_VLLM, _FILES = InVLLM(), InFiles()


@dataclass(frozen=True, slots=True)
class Family:
    """One model type.

    ``build``: a checked config -> Architecture; None: no adapter, it is planned from transformers' own modules
    (planner/families/meta.py). ``ignored``: fields that change neither shapes nor the cache. ``aliases``: other
    spellings of standard fields (attribute_map of the config classes, transformers 5.19). ``absent``: what the
    config class of transformers 5.19 puts in place of a field that the file does not have (null is not
    absent), where that is a number of its own; basic sizes have none: a file without them is refused.
    ``leftovers``: fields that sound like a shape and that neither transformers 5.19 nor vLLM 0.32.0 reads
    (tests/planner/test_leftovers.py holds that against their code); most were left by the remote code that a
    model was first published with. ``first_class``: the class the first published files (remote code) name.
    ``reads_class``: ``build`` reads ``architectures`` itself.

    ``attentions``: what its class in transformers 5.19 has beside eager (_supports_sdpa, _supports_flash_attn).
    To estimate activations where the tape knows no recipe: ``final_norm``, the kind of the last norm;
    ``every_expert``: a token goes through all of them (modeling_llama4.py, hidden_states.repeat(num_experts,
    1)).
    ``lora``, ``ia3``: PEFT 0.21's own target modules (peft/utils/constants.py), None where it has none.
    """

    build: Callable[[Fields, str], Architecture] | None
    ignored: tuple[str, ...] = ()
    aliases: Mapping[str, str] | None = None
    absent: Mapping[str, int] | None = None
    leftovers: Mapping[str, Values] | None = None
    first_class: str | None = None
    reads_class: bool = False
    attentions: tuple[str, ...] = ("sdpa", "flash")
    final_norm: NormKind = "rms"
    every_expert: bool = False
    lora: tuple[str, ...] | None = None
    ia3: tuple[str, ...] | None = None
    hf: Paged = "unreviewed"
    vllm: InVLLM = _VLLM
    gguf: InGGUF | None = None
    files: InFiles = _FILES


NO_FAMILY = Family(None)

# What several families have
QV = ("q_proj", "v_proj")
QV_DOWN = (*QV, "down_proj")
GPT2_NAMES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
EAGER: tuple[str, ...] = ()
LORA_ON_VOCABULARY = InVLLM(lora_vocabulary=2)
RENAMED = InFiles(renamed=True)
