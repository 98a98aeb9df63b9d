"""Memory planner of training: model states, sharding, activations, communication, memory-saving tricks."""
