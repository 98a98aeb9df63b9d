"""CPU kernels for bfloat16, compiled by numba: linear layers, attention on blocks, norms and rotation."""
