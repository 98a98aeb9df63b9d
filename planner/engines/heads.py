"""KV heads: of one rank, and once a latent is expanded."""

from __future__ import annotations

from tonnage.planner.errors import DeploymentError, UnsupportedArchitecture
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.records import dataclass


def heads_per_rank(heads: int, ranks: int) -> int:
    """KV heads of one rank: replicated when there are fewer heads than ranks."""
    if heads >= ranks and heads % ranks:
        raise DeploymentError(
            f"{ranks} does not divide {heads} KV heads",
            field="--tensor-parallel-size",
            hint=f"a divisor of {heads}",
        )
    if heads < ranks and ranks % heads:
        raise DeploymentError(f"{ranks} is no multiple of {heads} KV heads", field="--tensor-parallel-size")
    return max(1, heads // ranks)


@dataclass(frozen=True, slots=True)
class ExpandedHeads:
    key: int
    value: int
    latent: int


def expanded_heads(architecture: Architecture) -> ExpandedHeads:
    """Head sizes of K and V once the latent is expanded, from the shapes of kv_b_proj and o_proj."""
    shapes = {tensor.name.rpartition("self_attn.")[2]: tensor.shape for tensor in architecture.tensors}
    up, out, down = (shapes.get(f"{n}.weight") for n in ("kv_b_proj", "o_proj", "kv_a_proj_with_mqa"))
    if up is None or out is None or down is None:
        raise UnsupportedArchitecture("no kv_b_proj: MLA cannot be expanded", field="kv_lora_rank")
    value = out[1] // architecture.heads
    nope = up[0] // architecture.heads - value
    rope = down[0] - up[1]
    return ExpandedHeads(nope + rope, value, up[1])
