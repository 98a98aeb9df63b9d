"""A Plan as JSON (the contract of ``tonnage plan --json``) and as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TextIO

from tonnage.planner.engines.registry import engine_of
from tonnage.planner.records import asdict
from tonnage.planner.units import gib

if TYPE_CHECKING:  # a Plan shows itself by what is here
    from tonnage.planner.plans import Plan, RankPlan


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """The JSON object: keys are only ever added. All bytes are ints; a figure that has no single meaning
    for a hybrid is None beside its groups."""
    cache, layout = plan.kv_cache, plan.kv_cache.layout
    return {
        "schema_version": plan.schema_version,
        "plan_id": plan.plan_id,
        "revision": plan.revision,
        "model": {
            "id": plan.model.id,
            "architecture": plan.model.architecture,
            "parameters": plan.model.parameters,
            "attention": plan.model.attention,
            "via": plan.model.via,
            "dtype": plan.model.dtype,
            "max_model_len": plan.model.max_model_len,
            "vocab_size": plan.model.vocab_size,
        },
        "deployment": asdict(plan.deployment),
        "ranks": [_rank(rank) for rank in plan.ranks],
        "worst_rank": plan.worst_rank,
        "kv_cache": {
            "bytes_per_token": layout.bytes_per_token if not _slides(plan) else None,
            "bytes_per_sequence": cache.bytes_per_sequence,
            "usable_blocks": cache.usable_blocks,
            "num_blocks": cache.num_blocks,
            "tokens": cache.tokens,
            "max_concurrency": round(cache.max_concurrency, 4),
            "dtype": layout.dtype,
            "groups": [
                {
                    "kind": group.kind,
                    "layers": list(group.layers),
                    "window": group.window,
                    "block_size": group.block_size or layout.block_size,
                    "bytes_per_block": layout.bytes_per_block,
                }
                for group in layout.groups
            ],
        },
        "fits": plan.fits,
        "reasons": list(plan.reasons),
        "intervals": {name: list(bounds) for name, bounds in plan.intervals.items()},
        "notes": list(plan.notes),
        "advice": list(plan.advice),
    }


def _rank(rank: RankPlan) -> dict[str, int]:
    return {
        "weights_bytes": rank.weights_bytes,
        "kv_pool_bytes": rank.kv_pool_bytes,
        "activation_bytes": rank.activation_bytes,
        "cuda_graph_bytes": rank.cuda_graph_bytes,
        "framework_bytes": rank.framework_bytes,
        "free_bytes": rank.free_bytes,
        "total_bytes": rank.total_bytes,
        "lora_bytes": rank.lora_bytes,
        "draft_bytes": rank.draft_bytes,
        "offloaded_bytes": rank.offloaded_bytes,
    }


def _slides(plan: Plan) -> bool:
    """Sliding layers stop growing at their window: one more token then costs nothing."""
    return any(group.kind == "sliding" for group in plan.kv_cache.layout.groups)


def print_plan(plan: Plan, explain: bool, file: TextIO) -> None:
    """Text for people: a table with bars in a terminal, plain lines when ``file`` is none."""
    if file.isatty():
        from tonnage.planner.render_rich import print_rich

        print_rich(plan, explain, file)
        return
    for line in plain_lines(plan, explain):
        print(line, file=file)


def headline(plan: Plan) -> tuple[str, str]:
    model, deployment = plan.model, plan.deployment
    first = (
        f"{model.id}: {model.architecture}, {model.parameters:,} parameters, {model.attention}, {model.dtype}"
        + (f", {deployment.quantization}" if deployment.quantization else "")
        + f" (via {model.via})"
    )
    second = (
        f"engine {_engine(plan)} on {_device(plan)}, max_model_len {deployment.max_model_len:,}, "
        f"max_num_seqs {deployment.max_num_seqs:,}, block size {deployment.block_size}"
    )
    return first, second


def _engine(plan: Plan) -> str:
    flags = plan.deployment
    named = flags.engine_version not in (None, "none") and engine_of(flags.engine).shows_version
    return f"{flags.engine} {flags.engine_version}" if named else flags.engine


def _device(plan: Plan) -> str:
    flags = plan.deployment
    name = flags.gpu or flags.device
    if len(plan.ranks) > 1:
        name = f"{len(plan.ranks)} x {name}"
    return f"{name} ({flags.data_parallel_size} replicas, each so)" if flags.data_parallel_size > 1 else name


def memory_rows(plan: Plan) -> list[tuple[str, int, str]]:
    """(component, bytes, note) of the worst rank, in the order they are taken."""
    rank = plan.rank

    def bounds(name: str) -> str:
        if name not in plan.intervals:
            return "exact"
        low, high = plan.intervals[name]
        return f"{gib(low)} to {gib(high)}"

    rows = [
        ("weights", rank.weights_bytes, bounds("weights_bytes")),
        ("KV cache pool", rank.kv_pool_bytes, "exact"),
        ("activations", rank.activation_bytes, bounds("activation_bytes")),
        ("framework", rank.framework_bytes, bounds("framework_bytes")),
    ]
    if rank.cuda_graph_bytes:
        rows.append(("CUDA graphs", rank.cuda_graph_bytes, bounds("cuda_graph_bytes")))
    if rank.lora_bytes:
        rows.append(("LoRA slots", rank.lora_bytes, "exact"))
    if rank.draft_bytes:
        rows.append(("draft model", rank.draft_bytes, "exact"))
    rows.append(("free", rank.free_bytes, ""))
    rows.append(("device", rank.total_bytes, ""))
    return rows


def capacity_lines(plan: Plan) -> list[str]:
    cache, layout = plan.kv_cache, plan.kv_cache.layout
    if not layout.groups:
        return [f"KV cache: none (an encoder); at most {plan.deployment.max_num_seqs:,} texts in a step"]
    lines = [
        f"KV cache: {cache.num_blocks:,} blocks of {layout.bytes_per_block:,} bytes ({layout.dtype}), "
        f"{cache.usable_blocks:,} usable; {cache.tokens:,} tokens",
        f"Concurrency at {plan.deployment.max_model_len:,} tokens per request: {cache.max_concurrency:.2f}x "
        f"({gib(cache.bytes_per_sequence)} each)",
    ]
    if len(layout.groups) > 1 or _slides(plan):
        for i, group in enumerate(layout.groups):
            window = f", window {group.window:,}" if group.window else ""
            lines.append(f"  group {i}: {group.kind}, {len(set(group.layers))} layers{window}")
    return lines


def verdict_lines(plan: Plan) -> list[str]:
    lines = ["Fits."] if plan.fits else [f"Does not fit: {reason}" for reason in plan.reasons]
    lines += [f"Would fit with {change}" for change in plan.advice]
    return lines + [f"Note: {note}" for note in plan.notes]


def summary_lines(plan: Plan) -> list[str]:
    """What a Plan says of itself in a Python prompt: model, engine, bytes, capacity, whether it fits."""
    rows = [f"{name} {gib(size)}" for name, size, _ in memory_rows(plan) if name != "device"]
    lines = [*headline(plan), f"{', '.join(rows)} of {gib(plan.rank.total_bytes)}", *capacity_lines(plan)[:2]]
    return [*lines, "Fits." if plan.fits else f"Does not fit: {'; '.join(plan.reasons)}"]


def plain_lines(plan: Plan, explain: bool) -> list[str]:
    lines = [*headline(plan), ""]
    for name, size, note in memory_rows(plan):
        lines.append(f"{name:<14}{size:>20,} bytes {gib(size):>14}  {note}".rstrip())
    lines += ["", *capacity_lines(plan), *verdict_lines(plan)]
    if explain:
        lines += ["", "How each figure came about (bytes unless said):"]
        for term in plan.terms:
            lines.append(f"{term.name} = {term.value:,}")
            lines.append(f"    {term.formula}  [{term.source}]")
    return lines
