"""Memory: plan against reality, the pool by state, what still fits and for how long."""

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

# 600 s: the alert TonnageTimeToFull.
_SOON = ((None, "red"), (600, "orange"), (3600, "green"))
# 30 s: what --drain-seconds gives running requests where it is not set.
_STOP = ((None, "green"), (30, "orange"), (300, "red"))
_HOUR = 3600  # of the panel that shows the next hour


def memory() -> dashboard.Dashboard:
    measured = f'tonnage_memory_measured_bytes{{{ONE}, component!="free"}}'
    planned = f'tonnage_memory_planned_bytes{{{ONE}, component!="free"}}'
    return frame(
        "memory",
        "Memory",
        "What was planned, what is really held, and what still fits.",
        room(),
        number(
            "Largest prompt that fits now",
            "tonnage_headroom_prompt_tokens: the largest prompt that would be admitted now with the default "
            "max_tokens.",
            "short",
            f"min(tonnage_headroom_prompt_tokens{{{ONE}}})",
            steps=((None, "red"), (1, "green")),
            mappings=(reads(_0=("none", "red")),),
        ),
        number(
            "Full in",
            "tonnage_time_to_full_seconds at the growth of the last two minutes. Under ten minutes an alert "
            "fires: scale out before requests wait.",
            "s",
            f"min(tonnage_time_to_full_seconds{{{ONE}}})",
            steps=_SOON,
            mappings=(reads(_0=("full", "red")), from_on(FOREVER_SECONDS, "not filling", "green")),
        ),
        number(
            "A stop would take",
            "tonnage_drain_seconds: until the requests in flight are through, at the rate of the last ones. "
            "Give a stop at least this long (terminationGracePeriodSeconds).",
            "s",
            f"max(tonnage_drain_seconds{{{ONE}}})",
            steps=_STOP,
            mappings=(reads(_0=("nothing runs", "green")), from_on(FOREVER_SECONDS, "not known yet", "text")),
        ),
        drift(),
        number(
            "KV pool in use",
            "tonnage_pool_usage_ratio of the fullest server: blocks in use over usable ones, cached prefixes "
            "not counted. High is good as long as headroom is left.",
            "percentunit",
            f"max(tonnage_pool_usage_ratio{{{ONE}}})",
            steps=IN_USE,
            mappings=(reads(_0=("empty", "text")),),
        ),
        lines(
            "Plan against reality",
            "tonnage_memory_planned_bytes (dashed; revision 0, computed before anything was loaded) and "
            "tonnage_memory_measured_bytes by component; tonnage_process_memory_peak_bytes against the sum "
            "of the plan. Lines of one component that part are a plan that is wrong: run tonnage verify.",
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
                "when needed), free, reserved (never given out). The line is "
                "tonnage_pool_promised_unused_bytes: reserved to admitted requests, not yet held. When it "
                "fills what is not used, new requests wait.",
                "bytes",
                query(f"tonnage_pool_bytes{{{ONE}}}", "{{state}}"),
                query(f"tonnage_pool_promised_unused_bytes{{{ONE}}}", "reserved, not yet held"),
            ),
            "reserved, not yet held",
        ),
        lines(
            "Reserved and not yet used",
            "tonnage_pool_promised_unused_blocks beside the used tonnage_pool_blocks: what max_tokens "
            "reserves and answers do not use. Far above the used blocks: callers ask for more max_tokens "
            "than they need, or choose --admission-mode auto.",
            "short",
            query(f'tonnage_pool_blocks{{{ONE}, state="used"}}', "used"),
            query(f"tonnage_pool_promised_unused_blocks{{{ONE}}}", "reserved, not yet held"),
        ),
        lines(
            "Unused ends of blocks",
            "tonnage_pool_tail_waste_bytes: slots in used blocks that hold no token (the unfilled ends). "
            "Large beside the used tonnage_pool_bytes: sequences are short for this block size; lower "
            "--block-size.",
            "bytes",
            query(f"tonnage_pool_tail_waste_bytes{{{ONE}}}", "unused ends"),
            query(f'tonnage_pool_bytes{{{ONE}, state="used"}}', "used"),
        ),
        lines(
            "Room for more requests, by server",
            "tonnage_headroom_requests: more requests of the present mix that fit. A line that falls to 0 "
            "under constant load: this is the capacity, add a replica.",
            "short",
            query(f"tonnage_headroom_requests{{{ONE}}}"),
        ),
        lines(
            "Full in, a stop would take: within the hour",
            "tonnage_time_to_full_seconds and tonnage_drain_seconds; no line: not within the next hour, or "
            "not known. Full before the stop would be through: requests will wait.",
            "s",
            query(f"tonnage_time_to_full_seconds{{{ONE}}} < {_HOUR}", f"full in {LEGEND}"),
            query(f"tonnage_drain_seconds{{{ONE}}} < {_HOUR}", f"stop {LEGEND}"),
        ).no_value("not within the hour"),
        lines(
            "Weights by format",
            "tonnage_weights_planned_bytes by stored dtype and quantization: what a quantization left as it "
            "was (embeddings, head, norms) stands apart.",
            "bytes",
            query(f"tonnage_weights_planned_bytes{{{ONE}}}", "{{dtype}} {{quantization}}"),
        ),
        lines(
            "Process memory",
            "tonnage_process_memory_bytes now, tonnage_process_memory_peak_bytes at its peak. A climb "
            "without an end is a leak.",
            "bytes",
            query(f"tonnage_process_memory_bytes{{{ONE}}}", "now"),
            query(f"tonnage_process_memory_peak_bytes{{{ONE}}}", "peak"),
        ),
    )
