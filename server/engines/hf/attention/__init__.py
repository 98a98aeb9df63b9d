"""Attention over the KV pool: the transformers interface, the reference, and kernels for CPUs and GPUs."""
