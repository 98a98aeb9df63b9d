"""Memory beside weights and KV pool, by engine and device: framework, activations of one step, CUDA graphs.

Each term is an :class:`Estimate`: a value, the interval it is expected in, its formula and its source.
"""

from __future__ import annotations

from tonnage.planner.architecture import Architecture
from tonnage.planner.deployment import Resolved
from tonnage.planner.runtime.estimate import NOTHING, Estimate, Runtime

__all__ = ["Estimate", "Runtime", "runtime_terms"]


def runtime_terms(architecture: Architecture, chosen: Resolved) -> Runtime:
    """What one rank of ``architecture`` (its share) takes under the flags of ``chosen``."""
    engine, device = chosen.flags.engine, chosen.flags.device
    if device == "cpu":
        if engine == "vllm":
            from tonnage.planner.runtime import vllm_cpu

            return Runtime(vllm_cpu.framework_bytes(), vllm_cpu.activation_bytes(architecture, chosen), NOTHING)
        from tonnage.planner.runtime import hf

        return Runtime(hf.framework_bytes(), hf.activation_bytes(architecture, chosen), NOTHING)
    from tonnage.planner.runtime import gpu

    return gpu.terms(architecture, chosen)
