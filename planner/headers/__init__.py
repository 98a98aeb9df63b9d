"""Readers of checkpoint headers (safetensors, GGUF): names, shapes and types; never weights."""
