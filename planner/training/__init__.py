"""Memory of training: model states, sharding, activations, communication, and what to change when it does not fit."""
