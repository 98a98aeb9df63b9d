"""An HTTP server that exports observations of the watched server to Prometheus.

Metrics have the names and meanings of a Tonnage server's metrics (docs/operations.md). A metric is absent when
the watched server does not report it, and all are absent while it does not answer.
"""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tonnage.planner.errors import DeploymentError
from tonnage.server.observe.metrics.auto import auto_families
from tonnage.server.observe.metrics.config import PLAN_LABELS
from tonnage.server.observe.metrics.families import Page
from tonnage.server.observe.metrics.tier import write_tier
from tonnage.server.watch.client import WatchError
from tonnage.server.watch.records import TierReading
from tonnage.server.watch.watcher import Observation

# Seconds without activity after which a client is disconnected; Prometheus uses the same timeout for a scrape.
_CLIENT_SECONDS = 10.0


class Exporter:
    """A thread that serves the last observation of a server at /metrics; no scrape waits for that server.

    Raises:
        DeploymentError: it cannot listen on the port.
    """

    def __init__(self, url: str, host: str, port: int) -> None:
        self._url = url
        self._model = ""
        self._page = Page(model="")
        self._last: Observation | None = None
        self._failures = 0
        self._text = b""
        self._write()
        exporter = self

        class Handler(BaseHTTPRequestHandler):
            """A handler that serves the exporter's metrics page over HTTP."""

            timeout = _CLIENT_SECONDS

            def do_GET(self) -> None:
                """Send the metrics page, or 404 for another path."""
                found = self.path.partition("?")[0] == "/metrics"
                body = exporter._text if found else b"the metrics are at /metrics\n"
                self.send_response(200 if found else 404)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Write no log line for a scrape."""

        try:
            self._server = ThreadingHTTPServer((host, port), Handler)
        except OSError as error:
            raise DeploymentError(
                f"cannot listen on {host}:{port}: {error.strerror or error}", field="--port",
                hint="give another port; 0 takes a free one",
            ) from None  # fmt: skip
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        """Return the URL at which this exporter serves its metrics page."""
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}/metrics"

    def show(self, observation: Observation) -> None:
        """Replace the exported metrics with the values of a new observation."""
        self._last = observation
        self._write()

    def lost(self, error: WatchError) -> None:
        """Remove the exported metrics of a server that does not answer."""
        self._last = None
        self._failures += 1
        self._write()

    def close(self) -> None:
        """Stop the exporter's HTTP server."""
        self._server.shutdown()
        self._server.server_close()

    def _write(self) -> None:
        now = self._last
        model = now.facts.served or "" if now is not None else self._model
        if model != self._model:
            self._model, self._page = model, Page(model=model)
        page = self._page
        if now is not None:
            families(page, now)
        page.gauge(
            "tonnage_watch_up",
            "1 when the watched server answered the last request.",
            int(now is not None),
        )
        page.counter("tonnage_watch_failures", "Observations that failed.", self._failures)
        self._text = page.take().encode()


def families(page: Page, now: Observation) -> None:
    """Write the metrics of an observation of the watched server.

    Counters have the values of the watched server's counters, so they return to zero when that server restarts.
    """
    facts, reading, planned = now.facts, now.reading, now.planned
    page.info(
        "tonnage_watch_info",
        "The server that is watched; always 1.",
        ("server", "version", "url"),
        [(facts.title, facts.version or "", now.url)],
    )
    page.gauge("tonnage_watch_timestamp_seconds", "Time of the last observation.", now.at)
    page.counter("tonnage_watch_restarts", "Times the watched server was started again.", now.restarts)
    _memory(page, now)
    if planned is not None:
        page.info(
            "tonnage_plan_info",
            "The plan of the watched server; always 1.",
            PLAN_LABELS,
            [tuple(str(getattr(planned, label)) for label in PLAN_LABELS)],
        )
    _pool(page, now)
    states = {(name,): reading.sum_of(name) for name in ("running", "waiting")}
    page.gauges(
        "tonnage_engine_requests",
        "Requests in the engine by state.",
        ("state",),
        {key: count for key, count in states.items() if count is not None},
    )
    _headroom(page, now)
    auto_families(page, reading.auto)
    if reading.tier is not None:
        _tier(page, reading.tier)
    counters = reading.counters
    for name, text, value in (
        ("preemptions", "Running requests put back to waiting.", counters.preemptions),
        ("prompt_tokens", "Prompt tokens, as the watched server counts them.", counters.prompt_tokens),
        ("generation_tokens", "Tokens generated.", counters.generation_tokens),
        (
            "prefix_query_tokens",
            "Prompt tokens that were looked up in the prefix cache.",
            counters.prefix_query_tokens,
        ),
    ):
        page.counter(f"tonnage_{name}", text, value)
    if counters.prefix_hit_tokens is not None:
        page.counters(
            "tonnage_prefix_hit_tokens",
            "Prompt tokens whose K/V was cached; the watched server does not report the block's visibility.",
            ("source",),
            {("unknown",): counters.prefix_hit_tokens},
        )


# Field of TierReading -> name of the KV tier's metric on the /metrics page of a Tonnage server
_TIER_METRICS = {
    "host_size": "host_size", "host_used": "host_used", "hit_tokens": "host_hit_tokens",
    "saved_seconds": "saved_seconds", "spent_seconds": "spent_seconds",
    "disk_size": "size", "disk_used": "used",
}  # fmt: skip


def _tier(page: Page, tier: TierReading) -> None:
    """Write the metrics of KV tiers that the watched server reports."""
    write_tier(page, {metric: getattr(tier, name) for name, metric in _TIER_METRICS.items()})


def _memory(page: Page, now: Observation) -> None:
    planned = now.planned
    if planned is None:
        return
    page.gauges(
        "tonnage_memory_planned_bytes",
        "Bytes planned, by component, as far as the reported settings determine them.",
        ("device", "component"),
        {(planned.device, name): size for name, size in planned.components.items()},
    )
    page.gauges(
        "tonnage_memory_measured_bytes",
        "Bytes that the server holds, by component; absent where not measured.",
        ("device", "component"),
        {(planned.device, name): size for name, size in now.measured.items()},
    )
    page.gauges(
        "tonnage_memory_measured_to_planned_ratio",
        "Measured bytes over planned bytes; 1 means that the plan was exact.",
        ("device", "component"),
        {
            (planned.device, name): size / expected
            for name, size in now.measured.items()
            if name != "free" and (expected := planned.components.get(name))
        },
    )


def _pool(page: Page, now: Observation) -> None:
    reading, planned = now.reading, now.planned
    total, usable = reading.blocks("num_blocks"), reading.blocks("usable")
    used, cached = reading.blocks("used"), reading.blocks("cached")
    if total is None or usable is None:
        return
    size = next(one.pool.block_size for one in reading.replicas if one.pool is not None)
    page.gauge("tonnage_config_num_blocks", "KV blocks in the pool, including reserved blocks.", total)
    page.gauge("tonnage_config_block_size_tokens", "Tokens in a KV block.", size)
    page.gauge("tonnage_pool_usable_blocks", "KV blocks that can hold tokens.", usable)
    states = {"used": used, "cached": cached, "reserved": total - usable}
    if used is not None:
        states["free"] = usable - used - (cached or 0)
    factors = {"blocks": 1, "tokens": size}
    if planned is not None and planned.bytes_per_block:
        page.gauge("tonnage_config_block_bytes", "Bytes of a KV block.", planned.bytes_per_block)
        factors["bytes"] = planned.bytes_per_block
    for unit, factor in factors.items():
        page.gauges(
            f"tonnage_pool_{unit}",
            f"The KV pool in {unit} by state: used by running requests, cached (reclaimable prefixes), free, "
            "reserved (never given out); free includes cached blocks where the server does not report them.",
            ("state",),
            {(state,): count * factor for state, count in states.items() if count is not None},
        )
    if used is not None and usable:
        page.gauge("tonnage_pool_usage_ratio", "Used blocks over usable blocks.", used / usable)


def _headroom(page: Page, now: Observation) -> None:
    room, planned = now.headroom, now.planned
    if room is None:
        return
    page.gauge("tonnage_headroom_blocks", "KV blocks that no running request holds.", room.blocks)
    if planned is not None:
        page.gauge(
            "tonnage_headroom_bytes",
            "Bytes of the KV blocks that no running request holds.",
            room.blocks * planned.bytes_per_block,
        )
    page.gauge(
        "tonnage_headroom_requests",
        "More requests of the present mix (average prompt and output of finished requests) that fit now.",
        room.requests,
    )
    page.gauge(
        "tonnage_headroom_prompt_tokens", "Largest prompt that could start now; 0: none.", room.prompt_tokens
    )
    page.gauge(
        "tonnage_time_to_full_seconds",
        "Seconds until no block is free, at the growth of the last two minutes; 86400: not within a day.",
        now.full_in,
    )
