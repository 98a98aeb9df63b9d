"""Memory beside weights and KV pool: framework, activations of one step, CUDA graphs.

Each term is an ``Estimate``: a value, the interval it is expected in, its formula and its
source. Which terms an engine has is asked of the engine (``runtime_terms``).
"""
