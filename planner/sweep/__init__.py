"""Tables of plans: all combinations of several models, quantizations, KV cache dtypes, ranks and GPUs."""
