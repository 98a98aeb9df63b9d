"""Readers of checkpoint headers (safetensors, GGUF): names, shapes and dtypes of tensors, but no weights."""
