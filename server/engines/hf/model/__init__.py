"""The model of the Hugging Face engine: loaded, checked, run."""
