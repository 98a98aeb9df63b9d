"""Inference engines that the planner can size a deployment for, one object per engine.

An engine object holds the engine's flag defaults and the rules by which it divides device memory.

- ``base``: the ``Engine`` interface, with default answers.
- ``registry``: look-up of an engine by name.
- ``hf``, ``sglang``, ``llama_cpp``, ``vllm/``: the engines.
- ``pool``, ``grouping``: blocks and KV cache groups, shared by all engines.
- ``tensors``, ``parallel``, ``encoder``, ``serve_line``: padded vocabularies, ranks, encoders, serve commands.

A new engine is a file here that defines ``ENGINE``, and a name in ``tonnage.planner.deployment.EngineName``. A
new
version of vLLM is a row in ``vllm/versions.py``.
"""
