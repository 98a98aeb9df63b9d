"""OpenTelemetry traces: one span for each request, sent to an OTLP endpoint. Needs the extra `otel`.

A span is created when its request has ended, from the counts and times recorded for it. So tracing adds no cost
while tokens are streamed. Attribute names follow the semantic conventions for GenAI of
opentelemetry-semantic-conventions 0.66b2 (`gen_ai.*`, development status). Values without a convention are
named `tonnage.*`.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Receive, Scope, Send

from tonnage.planner.errors import DeploymentError
from tonnage.server.requests.accounts import Ticket
from tonnage.server.state import ServerState

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

# W3C trace context of the current request, as sent in its headers.
_CARRIER: ContextVar[dict[str, str]] = ContextVar("tonnage_trace_context", default={})  # noqa: B039 (never written to)
_CONTEXT_HEADERS = (b"traceparent", b"tracestate")

OPERATIONS = {
    "/v1/completions": "text_completion",
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
}


class TraceContext:
    """An ASGI middleware that stores the client's trace context, the parent of the request's span."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Store the trace context of an HTTP request and call the wrapped app."""
        if scope["type"] == "http":
            headers = dict(scope["headers"])
            found = {
                name.decode(): headers[name].decode("latin-1") for name in _CONTEXT_HEADERS if name in headers
            }
            if found:
                _CARRIER.set(found)
        await self._app(scope, receive, send)


class Tracing:
    """Exporter of one app's traces, called for each finished request.

    Args:
        state: the state of the app.
        endpoint: URL of the OTLP endpoint.
        exporter: the OpenTelemetry span exporter; None selects OTLP over HTTP.

    Raises:
        DeploymentError: the extra `otel` is not installed.
    """

    def __init__(self, state: ServerState, endpoint: str, exporter: SpanExporter | None = None) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError:
            raise DeploymentError(
                "OpenTelemetry is not installed",
                field="otlp_traces_endpoint",
                hint="pip install 'tonnage[otel]'",
            ) from None
        resource = Resource.create({"service.name": "tonnage", "tonnage.plan_id": state.plan.plan_id})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter or OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("tonnage.server")
        self._state = state
        state.accounts.on_finish.append(self._finished)

    def shutdown(self) -> None:
        """Send the trace spans that are not sent yet; give up after the exporter's time-out."""
        self._provider.shutdown()

    def _finished(self, ticket: Ticket) -> None:
        # imported here, because the extra otel is optional
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        operation = OPERATIONS.get(ticket.endpoint, "text_completion")
        start = int(ticket.arrived * 1e9)
        span = self._tracer.start_span(
            f"{operation} {self._state.model_name}",
            context=TraceContextTextMapPropagator().extract(_CARRIER.get()),
            kind=SpanKind.SERVER,
            start_time=start,
            attributes=self._attributes(ticket, operation),
        )
        if ticket.first_token_seconds is not None:
            span.add_event("tonnage.first_token", timestamp=start + int(ticket.first_token_seconds * 1e9))
        if ticket.outcome == "error":
            span.set_status(Status(StatusCode.ERROR))
        span.end(start + int(ticket.seconds * 1e9))

    def _attributes(self, ticket: Ticket, operation: str) -> dict[str, Any]:
        outcome = ticket.outcome or "error"
        found: dict[str, Any] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "tonnage",
            "gen_ai.request.model": self._state.model_name,
            "gen_ai.response.id": ticket.request_id,
            "tonnage.outcome": outcome,
        }
        if ticket.tenant.name:
            found["tonnage.tenant"] = ticket.tenant.name
        if outcome in ("stop", "length"):
            found["gen_ai.response.model"] = self._state.model_name
            found["gen_ai.response.finish_reasons"] = [outcome]
        if ticket.error is not None:
            found["error.type"] = str(ticket.error.code.value)
        if ticket.first_token_seconds is not None:
            found["tonnage.time_to_first_token_seconds"] = ticket.first_token_seconds
        submission, counts = ticket.submission, ticket.counts
        if submission is not None:
            params = submission.params
            found |= {
                "gen_ai.request.max_tokens": params.max_tokens,
                "gen_ai.request.temperature": params.temperature,
                "gen_ai.request.top_p": params.top_p,
                "gen_ai.request.choice.count": submission.n,
            }
            if params.seed is not None:
                found["gen_ai.request.seed"] = params.seed
        if counts is not None:
            found["gen_ai.usage.input_tokens"] = counts.prompt
            found["gen_ai.usage.output_tokens"] = counts.completion
            found["gen_ai.usage.cache_read.input_tokens"] = counts.cached_total
        return found
