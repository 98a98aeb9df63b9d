"""Readers of checkpoint headers (safetensors, GGUF), which give names, shapes and dtypes but never weights."""
