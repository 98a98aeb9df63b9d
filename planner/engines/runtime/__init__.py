"""Memory besides weights and KV pool: framework (such as CUDA's context), activations of a step, CUDA graphs.

Each of these three parts is an ``Estimate``: a value, its expected interval, its formula and its source.
``Engine.runtime_terms`` returns the estimates for an engine.
"""
