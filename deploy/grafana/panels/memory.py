"""Memory: planned and measured bytes, the pool by state, and its headroom."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard

from panels.figures import drift, room
from panels.parts import (
    DASHED,
    FOREVER_SECONDS,
    IN_USE,
    LEGEND,
    ONE,
    frame,
    from_on,
    lines,
    number,
    query,
    reads,
    stacked,
)

# The alert TonnageTimeToFull fires below 600 s.
_SOON = ((None, "red"), (600, "orange"), (3600, "green"))
# --drain-seconds is 30 s by default.
_STOP = ((None, "green"), (30, "orange"), (300, "red"))
_HOUR = 3600  # range of the panel that shows the next hour


def memory() -> dashboard.Dashboard:
    """Return the dashboard "Memory"."""
    measured = f'tonnage_memory_measured_bytes{{{ONE}, component!="free"}}'
    planned = f'tonnage_memory_planned_bytes{{{ONE}, component!="free"}}'
    return frame(
        "memory",
        "Memory",
        "Planned and measured memory, and the remaining headroom.",
        room(),
        number(
            "Largest prompt that fits now",
            "tonnage_headroom_prompt_tokens: the largest prompt that can be admitted now with the default "
            "max_tokens.",
            "short",
            f"min(tonnage_headroom_prompt_tokens{{{ONE}}})",
            steps=((None, "red"), (1, "green")),
            mappings=(reads(_0=("none", "red")),),
        ),
        number(
            "Time until the pool is full",
            "tonnage_time_to_full_seconds at the growth of the last two minutes. Below ten minutes an alert "
            "fires: scale out before requests wait.",
            "s",
            f"min(tonnage_time_to_full_seconds{{{ONE}}})",
            steps=_SOON,
            mappings=(reads(_0=("full", "red")), from_on(FOREVER_SECONDS, "not filling", "green")),
        ),
        number(
            "Drain time",
            "tonnage_drain_seconds: time until the requests in flight finish, at the recent rate. "
            "terminationGracePeriodSeconds must be at least as long.",
            "s",
            f"max(tonnage_drain_seconds{{{ONE}}})",
            steps=_STOP,
            mappings=(reads(_0=("idle", "green")), from_on(FOREVER_SECONDS, "not known yet", "text")),
        ),
        drift(),
        number(
            "KV pool in use",
            "tonnage_pool_usage_ratio of the fullest server: blocks in use over usable blocks, without cached "
            "prefixes. A high value is good as long as headroom is left.",
            "percentunit",
            f"max(tonnage_pool_usage_ratio{{{ONE}}})",
            steps=IN_USE,
            mappings=(reads(_0=("empty", "text")),),
        ),
        lines(
            "Planned and measured memory",
            "tonnage_memory_planned_bytes (dashed; revision 0, computed before the load) and "
            "tonnage_memory_measured_bytes by component; tonnage_process_memory_peak_bytes and the sum "
            "of the plan. If the two lines of a component differ, the plan is wrong: run tonnage verify.",
            "bytes",
            query(planned, "{{component}} planned"),
            query(measured, "{{component}}"),
            query(f"sum by (model, instance) ({planned})", "process planned"),
            query(f"tonnage_process_memory_peak_bytes{{{ONE}}}", "process peak"),
        ).override_by_regexp("/ planned$/", [DASHED]),
        stacked(
            lines(
                "KV pool by state",
                "tonnage_pool_bytes, stacked: used by running requests, cached (reusable prefixes, evicted "
                "when needed), free, reserved (never allocated). The line is "
                "tonnage_pool_promised_unused_bytes: reserved for admitted requests and not yet allocated. "
                "When it reaches the unused memory, new requests wait.",
                "bytes",
                query(f"tonnage_pool_bytes{{{ONE}}}", "{{state}}"),
                query(f"tonnage_pool_promised_unused_bytes{{{ONE}}}", "reserved, not yet held"),
            ),
            "reserved, not yet held",
        ),
        lines(
            "Reserved and not yet used",
            "tonnage_pool_promised_unused_blocks beside the used tonnage_pool_blocks: blocks that max_tokens "
            "reserves and answers have not used. If they far exceed the used blocks, clients set max_tokens "
            "too high: lower it, or use --admission-mode auto.",
            "short",
            query(f'tonnage_pool_blocks{{{ONE}, state="used"}}', "used"),
            query(f"tonnage_pool_promised_unused_blocks{{{ONE}}}", "reserved, not yet held"),
        ),
        lines(
            "Unused slots in blocks",
            "tonnage_pool_tail_waste_bytes: slots at the end of used blocks without a token. If they are many "
            "beside the used tonnage_pool_bytes, sequences are short for this block size: lower --block-size.",
            "bytes",
            query(f"tonnage_pool_tail_waste_bytes{{{ONE}}}", "unused slots"),
            query(f'tonnage_pool_bytes{{{ONE}, state="used"}}', "used"),
        ),
        lines(
            "Room for more requests, by server",
            "tonnage_headroom_requests: further requests of the current mix that fit. If a line falls to 0 "
            "under constant load, the server is at capacity: add a replica.",
            "short",
            query(f"tonnage_headroom_requests{{{ONE}}}"),
        ),
        lines(
            "Time until full and drain time, within the hour",
            "tonnage_time_to_full_seconds and tonnage_drain_seconds; no line means not within the next "
            "hour, or not known. If the pool is full before a drain would end, requests will wait.",
            "s",
            query(f"tonnage_time_to_full_seconds{{{ONE}}} < {_HOUR}", f"full in {LEGEND}"),
            query(f"tonnage_drain_seconds{{{ONE}}} < {_HOUR}", f"drain {LEGEND}"),
        ).no_value("not within the hour"),
        lines(
            "Weights by format",
            "tonnage_weights_planned_bytes by stored dtype and quantization. Tensors that a quantization "
            "leaves unchanged (embeddings, head, norms) are separate.",
            "bytes",
            query(f"tonnage_weights_planned_bytes{{{ONE}}}", "{{dtype}} {{quantization}}"),
        ),
        lines(
            "Process memory",
            "tonnage_process_memory_bytes now, tonnage_process_memory_peak_bytes at its peak. An unlimited "
            "rise is a leak.",
            "bytes",
            query(f"tonnage_process_memory_bytes{{{ONE}}}", "now"),
            query(f"tonnage_process_memory_peak_bytes{{{ONE}}}", "peak"),
        ),
    )
