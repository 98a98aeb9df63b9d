"""Attention over the KV pool: the transformers interface, a reference in torch, and CPU and GPU kernels."""
