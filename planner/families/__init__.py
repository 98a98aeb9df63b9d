"""Model families: one adapter per family turns a checked config.json into an ``Architecture`` (registry.py)."""
