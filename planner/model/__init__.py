"""Data types that describe a model: its tensors, the cache of each layer, and the layout of the KV pool."""
