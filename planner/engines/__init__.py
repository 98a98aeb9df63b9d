"""Inference engines that the planner can size a deployment for, one object per engine.

An engine object holds the engine's flag defaults and the rules by which it divides device memory.

- ``base``: the ``Engine`` interface, with default implementations.
- ``registry``: look-up of an engine by name.
- ``hf``, ``sglang``, ``llama_cpp``, ``vllm/``: the engines.
- ``pool``, ``grouping``: KV cache blocks and groups of layers, shared by all engines.
- ``tensors``, ``parallel``: padded vocabularies, and the division of a model among ranks.
- ``encoder``, ``serve_line``: encoder models such as BERT, and serve commands.

A new engine is a file here that defines ``ENGINE``, and a name in ``tonnage.planner.deployment.EngineName``. A
new version of vLLM is a row in ``vllm/versions.py``.
"""
