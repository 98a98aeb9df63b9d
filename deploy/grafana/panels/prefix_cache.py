"""Prefix cache and evictions: how much prefill is saved, and what room it has."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard

from panels.parts import ACTIVE, ONE, frame, lines, number, query, rate, reads, stacked


def _hit_share(by: str) -> str:
    hits = f"sum by ({by}) ({rate('tonnage_prefix_hit_tokens_total')})"
    asked = f"sum by ({by}) ({rate('tonnage_prefix_query_tokens_total')})"
    return f"{hits} / ({asked} > 0)"


def prefix_cache() -> dashboard.Dashboard:
    return frame(
        "prefix-cache",
        "Prefix cache and evictions",
        "How much prefill the prefix cache saves, and what room it has.",
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
            "Saved tokens a second",
            "tonnage_prefix_hit_tokens_total: prompt tokens that were not computed again.",
            "short",
            f"sum({rate('tonnage_prefix_hit_tokens_total')})",
            steps=ACTIVE,
            mappings=(reads(_0=("none", "text")),),
            width=6,
        ),
        number(
            "Cached",
            'tonnage_pool_bytes{state="cached"}: prefixes that can be hit and are given up when needed.',
            "bytes",
            f'sum(tonnage_pool_bytes{{{ONE}, state="cached"}})',
            steps=ACTIVE,
            mappings=(reads(_0=("nothing", "text")),),
            width=6,
        ),
        number(
            "Evicted a second",
            "tonnage_evictions_total, blocks.",
            "short",
            f"sum({rate('tonnage_evictions_total')})",
            steps=ACTIVE,
            mappings=(reads(_0=("none", "text")),),
            width=6,
        ),
        lines(
            "Share of prompt tokens from the cache",
            "tonnage_prefix_hit_tokens_total over tonnage_prefix_query_tokens_total, by server. Low though "
            "prompts share beginnings: the requests of one conversation go to different replicas (route by "
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
                "tonnage_prefix_query_tokens_total. salt: blocks that only requests with the same salt read; "
                "shared: blocks for everybody.",
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
            "tonnage_evictions_total per second by cause: prefill, decode, copy_on_write or reset. Many, and "
            "a falling share of hits: the pool is too small to keep prefixes; a larger one, or fewer "
            "conversations per replica.",
            "short",
            query(f"sum by (cause, instance) ({rate('tonnage_evictions_total')})", "{{cause}} {{instance}}"),
        ),
        stacked(
            lines(
                "Pool by state, blocks",
                "tonnage_pool_blocks: what running requests leave to the cache.",
                "short",
                query(f"sum by (state) (tonnage_pool_blocks{{{ONE}}})", "{{state}}"),
            )
        ),
        lines(
            "Token slots by state",
            "tonnage_pool_tokens: how many tokens the cached prefixes amount to.",
            "short",
            query(f"sum by (state) (tonnage_pool_tokens{{{ONE}}})", "{{state}}"),
            width=24,
        ),
    )
