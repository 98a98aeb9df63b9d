"""The demo model: where it comes from, and its conversion from GGUF to safetensors."""
