"""Many plans at once: tables over models, quantizations, KV cache dtypes, ranks and GPUs."""
