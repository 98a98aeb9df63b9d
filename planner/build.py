"""make_plan: model + deployment -> Plan, by arithmetic alone. Nothing is loaded and no engine imported."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from hashlib import sha256
from typing import Literal

from tonnage.planner import kv, runtime
from tonnage.planner.architecture import Architecture, TensorSpec
from tonnage.planner.deployment import Resolved, complete
from tonnage.planner.dtypes import config_dtype
from tonnage.planner.families.registry import build_architecture
from tonnage.planner.fit import judge
from tonnage.planner.headers.check import check_tensors, floating_dtype, stored_tied_copies
from tonnage.planner.layout import KVLayout
from tonnage.planner.plan import Deployment, KVCachePlan, ModelInfo, Plan, RankPlan, Term
from tonnage.planner.quantization import check_quantization, read_quantization
from tonnage.planner.source import ModelSource, resolve_model
from tonnage.planner.versions import PLANNER_RULES, VLLM_RULES, engine_version
from tonnage.planner.weights import Weights, sum_weights


def make_plan(model: str, deployment: Deployment) -> Plan:
    """Plan ``model`` (``demo``, a folder, a .gguf file or a hub id) under ``deployment``.

    A plan that does not fit is a plan with ``fits`` False and ``reasons``. Raises TonnageError subclasses
    for what is not understood: ModelNotFound, ConfigError, CheckpointError, UnsupportedArchitecture,
    DeploymentError.
    """
    return plan_source(resolve_model(model), deployment)


def plan_source(source: ModelSource, deployment: Deployment) -> Plan:
    """The same for a model that was already found."""
    architecture = build_architecture(source.config)
    quantization = read_quantization(source.config, deployment.quantization)
    check_quantization(architecture, quantization, deployment.engine)
    copies = _check_checkpoint(source, architecture)
    chosen = complete(deployment, architecture, _auto_dtype(source))
    if quantization.scheme != "none":
        chosen = replace(chosen, flags=replace(chosen.flags, quantization=quantization.scheme))
    flags = chosen.flags
    layout = kv.build_layout(architecture, flags.engine, flags.kv_cache_dtype, chosen.block_size)
    in_flight = kv.in_flight_tokens(flags.engine, flags.device, chosen.max_num_batched_tokens)

    loaded = sum_weights(architecture, quantization, flags, copies)
    estimates = {
        "framework_bytes": runtime.framework_bytes(flags),
        "activation_bytes": runtime.activation_bytes(architecture, chosen),
        "cuda_graph_bytes": runtime.cuda_graph_bytes(flags),
    }
    fixed = loaded.total + sum(estimate.value for estimate in estimates.values())
    num_blocks = _num_blocks(chosen, layout, fixed, in_flight)
    capacity = kv.capacity(layout, num_blocks, chosen.max_model_len, flags.engine, in_flight)
    rank = RankPlan(
        weights_bytes=loaded.total,
        kv_pool_bytes=num_blocks * layout.bytes_per_block,
        activation_bytes=estimates["activation_bytes"].value,
        cuda_graph_bytes=estimates["cuda_graph_bytes"].value,
        framework_bytes=estimates["framework_bytes"].value,
        total_bytes=chosen.device_memory,
    )
    asked = deployment.max_model_len is not None
    reasons = judge(chosen, rank, layout, capacity, in_flight, asked=asked)
    terms = [*loaded.terms]
    terms += [Term(name, e.value, e.formula, e.source) for name, e in estimates.items() if e.high]
    terms += _kv_terms(layout, capacity, chosen, in_flight)
    return Plan(
        plan_id=_plan_id(source, flags),
        revision=0,
        model=_model_info(source, architecture, flags),
        deployment=flags,
        ranks=(rank,),
        worst_rank=0,
        kv_cache=KVCachePlan(
            layout=layout,
            num_blocks=num_blocks,
            usable_blocks=capacity.usable_blocks,
            tokens=capacity.tokens,
            max_concurrency=capacity.max_concurrency,
            bytes_per_sequence=capacity.blocks_per_sequence * layout.bytes_per_block,
        ),
        fits=not reasons,
        reasons=reasons,
        intervals=_intervals(loaded, rank, estimates),
        terms=tuple(terms),
        weight_formats=loaded.formats,
    )


def _check_checkpoint(source: ModelSource, architecture: Architecture) -> tuple[TensorSpec, ...]:
    """The checkpoint must hold the tensors its config promises. Returns tied ones it stores twice."""
    if source.tensors is None:
        return ()
    if source.kind == "gguf":
        from tonnage.planner.headers.gguf_config import check_gguf

        check_gguf(architecture, source.tensors)
        return ()
    check_tensors(architecture, source.tensors, read_quantization(source.config, None))
    return stored_tied_copies(architecture, source.tensors)


def _auto_dtype(source: ModelSource) -> str:
    """What ``--dtype auto`` means: config.json's dtype, else the checkpoint's, else float32 (transformers'
    own order). A GGUF file states none and is dequantized while loading: bfloat16."""
    found = config_dtype(source.config.get("dtype", source.config.get("torch_dtype")))
    if found is None and source.kind == "gguf":
        return "bfloat16"
    if found is None and source.tensors is not None:
        found = floating_dtype(source.tensors)
    return found or "float32"


def _num_blocks(chosen: Resolved, layout: KVLayout, fixed: int, in_flight: int) -> int:
    """Blocks of the pool: as many as the bytes given hold, else what is left beside ``fixed``.

    The hf engine on a CPU takes no more than max_num_seqs full-length sequences (and the null block) can
    use: the memory is the host's, and other programs want some.
    """
    given = chosen.flags.kv_cache_memory_bytes
    if given is not None:
        return given // layout.bytes_per_block
    blocks = max(0, chosen.limit - fixed) // layout.bytes_per_block
    if chosen.flags.engine == "hf" and chosen.flags.device == "cpu":
        per_sequence = kv.sequence_blocks(layout, chosen.max_model_len, in_flight)
        blocks = min(blocks, chosen.max_num_seqs * per_sequence + 1)
    return blocks


def _model_info(source: ModelSource, architecture: Architecture, flags: Deployment) -> ModelInfo:
    via: Literal["gguf", "adapter", "headers"] = "adapter"
    if source.tensors is not None:
        via = "gguf" if source.kind == "gguf" else "headers"
    return ModelInfo(
        id=source.id,
        path=source.path,
        architecture=architecture.class_name,
        parameters=architecture.parameters,
        attention=architecture.attention,
        via=via,
        max_model_len=architecture.max_model_len,
        vocab_size=architecture.vocab_size,
        dtype=flags.dtype,
    )


def _intervals(
    loaded: Weights, rank: RankPlan, estimates: dict[str, runtime.Estimate]
) -> dict[str, tuple[int, int]]:
    """Bounds of every figure that is not exact, and of their sum with the exact ones."""
    bounds = {name: (e.low, e.high) for name, e in estimates.items() if e.high}
    exact = rank.kv_pool_bytes
    if loaded.high > loaded.total:
        bounds["weights_bytes"] = (loaded.total, loaded.high)
    else:
        exact += loaded.total
    low, high = (exact + sum(pair[side] for pair in bounds.values()) for side in (0, 1))
    return {**bounds, "used_bytes": (low, high)}


def _kv_terms(layout: KVLayout, capacity: kv.Capacity, chosen: Resolved, in_flight: int) -> list[Term]:
    terms = [
        Term(
            "kv_cache.bytes_per_block",
            layout.bytes_per_block,
            f"{layout.layer_slots} layers x 2 (K and V) x {layout.block_size} tokens x "
            f"{layout.kv_heads} KV heads x {layout.head_size} x {layout.dtype_bytes} bytes",
            "num_hidden_layers, num_key_value_heads, head_dim, --block-size, --kv-cache-dtype",
        )
    ]
    for i, group in enumerate(layout.groups):
        span, extra, source = chosen.max_model_len, "", "--max-model-len"
        if group.window is not None:
            span = min(group.window - 1 + in_flight, span)
            extra = f" + 1, window {group.window:,}, {in_flight:,} tokens in flight"
            source = "sliding_window, --max-num-batched-tokens, --max-model-len"
        terms.append(
            Term(
                f"kv_cache.groups[{i}].blocks_per_sequence",
                kv.group_blocks(group, chosen.max_model_len, layout.block_size, in_flight),
                f"{group.kind}, {len(group.layers)} layers: {span:,} tokens / {layout.block_size}{extra}",
                source,
            )
        )
    given = chosen.flags.kv_cache_memory_bytes is not None
    terms.append(
        Term(
            "kv_pool_bytes",
            capacity.num_blocks * layout.bytes_per_block,
            f"{capacity.num_blocks:,} blocks x {layout.bytes_per_block:,}; block 0 is the null block",
            "--kv-cache-memory-bytes" if given else "--device-memory x --gpu-memory-utilization less the rest",
        )
    )
    return terms


def _plan_id(source: ModelSource, flags: Deployment) -> str:
    """16 hex digits of SHA-256 over config, header, flags, planner rules and engine version."""
    version = engine_version(flags.engine) or (VLLM_RULES if flags.engine == "vllm" else "none")
    tensors = [[t.name, t.dtype, t.shape] for t in source.tensors or ()]
    content = [source.id, source.config, tensors, asdict(flags), PLANNER_RULES, flags.engine, version]
    return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
