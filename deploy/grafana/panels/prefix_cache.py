"""Prefix cache, evictions and KV tiers: saved prefill, and the memory for cached prefixes."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard

from panels.parts import (
    ACTIVE,
    DASHED,
    LEGEND,
    ONE,
    Panel,
    frame,
    lines,
    nothing,
    number,
    query,
    rate,
    reads,
    stacked,
)


def _hit_share(by: str) -> str:
    hits = f"sum by ({by}) ({rate('tonnage_prefix_hit_tokens_total')})"
    asked = f"sum by ({by}) ({rate('tonnage_prefix_query_tokens_total')})"
    return f"{hits} / ({asked} > 0)"


def _tier_panels() -> list[Panel]:
    """Return the panels of KV tiers; they have no data on servers without a tier."""
    saved, spent = "tonnage_tier_saved_seconds_total", "tonnage_tier_spent_seconds_total"
    hits = "tonnage_tier_host_hit_tokens_total"
    return [
        number(
            "KV tier: saved for each second spent",
            f"{saved} over {spent}: seconds of prefill that loads from host memory and disk saved, for each "
            "second of copies and reads. Below 1 an alert fires: the tier slows requests down.",
            "short",
            f"sum({rate(saved)}) / (sum({rate(spent)}) > 0)",
            steps=((None, "red"), (1, "green")),
            mappings=(reads(_0=("nothing saved", "red")), nothing("no tier")),
            width=6,
        ),
        number(
            "Prompt tokens from the KV tier",
            f"{hits} over tonnage_prefix_query_tokens_total: prompt tokens that only the tier had.",
            "percentunit",
            f"sum({rate(hits)}) / (sum({rate('tonnage_prefix_query_tokens_total')}) > 0)",
            steps=ACTIVE,
            mappings=(reads(_0=("none", "text")), nothing("no tier")),
            width=6,
        ),
        number(
            "KV tier: host memory in use",
            "tonnage_tier_host_used over tonnage_tier_host_size. A full tier is good; see its hits.",
            "percentunit",
            f"sum(tonnage_tier_host_used{{{ONE}}}) / sum(tonnage_tier_host_size{{{ONE}}})",
            steps=ACTIVE,
            mappings=(reads(_0=("empty", "text")), nothing("no tier")),
            width=6,
        ),
        number(
            "KV tier: disk in use",
            "tonnage_tier_used over tonnage_tier_size, the folder as du counts it. It never exceeds its size.",
            "percentunit",
            f"sum(tonnage_tier_used{{{ONE}}}) / sum(tonnage_tier_size{{{ONE}}})",
            steps=ACTIVE,
            mappings=(reads(_0=("empty", "text")), nothing("no disk tier")),
            width=6,
        ),
        lines(
            "KV tier: seconds saved and spent",
            f"{saved} and {spent} per second. If the lines meet, loading takes as long as computing: see the "
            "speed of the disk, and tonnage replay --tiers.",
            "s",
            query(f"sum by (model, instance) ({rate(saved)})", f"saved {LEGEND}"),
            query(f"sum by (model, instance) ({rate(spent)})", f"spent {LEGEND}"),
        ).no_value("no tier"),
        lines(
            "KV tier: bytes",
            "tonnage_tier_host_used with tonnage_tier_host_size, and tonnage_tier_used with tonnage_tier_size "
            "for the folder on disk.",
            "bytes",
            query(f"tonnage_tier_host_used{{{ONE}}}", "host memory"),
            query(f"tonnage_tier_host_size{{{ONE}}}", "host memory, size"),
            query(f"tonnage_tier_used{{{ONE}}}", "disk"),
            query(f"tonnage_tier_size{{{ONE}}}", "disk, size"),
        )
        .override_by_regexp("/, size$/", [DASHED])
        .no_value("no tier"),
    ]


def prefix_cache() -> dashboard.Dashboard:
    """Return the dashboard "Prefix cache and evictions"."""
    return frame(
        "prefix-cache",
        "Prefix cache and evictions",
        "Prefill that the prefix cache saves, and the memory it has.",
        number(
            "Prompt tokens from the cache",
            "tonnage_prefix_hit_tokens_total over tonnage_prefix_query_tokens_total.",
            "percentunit",
            _hit_share("model"),
            steps=ACTIVE,
            mappings=(reads(_0=("none", "text")),),
            width=6,
        ),
        number(
            "Saved tokens per second",
            "tonnage_prefix_hit_tokens_total: prompt tokens that were not computed again.",
            "short",
            f"sum({rate('tonnage_prefix_hit_tokens_total')})",
            steps=ACTIVE,
            mappings=(reads(_0=("none", "text")),),
            width=6,
        ),
        number(
            "Cached",
            'tonnage_pool_bytes{state="cached"}: reusable prefixes, evicted when needed.',
            "bytes",
            f'sum(tonnage_pool_bytes{{{ONE}, state="cached"}})',
            steps=ACTIVE,
            mappings=(reads(_0=("nothing", "text")),),
            width=6,
        ),
        number(
            "Evicted per second",
            "tonnage_evictions_total, blocks.",
            "short",
            f"sum({rate('tonnage_evictions_total')})",
            steps=ACTIVE,
            mappings=(reads(_0=("none", "text")),),
            width=6,
        ),
        lines(
            "Share of prompt tokens from the cache",
            "tonnage_prefix_hit_tokens_total over tonnage_prefix_query_tokens_total, by server. If it is low "
            "although prompts share prefixes, requests of one conversation reach different replicas (route by "
            "prefix), or each has its own cache_salt.",
            "percentunit",
            query(_hit_share("model, instance")),
        )
        .max(1)
        .no_value("no traffic"),
        stacked(
            lines(
                "Prompt tokens: computed and from the cache",
                "tonnage_prefix_hit_tokens_total by source, and the rest of "
                "tonnage_prefix_query_tokens_total. salt: blocks only for requests with the same salt; "
                "shared: blocks for all requests.",
                "short",
                query(f"sum by (source) ({rate('tonnage_prefix_hit_tokens_total')})", "cached: {{source}}"),
                query(
                    f"sum({rate('tonnage_prefix_query_tokens_total')}) - "
                    f"sum({rate('tonnage_prefix_hit_tokens_total')})",
                    "computed",
                ),
            )
        ),
        lines(
            "Evictions",
            "tonnage_evictions_total per second by cause: prefill, decode, copy_on_write or reset. Many "
            "evictions and a falling hit share mean that the pool is too small for the prefixes: enlarge "
            "it, or route fewer conversations to a replica.",
            "short",
            query(f"sum by (cause, instance) ({rate('tonnage_evictions_total')})", "{{cause}} {{instance}}"),
        ),
        stacked(
            lines(
                "Pool by state, blocks",
                "tonnage_pool_blocks by state: running requests leave the rest to the cache.",
                "short",
                query(f"sum by (state) (tonnage_pool_blocks{{{ONE}}})", "{{state}}"),
            )
        ),
        lines(
            "Token slots by state",
            "tonnage_pool_tokens by state, such as the tokens of cached prefixes.",
            "short",
            query(f"sum by (state) (tonnage_pool_tokens{{{ONE}}})", "{{state}}"),
            width=24,
        ),
        *_tier_panels(),
    )
