"""Request spans, received by a real OTLP collector over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import opentelemetry.semconv._incubating.attributes.gen_ai_attributes as conventions
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tonnage.server.engines.fake import FakeEngine

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
NAMES = {value for value in vars(conventions).values() if isinstance(value, str)}


@pytest.fixture
def collector() -> Iterator[tuple[str, list[Any]]]:
    """Yield the endpoint of an OTLP collector and the list of spans that it has received."""
    spans: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            assert self.headers.get("content-encoding") in (None, "none")
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                for scope in resource.scope_spans:
                    spans.extend((span, resource.resource) for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1/traces", spans
    server.shutdown()
    thread.join()
    server.server_close()


def plain(pairs: Any) -> dict[str, Any]:
    def value(any_value: Any) -> Any:
        kind = any_value.WhichOneof("value")
        found = getattr(any_value, kind)
        return [value(item) for item in found.values] if kind == "array_value" else found

    return {pair.key: value(pair.value) for pair in pairs}


async def test_one_opentelemetry_span_per_request_is_exported(run_server, small_plan, collector) -> None:
    endpoint, spans = collector
    async with run_server(FakeEngine(small_plan()), otlp_traces_endpoint=endpoint) as server:
        await server.http.post(
            "/v1/completions",
            json={"model": "demo", "prompt": [3] * 32, "max_tokens": 5, "seed": 7, "temperature": 0.5},
            headers={"traceparent": f"00-{TRACE}-{PARENT}-01"},
        )
        await server.complete(max_tokens=10**6)
        await server.complete(prompt="x", max_tokens=4, stream=True)
        plan_id = server.state.plan.plan_id
    assert len(spans) == 3  # sent when the server stopped, none is lost
    done, refused, streamed = (span for span, _ in spans)
    found = plain(done.attributes)
    assert done.name == "text_completion demo"
    assert (done.trace_id.hex(), done.parent_span_id.hex()) == (TRACE, PARENT)
    assert plain(spans[0][1].attributes)["tonnage.plan_id"] == plan_id
    assert found["gen_ai.operation.name"] == "text_completion"
    assert found["gen_ai.usage.input_tokens"] == 32
    assert found["gen_ai.usage.output_tokens"] == 5
    assert found["gen_ai.request.max_tokens"] == 5
    assert found["gen_ai.request.seed"] == 7
    assert found["gen_ai.response.finish_reasons"] == ["length"]
    assert done.start_time_unix_nano <= done.events[0].time_unix_nano <= done.end_time_unix_nano
    assert {name for span, _ in spans for name in plain(span.attributes) if name.startswith("gen_ai.")} <= NAMES
    assert plain(refused.attributes)["error.type"] == "context_length_exceeded"
    assert plain(refused.attributes)["tonnage.outcome"] == "rejected"
    assert not refused.parent_span_id
    assert plain(streamed.attributes)["gen_ai.usage.output_tokens"] == 4


async def test_unreachable_trace_collector_delays_no_request(run_server, small_plan, monkeypatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "1")
    engine = FakeEngine(small_plan())
    async with run_server(engine, otlp_traces_endpoint="http://127.0.0.1:9/v1/traces") as server:
        assert (await server.complete(max_tokens=3)).status_code == 200
