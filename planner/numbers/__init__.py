"""Number formats of weights, activations and caches, and the command `tonnage dtype`."""
