"""The pool of a deployment, whichever engine runs it."""

from __future__ import annotations

from tonnage.planner.architecture import Architecture
from tonnage.planner.deployment import Resolved
from tonnage.planner.dtypes import DTYPE_BYTES
from tonnage.planner.engines.pool import PoolCapacity, PoolSpec
from tonnage.planner.engines.vllm import VLLMDeployment
from tonnage.planner.host import cpu_features_of

__all__ = ["PoolCapacity", "PoolSpec", "build_pool", "capacity"]


def build_pool(architecture: Architecture, chosen: Resolved) -> PoolSpec:
    """The pool of one rank under the engine of ``chosen``. Raises UnsupportedArchitecture."""
    flags = chosen.flags
    if architecture.kind == "encoder":
        from tonnage.planner.engines import encoder

        return encoder.build_pool(architecture, flags, chosen.block_size)
    if flags.engine == "vllm":
        from tonnage.planner.engines import vllm

        return vllm.build_pool(architecture, _of_vllm(chosen))
    if flags.engine == "hf":
        from tonnage.planner.engines import hf

        return hf.build_pool(
            architecture, flags.kv_cache_dtype, chosen.block_size, chosen.max_num_batched_tokens
        )
    from tonnage.planner.engines import tokens

    return tokens.build_pool(architecture, chosen)


def capacity(pool: PoolSpec, chosen: Resolved, num_blocks: int) -> PoolCapacity:
    """What ``num_blocks`` hold, counted as the engine prints it."""
    if not pool.demands:
        from tonnage.planner.engines import encoder

        return encoder.capacity(chosen.max_num_seqs)
    if chosen.flags.engine == "vllm":
        from tonnage.planner.engines import vllm

        return vllm.capacity(pool, num_blocks, chosen.max_model_len, chosen.version)
    # the hf engine keeps block 0 as the null block; slots of the others are all usable
    usable = max(0, num_blocks - 1) if chosen.flags.engine == "hf" else num_blocks
    per_sequence = pool.sequence_blocks(chosen.max_model_len)
    tokens = usable * chosen.max_model_len // per_sequence
    return PoolCapacity(num_blocks, usable, per_sequence, tokens, usable / per_sequence)


def _of_vllm(chosen: Resolved) -> VLLMDeployment:
    flags = chosen.flags
    here = cpu_features_of(flags.device, flags.gpu)
    return VLLMDeployment(
        device=flags.device,
        version=chosen.version,
        dtype_bytes=DTYPE_BYTES[flags.dtype],
        kv_dtype=flags.kv_cache_dtype,
        block_size=chosen.given_block_size,
        max_num_batched_tokens=chosen.max_num_batched_tokens,
        prefix_caching=flags.enable_prefix_caching,
        tensor_parallel=flags.tensor_parallel_size,
        context_parallel=flags.decode_context_parallel_size,
        speculative_tokens=flags.num_speculative_tokens,
        # the draft layers published so far (DeepSeek V3, GLM 4.5, Qwen3-Next and 3.5) are one layer run again
        amx="amx_tile" in here,
        # accelerated delta-net and Mamba kernels keep their state in float32 (platforms/cpu.py)
        float32_states="avx512_bf16" in here,
        draft_layers=1 if flags.speculative_model == "mtp" else 0,
    )
