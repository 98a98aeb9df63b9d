"""Planner of training memory: model states, sharding, activations, communication, memory-saving tricks."""
