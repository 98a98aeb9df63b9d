"""The vLLM backend of `tonnage serve`, and Tonnage's scheduler for a plain `vllm serve`.

Written against vLLM 0.32.
"""
