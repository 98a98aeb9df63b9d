"""Number formats of weights, activations and caches: ``tonnage dtype``."""
