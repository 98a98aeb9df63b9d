"""Memory terms of a plan, which `--explain` prints, and notes on quantization and environment variables.

A term is a value with its formula and source. The terms here are about the KV pool, LoRA slots, the draft
model, quantized files and requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tonnage.planner.deployment import Deployment
from tonnage.planner.engines import encoder
from tonnage.planner.engines.pool import PoolSpec
from tonnage.planner.engines.registry import engine_of
from tonnage.planner.families.registry import family_of
from tonnage.planner.model.architecture import Architecture
from tonnage.planner.model.capacity import RequestCapacity
from tonnage.planner.model.dtypes import DTYPE_BYTES, KV_SCALE_BYTES
from tonnage.planner.planning.checkpoint import checkpoint_size
from tonnage.planner.plans import Plan, RankPlan, Resolved, Term
from tonnage.planner.quantization.names import WHILE_LOADING
from tonnage.planner.quantization.scheme import Quantization


def kv_terms(
    pool: PoolSpec, num_blocks: int, chosen: Resolved, bounds: tuple[int, int] | None = None
) -> list[Term]:
    """Return the memory terms that explain the KV pool: block size, blocks per sequence, and pool bytes.

    `bounds` are the lower and the upper bound of the number of KV blocks in the pool.
    """
    if not pool.demands:
        return encoder.terms()
    layout = pool.layout
    plain = all(group.kind in ("full", "sliding", "chunked") for group in layout.groups)
    per_token = f"{layout.kv_heads} KV heads x {layout.head_size} x {layout.dtype_bytes} bytes"
    formula = f"{layout.layer_slots} layers x 2 (K and V) x {layout.block_size} tokens x {per_token}"
    if (
        not plain
        or layout.slot_bytes != 2 * layout.block_size * layout.kv_heads * layout.head_size * layout.dtype_bytes
    ):
        formula = (
            f"{layout.layer_slots} layer slots x {layout.slot_bytes:,} bytes (the largest page of a layer)"
        )
        if (scale := KV_SCALE_BYTES.get(layout.dtype)) and plain:
            each = f"{layout.head_size} x {layout.dtype_bytes} + a scale of {scale}"
            rows = f"{layout.layer_slots} layers x 2 (K and V) x {layout.block_size} tokens"
            formula = f"{rows} x {layout.kv_heads} KV heads x ({each}) bytes"
    terms = [
        Term(
            "kv_cache.bytes_per_block", layout.bytes_per_block, formula,
            "num_hidden_layers, num_key_value_heads, head_dim, --block-size, --kv-cache-dtype",
        )
    ]  # fmt: skip
    for i, (group, demand) in enumerate(zip(layout.groups, pool.demands, strict=True)):
        tokens = chosen.max_model_len
        if demand.fixed is not None:
            how, source = (
                f"{demand.fixed} whatever the length",
                "--enable-prefix-caching, --num-speculative-tokens",
            )
        elif demand.most is not None:
            kept = min(demand.most, tokens)
            how = f"{kept:,} tokens / {demand.block_size} + {demand.extra}, window {group.window:,}"
            source = "sliding_window, --max-num-batched-tokens, --max-model-len"
        else:
            how, source = f"{tokens:,} tokens / {demand.block_size}", "--max-model-len"
        terms.append(
            Term(
                f"kv_cache.groups[{i}].blocks_per_sequence", demand.blocks(tokens),
                f"{group.kind}, {len(set(group.layers))} layers: {how}", source,
            )
        )  # fmt: skip
    engine = engine_of(chosen.flags.engine)
    source = "--device-memory x --gpu-memory-utilization less the rest"
    if chosen.flags.kv_cache_memory_bytes is not None:
        source = "--kv-cache-memory-bytes"
    elif engine.sized_by_context:
        source = "--max-model-len, --max-num-seqs"
    null = "; block 0 is the null block" if engine.null_block else ""
    low, high = bounds or (num_blocks, num_blocks)
    ends = f"; {low:,} to {high:,} blocks by the bounds of the rest" if low < high else ""
    apart = f" + states of all requests {pool.apart:,}" if pool.apart else ""
    terms.append(
        Term(
            "kv_pool_bytes",
            num_blocks * layout.bytes_per_block + pool.apart,
            f"{num_blocks:,} blocks x {layout.bytes_per_block:,}{apart}{null}{ends}",
            source,
        )
    )
    return terms


# Tensor roles with LoRA. For each of max_loras slots, vLLM allocates lora_a and lora_b for each linear layer of
# the language model at max_lora_rank (lora/layers, 0.32.0). The shapes are PEFT's: A [rank, in], B [out, rank].
_LORA_ROLES = ("attention", "mlp")


def lora_bytes(architecture: Architecture, flags: Deployment) -> int:
    """Return the bytes of all LoRA slots on one rank.

    If tensor parallelism divides a layer's outputs, it also divides the LoRA matrix B [out, rank]. If it
    divides the layer's inputs, it also divides A [rank, in].
    """
    if not flags.enable_lora:
        return 0
    elements = 0
    for tensor in architecture.tensors:
        if tensor.role in _LORA_ROLES and len(tensor.shape) == 2 and tensor.module_class.endswith("Linear"):
            out, into = tensor.shape
            if tensor.shard_dim == 0:
                out = -(-out // flags.tensor_parallel_size)
            elif tensor.shard_dim == 1:
                into = -(-into // flags.tensor_parallel_size)
            elements += flags.max_lora_rank * (into + out)
        elif tensor.role == "embedding":
            layers = family_of(architecture.model_type).vllm.lora_vocabulary
            elements += layers * flags.max_lora_rank * sum(tensor.shape)
    return elements * flags.max_loras * DTYPE_BYTES[flags.dtype]


def other_terms(rank: RankPlan, flags: Deployment) -> list[Term]:
    """Return the memory terms of LoRA slots, draft weights and weights offloaded to the host, if not zero."""
    lora = f"{flags.max_loras} slots x rank {flags.max_lora_rank} x (in + out) of every linear layer"
    draft = f"weights of {flags.speculative_model}"
    tier = f"whole blocks in {flags.kv_offloading_bytes:,} bytes of host memory"
    offloaded = "weights kept in the host's memory"
    terms = (
        Term("lora_bytes", rank.lora_bytes, lora, "--max-loras, --max-lora-rank"),
        Term("draft_bytes", rank.draft_bytes, draft, "--speculative-model"),
        Term("kv_tier_bytes", rank.kv_tier_bytes, tier, "--kv-offloading-size"),
        Term("offloaded_bytes", rank.offloaded_bytes, offloaded, "--cpu-offload-gb"),
    )
    return [term for term in terms if term.value]


def quantized_terms(
    architecture: Architecture, quantization: Quantization, config: Mapping[str, Any], flags: Deployment
) -> list[Term]:
    """Return the memory terms of a quantized model: weight bytes in its files and after the first forward pass.

    The bytes are sums over all ranks. They may change in the first forward pass, because a kernel may repack
    the loaded weights.
    """
    if quantization.linear is None:
        return []
    size = checkpoint_size(architecture, quantization, config, flags.dtype)
    formula = "all tensors, headers left out"
    if size.high > size.low:
        formula += f"; up to {size.high:,} by the digits of the offsets"
    terms = [Term("weights_in_file", size.low, formula, "quantization_config")]
    engine = engine_of(flags.engine)
    kernel = engine.kernels.get(flags.device, {}).get(quantization.linear.kind.name)
    if kernel is not None:
        warm = sum(
            quantization.bytes_after_warmup(tensor, flags.dtype, kernel)
            for tensor in engine.tensors(architecture, flags)
        )
        terms.append(Term("weights_after_first_forward", warm, f"with the kernel {kernel}", "--engine"))
    return terms


def quantization_notes(config: Mapping[str, Any], asked: str | None, engine: str) -> tuple[str, ...]:
    """Return a note if --quantization names a format that needs another checkpoint of the model."""
    made = engine_of(engine).quantizes_to
    if asked is None or config.get("quantization_config") or WHILE_LOADING.get(asked, asked) in made:
        return ()
    if engine_of(engine).names_formats and asked in WHILE_LOADING:
        return (f"the command needs --quantization {asked}, which makes the format while loading",)
    return (f"{engine} does not quantize to {asked} while loading: planned for a checkpoint that is",)


def environment_notes(flags: Deployment, gpu: str | None) -> tuple[str, ...]:
    """Return notes on environment variables that override the plan, and on the GPU that --gpu auto found."""
    if gpu == "auto" and flags.device == "cpu":
        return ("no NVIDIA GPU was found here; planned for the CPU", *environment_notes(flags, None))
    return engine_of(flags.engine).environment_notes(flags)


def request_terms(plan: Plan, requests: tuple[RequestCapacity, ...]) -> tuple[Term, ...]:
    """Return the `--explain` terms that show how many requests of each length the KV pool holds."""
    law, usable = plan.kv_cache.law, plan.kv_cache.usable_blocks
    return tuple(
        Term(
            f"requests[{found.prompt_tokens}+{found.output_tokens}].at_once",
            found.at_once,
            f"{usable:,} usable blocks: {found.blocks.fullest:,} each at the fullest step of its decode, "
            f"{found.blocks.arrival:,} while a prompt is computed, {found.together:,} of them at a time",
            law.source if law else "",
        )
        for found in requests
    )
