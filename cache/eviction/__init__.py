"""Eviction: the choice of the next cached block to evict, and the model of reuse that it learns."""
