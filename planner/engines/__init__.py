"""The engines a model is planned for, one object each, and how they divide the memory they are given.

base: what is asked of an engine (``Engine``), with the answers of one that has no rule of its own; registry: an
engine by its name; hf, sglang, llama_cpp, vllm/: the engines. Shared between them: pool and grouping (blocks),
tokens (pools of single tokens), tensors (padded vocabulary, rotary tables), heads, ranks, encoder, serve_line.

A new engine is a file here with its ``ENGINE`` and a name in ``tonnage.planner.deployment.EngineName``; a new
version of vLLM is a row in vllm/versions.py.
"""
