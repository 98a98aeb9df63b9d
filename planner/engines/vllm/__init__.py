"""The vLLM engine: flags (``engine``), versions, block pool, tensors, and memory besides weights and pool."""

from tonnage.planner.engines.vllm.engine import ENGINE

__all__ = ["ENGINE"]
