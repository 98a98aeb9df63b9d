"""How long an engine step takes: a roofline of memory traffic and arithmetic.

A step reads all weights once and the K/V of every running sequence, and computes 2 operations per parameter
and token (Kaplan et al., arXiv 2001.08361, section 2.1); it takes as long as the slower of the two, and a fixed
time for launches and the host. Nothing else is modelled: no communication between devices beyond dividing both
by their number, no attention arithmetic. Waits and shares from a replay are therefore estimates; the order of
events under one model is exact. Peak figures of GPUs are in the planner's catalogue.
"""

from __future__ import annotations

from dataclasses import dataclass

from tonnage.cache.errors import CacheConfigError


@dataclass(frozen=True, slots=True)
class StepTime:
    """``weights_bytes`` and ``parameters`` of the whole model, ``kv_bytes_per_token`` over all layers;
    ``devices`` share the work evenly. ``overhead``: seconds a step. Raises CacheConfigError for what is not
    positive."""

    weights_bytes: int
    parameters: int
    kv_bytes_per_token: float
    bandwidth: float
    flops: float
    devices: int = 1
    overhead: float = 0.002  # vLLM 0.32's own scheduler step at 256 sequences takes 3.1 ms, at 32 about 0.3 ms

    def __post_init__(self) -> None:
        for field in ("weights_bytes", "parameters", "bandwidth", "flops", "devices"):
            if getattr(self, field) <= 0:
                raise CacheConfigError(f"{getattr(self, field)} is not positive", field=field)

    def seconds(self, tokens: int, context_tokens: int) -> float:
        """One step that computes ``tokens`` positions with ``context_tokens`` of K/V in the tables."""
        memory = (self.weights_bytes + self.kv_bytes_per_token * context_tokens) / self.bandwidth
        arithmetic = 2.0 * self.parameters * tokens / self.flops
        return max(memory, arithmetic) / self.devices + self.overhead
