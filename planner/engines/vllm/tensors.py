"""The tensors that vLLM holds: the weights of its merged modules, and four scales per attention layer."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from tonnage.planner.deployment import Deployment
from tonnage.planner.engines.tensors import merged_tensors, padded_rows, rotary_tables
from tonnage.planner.engines.version import Version
from tonnage.planner.engines.vllm.multimodal import is_lost, lost_towers
from tonnage.planner.engines.vllm.versions import rules, version_of
from tonnage.planner.families.registry import family_of
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.tensor import TensorSpec

# The cos/sin table of vLLM's MRotaryEmbedding has this many rows per token of the maximum length, because
# positions of images and videos may exceed the token count (model_executor/layers/rotary_embedding/mrope.py).
_MROPE_FACTOR = 4

# First vLLM release that quantizes Gemma 4's towers (recursive_replace_linear in models/gemma4_mm.py, which
# 0.22.1 lacks).
_QUANTIZED_TOWERS = (0, 23, 0)
_KEYS = ".self_attn.k_proj.weight"
_INDEX_KEY = ".indexer.wk.weight"
_GATES = (".gate.weight", ".router.weight", ".mlp.expert_bias", ".router.classifier.weight")
_NGRAMS = ".ngram_embeddings.embedders.weight"
# Phi-3-vision reads the output of CLIP's last layer but one. vLLM does not build the tensors after that layer
# (_init_img_processor in models/phi3v.py).
_UNREAD = (".vision_model.encoder.layers.23.", ".vision_model.post_layernorm.")
# BERT's bias of the output head. vLLM loads it as the bias of the head's submodule "decoder".
_SHARED_BIAS = "cls.predictions.bias"


def tensors_of(architecture: Architecture, flags: Deployment) -> tuple[TensorSpec, ...]:
    """Return the tensors that vLLM holds for one rank's share of the model."""
    if architecture.kind == "encoder":
        return _encoder_tensors(architecture)
    version = version_of(flags)
    lost = lost_towers(architecture, flags, version)
    if lost:
        left = tuple(tensor for tensor in architecture.tensors if not is_lost(tensor, lost))
        architecture = replace(architecture, tensors=left)
    # Each attention layer has scales of queries, keys, values and probabilities, for every cache dtype
    # (set_default_quant_scales in model_executor/layers/attention/attention.py).
    scales = [
        _scales(f"model.layers.{layer.layer}.{layer.kind}.quant_scales", layer.layer)
        for layer in architecture.cache_layers
        if layer.kind != "state"
    ]
    held = merged_tensors(architecture, _position_factor(architecture, flags))
    # The checkpoint of MiMo has MTP layers, which vLLM loads only as a draft (model_executor/models/mimo.py).
    held = tuple(tensor for tensor in held if tensor.layer is not None or ".mtp_layers." not in tensor.name)
    # A classifier's output head is float32 (ModelConfig.head_dtype, 0.33). Other pooling models have no output
    # head (model_executor/models/adapters.py). Neither applies to models whose class defines its own pooling
    # (``architecture.pooled``), because their head's tensors already have the dtype that vLLM uses.
    if architecture.is_classifier and not architecture.pooled:
        held = tuple(replace(t, dtype="float32") if t.role == "head" else t for t in held)
    elif flags.runner == "pooling" and not architecture.pooled:
        held = tuple(tensor for tensor in held if tensor.role != "head")
    held = tuple(_served(architecture, version, tensor) for tensor in held)
    if architecture.model_type == "phi3_v":
        held = tuple(tensor for tensor in held if not any(part in tensor.name for part in _UNREAD))
    kept = _unquantized_towers(architecture, version)
    if kept:
        held = tuple(
            replace(tensor, module_class="TowerLinear") if is_lost(tensor, kept) else tensor for tensor in held
        )
    if architecture.model_type.startswith("gemma4"):
        held = (*map(partial(_gemma4_table, architecture), held), *_values_from_keys(architecture))
    # The router's correction bias is a parameter in vLLM, not a buffer (model_executor/models/deepseek_v2.py).
    biases = [
        replace(tensor, dtype="float32")
        for tensor in architecture.tensors
        if tensor.role == "buffer" and tensor.name.endswith("correction_bias")
    ]
    return (*held, *biases, *scales)


def _served(architecture: Architecture, version: Version, tensor: TensorSpec) -> TensorSpec:
    """Return a tensor of transformers' modules in the shape, dtype and module class that vLLM gives it.

    LongCat-Flash has empty experts, for which only transformers has matrices (ZeroExpertRouter in
    layers/fused_moe/router/zero_expert_router.py, 0.32).
    """
    if tensor.role == "expert" and tensor.shape[0] > architecture.experts:
        return replace(tensor, shape=(architecture.experts, *tensor.shape[1:]))
    if tensor.name.endswith(_INDEX_KEY) and rules(version).fused_index_key:
        return replace(tensor, module_class="KeptLinear")
    wide = family_of(architecture.model_type).vllm.wide_router
    if wide and tensor.role == "router" and tensor.name.endswith(_GATES):
        return replace(tensor, dtype="float32")
    return padded_rows(tensor) if tensor.name.endswith(_NGRAMS) else tensor


def _unquantized_towers(architecture: Architecture, version: Version) -> frozenset[str]:
    """Return the roles of towers that vLLM builds without quantization, whatever --quantization says.

    - The towers of Gemma 3n and Gemma 4 are transformers' modules (AutoModel in models/gemma3n_mm.py,
      gemma4_mm.py). From 0.23 on, vLLM quantizes Gemma 4's towers if their widths are multiples of 64.
    - The vision towers of Llama 4 and Kimi-VL get no quant_config (models/mllama4.py, kimi_vl.py, 0.11 to
      0.30), nor do the audio towers of Qwen's Omni models (models/qwen2_5_omni_thinker.py).
    """
    model, vision = architecture.model_type, architecture.vision
    if "omni" in model:
        return frozenset({"audio"})
    if model.startswith(("llama4", "kimi_vl")):
        return frozenset({"vision"})
    whole = vision is not None and not vision.hidden % 64 and not vision.inner % 64
    quantized = model.startswith("gemma4") and version >= _QUANTIZED_TOWERS and whole
    if model.startswith(("gemma3n", "gemma4")) and not quantized:
        return frozenset({"vision", "audio"})
    return frozenset()


def _values_from_keys(architecture: Architecture) -> tuple[TensorSpec, ...]:
    """Return the value projections that vLLM adds for Gemma 4's layers whose values equal their keys.

    The checkpoint stores only the key projection, and vLLM loads it twice (k_eq_v in models/gemma4.py, 0.19 to
    0.30).
    """
    names = {tensor.name for tensor in architecture.tensors}
    decoder = (tensor for tensor in architecture.tensors if tensor.role == "attention")
    keys = (tensor for tensor in decoder if tensor.name.endswith(_KEYS))
    copies = (replace(key, name=key.name.replace(_KEYS, ".self_attn.v_proj.weight")) for key in keys)
    return tuple(copy for copy in copies if copy.name not in names)


def _gemma4_table(architecture: Architecture, tensor: TensorSpec) -> TensorSpec:
    """Return Gemma 4's second rotary table (``tensor``), as wide as a head of its full-attention layers.

    Its proportional RoPE rotates only part of the head, but vLLM pads the table to the head size
    (layers/rotary_embedding/gemma4_rope.py, 0.19 to 0.30).
    """
    if tensor.name != "rotary_emb.1.cos_sin_cache":
        return tensor
    width = max((layer.head_size for layer in architecture.cache_layers if layer.kind == "full"), default=0)
    return replace(tensor, shape=(tensor.shape[0], max(width, tensor.shape[1])))


def _position_factor(architecture: Architecture, flags: Deployment) -> int:
    if architecture.rotary is None or not architecture.rotary.mrope:
        return 1
    one = rules(version_of(flags)).one_mrope_length and family_of(architecture.model_type).vllm.one_mrope_length
    return 1 if one else _MROPE_FACTOR


def _encoder_tensors(architecture: Architecture) -> tuple[TensorSpec, ...]:
    """Return the tensors of vLLM's encoder classes (models/bert.py, roberta.py, modernbert.py).

    - Every embedding table is padded to 64 rows.
    - There is no pooler and no output head, except in classifiers, which have both in float32
      (ModelConfig.head_dtype in config/model.py, 0.33). In ModernBertForTokenClassification, the prediction
      head before the classifier layer keeps the model's dtype.
    - BertForMaskedLM keeps its output head. vLLM gives the head a separate matrix, even if the file ties it to
      the embedding, and one bias. RobertaForMaskedLM is loaded without its head.
    - Position ids are stored. Token types are not, because vLLM decodes them from the token ids.
    - There is one cos/sin table per rotary embedding, and four scales in each attention layer.
    """
    out = []
    tags = architecture.class_name.endswith("ForTokenClassification")
    masked = predicts_tokens(architecture)
    for tensor in architecture.tensors:
        if masked and (tensor.role == "head" or tensor.name.startswith("cls.")):
            if tensor.name != _SHARED_BIAS:
                out.append(replace(tensor, tied_to=None))
            continue
        if architecture.pooled and tensor.role == "head":
            out.append(tensor)
            continue
        if (
            tensor.role == "head"
            or "pooler." in tensor.name
            or (tensor.role == "norm" and tensor.name.startswith(("lm_head.", "head.")))
        ):
            if architecture.is_classifier and not architecture.pooled:
                plain = tags and tensor.name.startswith("head.")
                out.append(tensor if plain else replace(tensor, dtype="float32"))
            continue
        if tensor.role == "buffer" and not tensor.name.endswith("position_ids"):
            continue
        out.append(padded_rows(tensor) if tensor.role == "embedding" else tensor)
    if architecture.rotary is not None:
        out += rotary_tables(architecture, architecture.rotary.positions or architecture.max_model_len)
    out += [_scales(f"layers.{layer}.encoder.quant_scales", layer) for layer in range(architecture.layers)]
    return tuple(out)


def predicts_tokens(architecture: Architecture) -> bool:
    """Return whether vLLM's class returns logits for every token, as a masked LM (models/bert.py, 0.26 on)."""
    return architecture.class_name in ("BertForMaskedLM", "BertSpladeSparseEmbeddingModel")


def _scales(name: str, layer: int) -> TensorSpec:
    return TensorSpec(name, (4,), "buffer", "Attention", layer, dtype="float32")
