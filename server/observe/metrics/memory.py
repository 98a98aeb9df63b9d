"""Metrics of memory: bytes planned before the model is loaded, bytes measured afterwards, and their ratio."""

from __future__ import annotations

from tonnage.planner.plans import Plan
from tonnage.server.engines.stats import MeasuredMemory
from tonnage.server.observe.memory_report import measured_components, rank_components
from tonnage.server.observe.metrics.families import Page


def memory_families(page: Page, plan: Plan, memory: MeasuredMemory) -> None:
    """Write the metrics of planned and measured bytes, by device and component (weights, KV pool ...)."""
    planned = {
        (device_name(plan, number), component): size
        for number, rank in enumerate(plan.ranks)
        for component, size in rank_components(rank).items()
    }
    page.gauges(
        "tonnage_memory_planned_bytes",
        "Bytes planned before the load (revision 0), by component; they add up to the device.",
        ("device", "component"),
        planned,
    )
    # An engine measures process memory only as the sum over its processes. The sum gets the device label of the
    # rank with the most planned bytes.
    device = device_name(plan, plan.worst_rank)
    measured = {(device, name): size for name, size in measured_components(plan, memory).items()}
    page.gauges(
        "tonnage_memory_measured_bytes",
        "Bytes that the server holds, by component; absent where not measured.",
        ("device", "component"),
        measured,
    )
    ratios = {
        key: size / planned[key] for key, size in measured.items() if key[1] != "free" and planned.get(key)
    }
    if memory.process_peak and plan.rank.used_bytes:
        ratios[device, "process"] = memory.process_peak / plan.rank.used_bytes
    page.gauges(
        "tonnage_memory_measured_to_planned_ratio",
        "Measured bytes over planned bytes; 1 means that the plan was exact. process: the peak of all "
        "processes over the sum of the plan.",
        ("device", "component"),
        ratios,
    )
    page.gauges(
        "tonnage_weights_planned_bytes",
        "Planned bytes of the weights by the dtype they are stored in and their quantization.",
        ("dtype", "quantization"),
        {(part.dtype, part.quantization): part.bytes for part in plan.weight_formats},
    )
    page.gauge(
        "tonnage_process_memory_bytes",
        "Anonymous plus shared memory of all processes of the server now.",
        memory.process,
    )
    page.gauge(
        "tonnage_process_memory_peak_bytes",
        "Largest anonymous plus shared memory of all processes of the server.",
        memory.process_peak,
    )


def device_name(plan: Plan, rank: int) -> str:
    """Return the label of a rank's device: `cpu` for rank 0 on a CPU, else device and rank such as `cuda:1`."""
    return f"{plan.deployment.device}:{rank}" if plan.deployment.device != "cpu" or rank else "cpu"
