"""Descriptions of a model from its config: tensors, each layer's cache, and the layout of the KV block pool."""
