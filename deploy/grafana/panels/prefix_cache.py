"""Prefix cache and evictions: saved prefill, and the memory for cached prefixes."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard

from panels.parts import ACTIVE, ONE, frame, lines, number, query, rate, reads, stacked


def _hit_share(by: str) -> str:
    hits = f"sum by ({by}) ({rate('tonnage_prefix_hit_tokens_total')})"
    asked = f"sum by ({by}) ({rate('tonnage_prefix_query_tokens_total')})"
    return f"{hits} / ({asked} > 0)"


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
    )
