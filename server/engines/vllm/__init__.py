"""vLLM behind the engine protocol. Written against vLLM 0.32."""
