"""Models that vLLM treats apart, by model_type. Files named are those of vLLM 0.32.0."""

from __future__ import annotations

# float16 is refused (_FLOAT16_NOT_SUPPORTED_MODELS, config/model.py)
NO_FLOAT16 = ("gemma2", "gemma3_text")
# Recurrent state kept in float32 by default (model_executor/models/config.py, NemotronHForCausalLMConfig;
# Qwen3.5 by its config's mamba_ssm_dtype; KDA in mamba_utils.py)
FLOAT32_STATES = ("nemotron_h", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "kimi_linear")
# Windows given out by the layer's number (model_executor/models/gpt_oss.py)
ALTERNATING = ("gpt_oss",)
# Latent attention that is run, and stored, as full attention, V padded to K's head size
# (model_executor/models/minicpm3.py)
EXPANDED_MLA = ("minicpm3",)
# Rotary tables of one length although positions are three-dimensional (models/qwen3_vl.py
# mrope_positions_factor); beginnings of model_type
ONE_MROPE_LENGTH = ("qwen3_vl", "qwen3_5", "qwen3_next")
# Encoders whose vectors it gives (model_executor/models/registry.py, _EMBEDDING_MODELS)
ENCODER_CLASSES = ("BertModel", "RobertaModel", "XLMRobertaModel", "ModernBertModel")
