"""The model side of the Hugging Face engine: loading, replacement by kernels, self-check, model runner."""
