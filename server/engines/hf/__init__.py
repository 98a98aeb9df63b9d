"""The Hugging Face engine: paged attention for transformers models, in a process of its own."""

from tonnage.server.engines.hf.engine import HFEngine

__all__ = ["HFEngine"]
