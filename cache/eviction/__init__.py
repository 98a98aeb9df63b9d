"""Eviction: the choice of the cached KV block to evict next, and a learned model of block reuse."""
