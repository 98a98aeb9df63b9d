"""vLLM: its defaults and checks (engine), what changed when (versions), pool, tensors, memory beside them."""
