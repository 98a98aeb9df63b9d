"""make_plan: model + deployment -> Plan, by arithmetic alone. Nothing is loaded and no engine imported."""

from __future__ import annotations

import json
from typing import Literal

try:  # the same function; hashlib would load OpenSSL (2.5 ms of the 60 a plan may take)
    from _sha256 import sha256  # type: ignore[import-not-found]  # Python 3.11
except ImportError:
    from hashlib import sha256

from tonnage.planner.architecture import Architecture, TensorSpec
from tonnage.planner.deployment import complete, version_notes
from tonnage.planner.dtypes import KV_SCALE_BYTES, config_dtype
from tonnage.planner.engines.base import Resolved
from tonnage.planner.engines.pool import PoolSpec
from tonnage.planner.engines.ranks import rank_architecture
from tonnage.planner.errors import UnsupportedArchitecture
from tonnage.planner.extras import (
    environment_notes,
    lora_bytes,
    other_terms,
    quantization_notes,
    quantized_terms,
)
from tonnage.planner.families.registry import architecture_of
from tonnage.planner.fit import judge
from tonnage.planner.plans import Deployment, KVCachePlan, ModelInfo, Plan, RankPlan, Term
from tonnage.planner.quantization import check_quantization, read_quantization
from tonnage.planner.records import asdict, replace
from tonnage.planner.runtime.estimate import Runtime
from tonnage.planner.source import ModelSource, resolve_model
from tonnage.planner.versions import PLANNER_RULES
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
    architecture = architecture_of(source.config)
    quantization = read_quantization(source.config, deployment.quantization)
    check_quantization(architecture, quantization, deployment.engine)
    copies = _check_checkpoint(source, architecture)
    chosen = complete(deployment, architecture, auto_dtype(source))
    if quantization.scheme != "none":
        chosen = replace(chosen, flags=replace(chosen.flags, quantization=quantization.scheme))
    engine, flags = chosen.engine, chosen.flags
    ranks, runtimes, loads, paddings, unsplit = [], [], [], [], []
    pooled, draft_weights, draft_notes = with_draft(architecture, flags)
    pool = engine.build_pool(pooled, chosen)
    flags = engine.shown_flags(flags, pool)
    adapters = lora_bytes(architecture, flags)
    for stage in range(flags.pipeline_parallel_size):
        part = rank_architecture(architecture, flags, stage)
        loaded = sum_weights(part, quantization, flags, copies)
        padding = engine.kernel_padding(part, quantization.scheme, flags)
        rounding = engine.allocator_rounding(part, quantization, flags)
        runtime = engine.runtime_terms(part, chosen)
        offloaded = min(flags.cpu_offload_bytes, loaded.total)
        loads.append(loaded)
        paddings.append(padding)
        unsplit.append(rounding)
        runtimes.append(runtime)
        ranks.append(
            RankPlan(
                weights_bytes=loaded.total + padding + rounding - offloaded,
                kv_pool_bytes=0,
                activation_bytes=runtime.activation.value,
                cuda_graph_bytes=runtime.graphs.value,
                framework_bytes=runtime.framework.value,
                total_bytes=chosen.device_memory,
                lora_bytes=adapters,
                draft_bytes=draft_weights,
                offloaded_bytes=offloaded,
            )
        )
    sizes = _stage_block_bytes(pool, architecture, flags)
    blocks = [
        engine.num_blocks(chosen, pool, size, rank.used_bytes, rank.weights_bytes)
        for size, rank in zip(sizes, ranks, strict=True)
    ]
    num_blocks = min(blocks)  # every stage gets the smallest one's (get_kv_cache_configs)
    ranks = [replace(rank, kv_pool_bytes=num_blocks * size) for size, rank in zip(sizes, ranks, strict=True)]
    worst = max(range(len(ranks)), key=lambda i: ranks[i].used_bytes)
    held = engine.capacity(pool, chosen, num_blocks)
    rank, loaded, runtime = ranks[worst], loads[worst], runtimes[worst]
    asked = deployment.max_model_len is not None
    reasons = judge(chosen, rank, pool, held, asked=asked)
    estimates = {
        "framework_bytes": runtime.framework,
        "activation_bytes": runtime.activation,
        "cuda_graph_bytes": runtime.graphs,
    }
    terms = [*loaded.terms]
    terms += [Term(name, e.value, e.formula, e.source) for name, e in estimates.items() if e.high]
    terms += other_terms(rank, flags)
    terms += quantized_terms(architecture, quantization, source.config, flags)
    if unsplit[worst]:
        terms.append(
            Term(
                "weights.allocator_rounding", unsplit[worst],
                "blocks of the CUDA allocator that are not split for less than 1 MiB", "tensor sizes",
            )
        )  # fmt: skip
    if paddings[worst]:
        terms.append(
            Term(
                "weights.kernel_padding", paddings[worst], "experts padded to the MXFP4 kernel's tiles", "--gpu"
            )
        )
    terms += _kv_terms(pool, num_blocks, chosen)
    return Plan(
        plan_id=_plan_id(source, flags),
        revision=0,
        model=_model_info(source, architecture, flags),
        deployment=flags,
        ranks=_every_rank(ranks, flags),
        worst_rank=worst * flags.tensor_parallel_size,
        kv_cache=KVCachePlan(
            layout=pool.layout,
            num_blocks=num_blocks,
            usable_blocks=held.usable_blocks,
            tokens=held.tokens,
            max_concurrency=held.max_concurrency,
            bytes_per_sequence=held.blocks_per_sequence * pool.layout.bytes_per_block,
            longest=pool.longest(held.usable_blocks, architecture.max_model_len),
        ),
        fits=not reasons,
        reasons=reasons,
        intervals=_intervals(loaded, rank, runtime),
        terms=tuple(terms),
        weight_formats=loaded.formats,
        notes=(
            *_family_notes(architecture),
            *pool.notes,
            *draft_notes,
            *version_notes(deployment, chosen),
            *environment_notes(flags, deployment.gpu),
            *quantization_notes(source.config, deployment.quantization, flags.engine),
        ),
    )


def _family_notes(architecture: Architecture) -> tuple[str, ...]:
    if architecture.via == "adapter":
        return ()
    return (
        f"no adapter for {architecture.model_type}: tensors and cache are those of transformers' own modules, "
        "built on the meta device (via: meta)",
    )


def with_draft(architecture: Architecture, flags: Deployment) -> tuple[Architecture, int, tuple[str, ...]]:
    """What the pool is built from, the draft's weights, notes."""
    if flags.speculative_model is None:
        return architecture, 0, ()
    from tonnage.planner.speculative import add_draft

    draft = add_draft(architecture, flags)
    return draft.architecture, draft.weights, draft.notes


def _stage_block_bytes(pool: PoolSpec, architecture: Architecture, flags: Deployment) -> list[int]:
    """Bytes of one block on each pipeline stage, which stores its own layers only."""
    stages = flags.pipeline_parallel_size
    if stages == 1:
        return [pool.layout.bytes_per_block]
    from tonnage.planner.parallel import stage_layers

    out, first = [], 0
    for count in stage_layers(architecture.layers, stages):
        held = pool.stage_bytes(frozenset(range(first, first + count)))
        first += count
        if not held:
            raise UnsupportedArchitecture(
                "a stage without a KV cache is not planned", field="--pipeline-parallel-size"
            )
        out.append(held)
    return out


def _every_rank(stages: list[RankPlan], flags: Deployment) -> tuple[RankPlan, ...]:
    """One entry per GPU of one replica: the ranks of a stage hold the same bytes."""
    return tuple(rank for rank in stages for _ in range(flags.tensor_parallel_size))


def _check_checkpoint(source: ModelSource, architecture: Architecture) -> tuple[TensorSpec, ...]:
    """The checkpoint must hold the tensors its config promises. Returns tied ones it stores twice."""
    if source.tensors is None:
        return ()
    if source.kind == "gguf":
        from tonnage.planner.headers.gguf_config import check_gguf

        check_gguf(architecture, source.tensors)
        return ()
    from tonnage.planner.headers.check import check_tensors, stored_tied_copies

    check_tensors(architecture, source.tensors, read_quantization(source.config, None))
    return stored_tied_copies(architecture, source.tensors)


def auto_dtype(source: ModelSource) -> str:
    """What ``--dtype auto`` means: config.json's dtype, else the checkpoint's, else float32 (transformers'
    own order). A GGUF file states none and is dequantized while loading: bfloat16."""
    found = config_dtype(source.config.get("dtype", source.config.get("torch_dtype")))
    if found is None and source.kind == "gguf":
        return "bfloat16"
    if found is None and source.tensors is not None:
        from tonnage.planner.headers.check import floating_dtype

        found = floating_dtype(source.tensors)
    return found or "float32"


def _model_info(source: ModelSource, architecture: Architecture, flags: Deployment) -> ModelInfo:
    via: Literal["gguf", "adapter", "headers", "meta"] = architecture.via
    if source.tensors is not None and via == "adapter":
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


def _intervals(loaded: Weights, rank: RankPlan, runtime: Runtime) -> dict[str, tuple[int, int]]:
    """Bounds of every figure that is not exact, and of their sum with the exact ones."""
    terms = {
        "framework_bytes": runtime.framework,
        "activation_bytes": runtime.activation,
        "cuda_graph_bytes": runtime.graphs,
    }
    bounds = {name: (e.low, e.high) for name, e in terms.items() if e.high}
    low = sum(pair[0] for pair in bounds.values())
    high = sum(pair[1] for pair in bounds.values())
    if runtime.sum_interval is not None:
        low, high = runtime.sum_interval
    exact = rank.used_bytes - runtime.total
    if loaded.high > loaded.total:
        bounds["weights_bytes"] = (rank.weights_bytes, rank.weights_bytes + loaded.high - loaded.total)
        high += loaded.high - loaded.total
    bounds["used_bytes"] = (exact + low, exact + high)
    return bounds


def _kv_terms(pool: PoolSpec, num_blocks: int, chosen: Resolved) -> list[Term]:
    if not pool.demands:
        from tonnage.planner.engines.encoder import terms as encoder_terms

        return encoder_terms()
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
    given = chosen.flags.kv_cache_memory_bytes is not None
    terms.append(
        Term(
            "kv_pool_bytes",
            num_blocks * layout.bytes_per_block,
            f"{num_blocks:,} blocks x {layout.bytes_per_block:,}; block 0 is the null block",
            "--kv-cache-memory-bytes" if given else "--device-memory x --gpu-memory-utilization less the rest",
        )
    )
    return terms


def _plan_id(source: ModelSource, flags: Deployment) -> str:
    """16 hex digits of SHA-256 over config, header, flags, planner rules and engine version."""
    version = flags.engine_version
    tensors = [[t.name, t.dtype, t.shape] for t in source.tensors or ()]
    content = [source.id, source.config, tensors, asdict(flags), PLANNER_RULES, flags.engine, version]
    digest: str = sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return digest[:16]
