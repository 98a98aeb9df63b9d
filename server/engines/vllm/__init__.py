"""The vLLM backend of `tonnage serve`, and a vLLM scheduler with Tonnage's admission for a plain `vllm serve`.

The code is written against vLLM 0.32.
"""
