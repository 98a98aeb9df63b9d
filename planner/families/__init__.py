"""Model families: one function per family builds an ``Architecture`` from a checked config (registry.py)."""
