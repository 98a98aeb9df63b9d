"""Attention over the paged pool: the interface, the reference, kernels of CPUs and GPUs."""
