"""vLLM: its defaults and checks (engine), what changed when (versions), pool, tensors, memory beside them."""

from tonnage.planner.engines.vllm.engine import ENGINE

__all__ = ["ENGINE"]
