"""Reading of Tonnage's own metrics from a Tonnage server, or a vLLM with Tonnage's plug-in (docs/vllm.md)."""

from __future__ import annotations

from collections.abc import Mapping

from tonnage.cache.admission.cost import StepCost
from tonnage.server.engines.stats import COST_PARTS, AutoStats, total_auto
from tonnage.server.observe.metrics.headroom import Headroom
from tonnage.server.watch.records import PlanSummary
from tonnage.server.watch.samples import Samples

_INFO = ("plan_id", "architecture", "engine", "quantization")


def read_headroom(samples: Samples) -> Headroom | None:
    """Return the headroom (further requests and tokens) summed over all engines of a metrics page.

    The field for the largest prompt is not a sum but a maximum: the largest prompt that any engine can take.
    """
    blocks = samples.count("tonnage_headroom_blocks")
    requests = samples.count("tonnage_headroom_requests")
    prompts = [round(value) for _, value in samples.of("tonnage_headroom_prompt_tokens")]
    if blocks is None or requests is None or not prompts:
        return None
    return Headroom(blocks, requests, max(prompts))


def read_auto(samples: Samples) -> AutoStats | None:
    """Return the state of the admission mode `auto` over all engines of the page, or None in other modes."""
    found = [_auto(part) for part in samples.by("engine_index", "tonnage_admission_fallbacks_total")]
    return total_auto([auto for auto in found if auto is not None])


def _auto(samples: Samples) -> AutoStats | None:
    fallbacks = samples.count("tonnage_admission_fallbacks_total")
    if fallbacks is None:
        return None
    parts = {labels.get("part"): seconds for labels, seconds in samples.of("tonnage_step_cost_seconds")}
    cost = StepCost(*(parts[part] for part in COST_PARTS)) if parts.keys() >= set(COST_PARTS) else None
    share = samples.total("tonnage_admission_share_ratio")
    return AutoStats(cost, share, samples.total("tonnage_admission_rehearsed_gain_ratio"), fallbacks)


def read_plan(samples: Samples, model: str | None) -> PlanSummary | None:
    """Return the plan of one engine from the metrics page, or None when the page has no plan.

    The plan's bytes are those of the rank whose measured bytes are also on the page.
    """
    engines = samples.by("engine_index", "tonnage_memory_planned_bytes")
    one = engines[0]
    info = next((labels for labels, _ in one.of("tonnage_plan_info") if labels.get("revision") == "0"), {})
    planned = one.of("tonnage_memory_planned_bytes")
    size, block = one.count("tonnage_config_block_bytes"), one.count("tonnage_config_block_size_tokens")
    if not planned or size is None or not block or not all(name in info for name in _INFO):
        return None
    device = next(
        (labels["device"] for labels, _ in one.of("tonnage_memory_measured_bytes")), planned[0][0]["device"]
    )
    return PlanSummary(
        plan_id=info["plan_id"],
        model=model or "its model",
        architecture=info["architecture"],
        engine=info["engine"],
        quantization=info["quantization"],
        device=device,
        components=_components(planned, device),
        block_size=block,
        bytes_per_block=size,
        max_model_len=one.count("tonnage_config_max_model_len_tokens"),
        num_blocks=one.count("tonnage_config_num_blocks"),
        replicas=len(engines),
    )


def read_measured(samples: Samples) -> dict[str, int]:
    """Return one engine's measured bytes by memory component from the metrics page."""
    one = samples.by("engine_index", "tonnage_memory_measured_bytes")[0]
    series = one.of("tonnage_memory_measured_bytes")
    return _components(series, series[0][0]["device"]) if series else {}


def _components(series: list[tuple[Mapping[str, str], float]], device: str) -> dict[str, int]:
    return {labels["component"]: round(value) for labels, value in series if labels["device"] == device}
