"""Memory of training: model states, sharding, activations, communication, and what makes a model fit."""
