"""One OpenTelemetry span for each request, sent to a collector: the request, its duration and its outcome.

Attributes are named as in the semantic conventions for HTTP and generative AI, times as in vLLM. The parent span is the
caller's, from the `traceparent` header. A span contains numbers and names, never a prompt or an answer. This module is
imported only if --otlp-traces-endpoint is set.
Does not know: dialects.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from urllib.parse import urlsplit

from litestar.enums import ScopeType
from litestar.types import ASGIApp, HTTPScope, Message, Receive, Scope, Send
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from localllm.serving.answers.generation import Observed, observed
from localllm.version import __version__
from localllm.web.access.scopes import PROBES

LAST_SPANS_S = 2.0
"""How long a stopping server waits until its last spans are sent."""
_SILENT = PROBES | {"/metrics"}
_OPERATIONS = {"chat": "chat", "completions": "text_completion", "embeddings": "embeddings"}
"""Operation name by the last part of the route; /v1/chat/completions is a chat."""


class Traces:
    """The exporter of spans."""

    def __init__(self, endpoint: str) -> None:
        name = os.environ.get("OTEL_SERVICE_NAME", "localllm")
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": name, "service.version": __version__}), shutdown_on_exit=False
        )
        if not urlsplit(endpoint).path.strip("/"):  # a collector's bare address gets the default path
            endpoint = f"{endpoint.rstrip('/')}/v1/traces"
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
        self._tracer = self._provider.get_tracer("localllm", __version__)

    async def close(self) -> None:
        """Send the remaining spans in a daemon thread, with a time limit: the collector may be unreachable."""
        closing = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        closing.start()
        deadline_s = time.monotonic() + LAST_SPANS_S
        while closing.is_alive() and time.monotonic() < deadline_s:
            await asyncio.sleep(0.02)

    def around(self, app: ASGIApp) -> ASGIApp:
        """Return the application with a span around each request."""

        async def traced(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != ScopeType.HTTP or scope["path"] in _SILENT or scope["path"].startswith("/static/"):
                await app(scope, receive, send)
                return
            span, facts, status = self._begin(scope), Observed(), 0

            async def noted(message: Message) -> None:
                nonlocal status
                if message["type"] == "http.response.start":
                    status = message["status"]
                await send(message)

            token = observed.set(facts)
            try:
                await app(scope, receive, noted)
            finally:
                observed.reset(token)
                _describe(span, scope, status, facts)
                span.end()

        return traced

    def _begin(self, scope: HTTPScope) -> Span:
        carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        parent = TraceContextTextMapPropagator().extract(carrier)
        return self._tracer.start_span(scope["method"], context=parent, kind=SpanKind.SERVER)


def _describe(span: Span, scope: HTTPScope, status: int, facts: Observed) -> None:
    route = scope.get("path_template", "")
    span.set_attribute("http.request.method", scope["method"])
    span.set_attribute("localllm.request_id", scope["state"].get("request_id", ""))
    if route:
        span.update_name(f"{scope['method']} {route}")
        span.set_attribute("http.route", route)
    if status:  # no status if the client left before there was one
        span.set_attribute("http.response.status_code", status)
    if status >= 500:
        span.set_status(Status(StatusCode.ERROR))
    if facts.model:
        operation = next((_OPERATIONS[word] for word in route.split("/") if word in _OPERATIONS), None)
        if operation is not None:
            span.set_attribute("gen_ai.operation.name", operation)
        span.set_attribute("gen_ai.provider.name", "localllm")
        span.set_attribute("gen_ai.request.model", facts.asked_model or facts.model)
        span.set_attribute("gen_ai.response.model", facts.model)
    if facts.progress is not None:
        usage, timings = facts.progress.usage(), facts.progress.timings
        span.set_attribute("gen_ai.usage.input_tokens", usage.prompt_tokens)
        span.set_attribute("gen_ai.usage.output_tokens", usage.completion_tokens)
        span.set_attribute("gen_ai.usage.cache_read.input_tokens", usage.cached_tokens)
        span.set_attribute("gen_ai.response.finish_reasons", facts.progress.finish_reasons)
        if facts.progress.finish_reasons:
            span.set_attribute("gen_ai.latency.time_to_first_token", timings.ttft_s)
            span.set_attribute("gen_ai.latency.time_in_queue", timings.queue_s)
