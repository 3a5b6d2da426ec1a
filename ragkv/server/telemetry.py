"""Request ids, the request log, and spans for traces.

The id is the client's `X-Request-ID` or a new one; it is in the answer's headers and in every log line of the request.
Spans continue the client's `traceparent` and are exported as OpenTelemetry's own variables say
(`OTEL_EXPORTER_OTLP_ENDPOINT`); without them nothing is recorded.
"""

import logging
import os
import re
import sys
import time
import uuid
from typing import Any, Literal

from asgi_correlation_id import CorrelationIdFilter, CorrelationIdMiddleware, correlation_id
from fastapi import FastAPI
from opentelemetry import trace
from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor
from pythonjsonlogger.core import RESERVED_ATTRS
from pythonjsonlogger.json import JsonFormatter
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ragkv.answer import Answer

logger = logging.getLogger("ragkv.requests")
tracer = trace.get_tracer("ragkv")

_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_EXPORTING = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_TEXT = "%(asctime)s %(levelname)s %(name)s [%(correlation_id)s] %(message)s"
_FIELDS = ["asctime", "levelname", "name", "correlation_id", "message"]
_RENAMED = {"correlation_id": "request_id"}
_LEFT_OUT = [*RESERVED_ATTRS, "vllm_process_name"]
_QUIET = {"/healthz", "/readyz", "/metrics"}  # asked for every few seconds


def log_as(form: Literal["text", "json"]) -> None:
    """Send the log of this process to stderr, in lines of text or JSON."""
    handler = logging.StreamHandler(sys.stderr)
    json_formatter = JsonFormatter(_FIELDS, rename_fields=_RENAMED, reserved_attrs=_LEFT_OUT)
    handler.setFormatter(json_formatter if form == "json" else logging.Formatter(_TEXT))
    handler.addFilter(CorrelationIdFilter(default_value="-"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    for noisy in ("faiss.loader", "httpx", "sentence_transformers", "uvicorn.access"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def export_traces() -> None:
    """Send spans to a collector, if the environment names one."""
    if not any(os.environ.get(name) for name in _EXPORTING):
        return
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME", "ragkv")}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)


def observe_requests(app: FastAPI) -> None:
    """Give each request of `app` an id, a log line and a span, around the middleware that `app` has already."""
    app.add_middleware(RequestLog)
    app.add_middleware(CorrelationIdMiddleware, validator=None, transformer=_request_id, update_request_header=False)
    os.environ.setdefault("OTEL_SEMCONV_STABILITY_OPT_IN", "http")  # today's names of attributes, not those of 2023
    FastAPIInstrumentor.instrument_app(app, exclude_spans=["receive", "send"])


def _request_id(given: str) -> str:
    return given if _ID.fullmatch(given) else uuid.uuid4().hex


class RequestLog:
    """ASGI middleware that logs each request once it has ended."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, begin = 0, time.perf_counter()  # 0: the client disconnected before there was one

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        trace.get_current_span().set_attribute("ragkv.request_id", correlation_id.get() or "")
        try:
            await self._app(scope, receive, watched)
        except Exception:  # a bug: the answer is sent, with this status, after the line is written
            status = status or 500
            raise
        finally:
            method, path, took_ms = scope["method"], scope["path"], 1e3 * (time.perf_counter() - begin)
            fields = {"method": method, "path": path, "status": status, "took_ms": round(took_ms, 1)}
            level = logging.DEBUG if path in _QUIET and status == 200 else logging.INFO
            text = f"{method} {path!r} {status or 'left'} in {took_ms:.0f} ms"
            logger.log(level, text, extra={**fields, "tenant": scope.get("tenant")})


def trace_answer(answer: Answer, begin_ns: int, tenant: str) -> None:
    """Record an answer as a span of its request, with child spans: retrieve, prefill up to the first token, decode.

    begin_ns: when it began, by `time.time_ns`.
    """
    timings, usage = answer.timings, answer.usage
    stages = {"retrieve": timings.retrieve_ms, "prefill": timings.ttft_ms}
    stages["decode"] = timings.total_ms - sum(stages.values())
    facts: dict[str, Any] = {f"ragkv.{name}": value for name, value in vars(usage).items()}
    facts |= {f"ragkv.{name}_ms": getattr(timings, f"{name}_ms") for name in ("load", "probe", "recompute")}
    facts |= {"ragkv.policy": answer.policy.label, "ragkv.tenant": tenant}
    if answer.fallback is not None:
        facts["ragkv.fallback"] = answer.fallback
    span = tracer.start_span("answer", start_time=begin_ns, attributes=facts)
    under, start_ns = trace.set_span_in_context(span), begin_ns
    for name, took_ms in stages.items():
        end_ns = start_ns + round(1e6 * max(0.0, took_ms))
        tracer.start_span(name, under, start_time=start_ns).end(end_ns)
        start_ns = end_ns
    span.end(start_ns)
