"""make_plan: model + deployment -> Plan, by arithmetic alone. Nothing is loaded and no engine imported."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from hashlib import sha256

from tonnage.planner import kv, runtime, weights
from tonnage.planner.architecture import Architecture
from tonnage.planner.deployment import complete
from tonnage.planner.dtypes import config_dtype
from tonnage.planner.families.registry import build_architecture
from tonnage.planner.fit import judge
from tonnage.planner.headers.check import check_tensors, floating_dtype
from tonnage.planner.layout import KVLayout
from tonnage.planner.plan import Deployment, KVCachePlan, ModelInfo, Plan, RankPlan, Term
from tonnage.planner.quantization import read_quantization
from tonnage.planner.source import ModelSource, resolve_model
from tonnage.planner.versions import PLANNER_RULES, VLLM_RULES, engine_version


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
    if source.tensors is not None and source.kind != "gguf":
        check_tensors(architecture, source.tensors, quantization)
    chosen = complete(deployment, architecture, _auto_dtype(source))
    if quantization.scheme != "none":
        chosen = replace(chosen, quantization=quantization.scheme)
    assert chosen.block_size and chosen.max_model_len and chosen.max_num_batched_tokens
    layout = kv.build_layout(architecture, chosen.engine, chosen.kv_cache_dtype, chosen.block_size)
    in_flight = kv.in_flight_tokens(chosen.engine, chosen.max_num_batched_tokens)

    loaded = weights.weights(architecture, quantization, chosen)
    framework = runtime.framework_bytes(chosen)
    activations = runtime.activation_bytes(architecture, chosen, chosen.dtype)
    graphs = runtime.cuda_graph_bytes(chosen)
    fixed = loaded.total + framework.value + activations.value + graphs.value
    num_blocks = _num_blocks(chosen, layout, fixed, in_flight)
    capacity = kv.capacity(layout, num_blocks, chosen.max_model_len, chosen.engine, in_flight)
    rank = RankPlan(
        weights_bytes=loaded.total,
        kv_pool_bytes=num_blocks * layout.bytes_per_block,
        activation_bytes=activations.value,
        cuda_graph_bytes=graphs.value,
        framework_bytes=framework.value,
        total_bytes=chosen.device_memory or 0,
    )
    reasons = judge(chosen, rank, layout, capacity, in_flight, explicit=deployment.max_model_len is not None)
    estimates = {"framework_bytes": framework, "activation_bytes": activations}
    if graphs.high:
        estimates["cuda_graph_bytes"] = graphs
    exact = rank.weights_bytes + rank.kv_pool_bytes
    intervals = {name: (e.low, e.high) for name, e in estimates.items()}
    intervals["used_bytes"] = (
        exact + sum(low for low, _ in intervals.values()),
        exact + sum(high for _, high in intervals.values()),
    )
    terms = [*loaded.terms]
    terms += [Term(name, e.value, e.formula, e.source) for name, e in estimates.items()]
    terms += _kv_terms(layout, capacity, chosen, in_flight)
    return Plan(
        plan_id=_plan_id(source, chosen),
        revision=0,
        model=_model_info(source, architecture, chosen),
        deployment=chosen,
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
        intervals=intervals,
        terms=tuple(terms),
    )


def _auto_dtype(source: ModelSource) -> str:
    """What ``--dtype auto`` means: config.json's dtype, else the checkpoint's, else float32 (transformers'
    own order). A GGUF file is dequantized while loading, to bfloat16."""
    stated = source.config.get("dtype", source.config.get("torch_dtype"))
    found = config_dtype(stated)
    if found is None and source.kind == "gguf":
        return "bfloat16"
    if found is None and source.tensors is not None:
        found = floating_dtype(source.tensors)
    return found or "float32"


def _num_blocks(chosen: Deployment, layout: KVLayout, fixed: int, in_flight: int) -> int:
    """Blocks of the pool: as many as the bytes given hold, else what is left of the budget.

    The hf engine on a CPU takes no more than max_num_seqs full-length sequences (and the null block) can
    use: memory is the host's, other programs want some.
    """
    if chosen.kv_cache_memory_bytes is not None:
        return chosen.kv_cache_memory_bytes // layout.bytes_per_block
    left = budget(chosen) - fixed
    blocks = max(0, left // layout.bytes_per_block)
    if chosen.engine == "hf" and chosen.device == "cpu":
        assert chosen.max_num_seqs and chosen.max_model_len
        most = chosen.max_num_seqs * kv.sequence_blocks(layout, chosen.max_model_len, in_flight) + 1
        blocks = min(blocks, most)
    return blocks


def budget(chosen: Deployment) -> int:
    """Bytes the engine may take when the pool's size is not given."""
    return int((chosen.device_memory or 0) * chosen.gpu_memory_utilization)


def _model_info(source: ModelSource, architecture: Architecture, chosen: Deployment) -> ModelInfo:
    via = "gguf" if source.kind == "gguf" else "adapter" if source.tensors is None else "headers"
    return ModelInfo(
        id=source.id,
        path=source.path,
        architecture=architecture.class_name,
        parameters=architecture.parameters,
        attention=architecture.attention,
        via=via,  # type: ignore[arg-type]
        max_model_len=architecture.max_model_len,
        vocab_size=architecture.vocab_size,
        dtype=chosen.dtype,
    )


def _kv_terms(layout: KVLayout, capacity: kv.Capacity, chosen: Deployment, in_flight: int) -> list[Term]:
    dims = (layout.layer_slots, layout.block_size, layout.kv_heads, layout.head_size, layout.dtype_bytes)
    terms = [
        Term(
            "kv_cache.bytes_per_block",
            layout.bytes_per_block,
            "{} layers x 2 (K and V) x {} tokens x {} KV heads x {} x {} bytes".format(*dims),
            "num_hidden_layers, num_key_value_heads, head_dim, --block-size, --kv-cache-dtype",
        )
    ]
    assert chosen.max_model_len
    for i, group in enumerate(layout.groups):
        blocks = kv.group_blocks(group, chosen.max_model_len, layout.block_size, in_flight)
        rule = f"{chosen.max_model_len:,} tokens / {layout.block_size}"
        if group.window is not None:
            span = min(group.window - 1 + in_flight, chosen.max_model_len)
            rule = f"min(window {group.window:,} - 1 + {in_flight:,} in flight, max_model_len) = {span:,} / {layout.block_size}, + 1"
        terms.append(
            Term(
                f"kv_cache.groups[{i}].blocks_per_sequence",
                blocks,
                f"{group.kind}, {len(group.layers)} layers: {rule}",
                "layer_types, sliding_window" if group.window else "max_position_embeddings, --max-model-len",
            )
        )
    given = chosen.kv_cache_memory_bytes is not None
    terms.append(
        Term(
            "kv_pool_bytes",
            capacity.num_blocks * layout.bytes_per_block,
            f"{capacity.num_blocks:,} blocks x {layout.bytes_per_block:,} (block 0 is the null block)",
            "--kv-cache-memory-bytes" if given else "--device-memory x --gpu-memory-utilization less the rest",
        )
    )
    return terms


def _plan_id(source: ModelSource, chosen: Deployment) -> str:
    """16 hex digits of SHA-256 over config, header, flags, planner rules and engine version."""
    version = engine_version(chosen.engine) or (VLLM_RULES if chosen.engine == "vllm" else "none")
    tensors = [[t.name, t.dtype, t.shape] for t in source.tensors or ()]
    content = [source.id, source.config, tensors, asdict(chosen), PLANNER_RULES, chosen.engine, version]
    return sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]
