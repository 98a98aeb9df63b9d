"""Eviction: the choice of the cached block to evict next, and a learned model of block reuse."""
