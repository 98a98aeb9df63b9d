"""The model of the Hugging Face engine: loading, kernel replacement, self-check and forward."""
