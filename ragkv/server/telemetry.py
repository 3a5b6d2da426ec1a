"""What a request leaves behind: an id, a line in the log, a span in a trace.

The id is the client's `X-Request-Id` or a new one; answers carry it, and so does every line that is logged meanwhile.
Traces follow the client's `traceparent` and go where OpenTelemetry's own variables say (`OTEL_EXPORTER_OTLP_ENDPOINT`);
without them nothing is recorded.
"""

import logging
import os
import re
import sys
import time
import uuid
from contextvars import ContextVar
from typing import Any, Literal

from opentelemetry import propagate, trace
from opentelemetry.trace import SpanKind, Status, StatusCode
from pythonjsonlogger.core import RESERVED_ATTRS
from pythonjsonlogger.json import JsonFormatter
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ragkv.answer import Answer

logger = logging.getLogger("ragkv.requests")
tracer = trace.get_tracer("ragkv")
request_id: ContextVar[str] = ContextVar("request_id", default="-")

_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_EXPORTING = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_TEXT = "%(asctime)s %(levelname)s %(name)s [%(request_id)s] %(message)s"
_FIELDS = ["asctime", "levelname", "name", "request_id", "message"]
_OTHERS = [*RESERVED_ATTRS, "vllm_process_name"]  # what records have that isn't told
_QUIET = {"/healthz", "/readyz", "/metrics"}  # asked for every few seconds


def log_as(form: Literal["text", "json"]) -> None:
    """Send the log of this process to stderr, in lines of text or JSON."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(_FIELDS, reserved_attrs=_OTHERS) if form == "json" else logging.Formatter(_TEXT))
    handler.addFilter(_named)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    for noisy in ("httpx", "sentence_transformers", "uvicorn.access"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def _named(record: logging.LogRecord) -> bool:
    record.request_id = request_id.get()
    return True


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


class Telemetry:
    """ASGI middleware, around everything else."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, method, status, begin = Headers(scope=scope), scope["method"], 0, time.perf_counter()
        given = headers.get("x-request-id", "")
        id = given if _ID.fullmatch(given) else uuid.uuid4().hex
        request_id.set(id)

        async def named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = id
            await send(message)

        parent = propagate.extract(dict(headers))
        with tracer.start_as_current_span(method, parent, SpanKind.SERVER, {"ragkv.request_id": id}) as span:
            try:
                await self._app(scope, receive, named)
            finally:
                route = getattr(scope.get("route"), "path", "unknown")
                span.update_name(f"{method} {route}")
                span.set_attributes({"http.request.method": method, "http.route": route})
                span.set_attribute("http.response.status_code", status)
                if status >= 500:
                    span.set_status(Status(StatusCode.ERROR))
                _log(scope, status, 1e3 * (time.perf_counter() - begin))


def _log(scope: Scope, status: int, took_ms: float) -> None:
    """status: 0 if the client went away before it had one."""
    fields = {"method": scope["method"], "path": scope["path"], "status": status, "took_ms": round(took_ms, 1)}
    level = logging.DEBUG if scope["path"] in _QUIET and status == 200 else logging.INFO
    text = f"{fields['method']} {fields['path']!r} {status or 'left'} in {took_ms:.0f} ms"
    logger.log(level, text, extra={**fields, "tenant": scope.get("tenant")})


def trace_answer(answer: Answer, begin_ns: int, tenant: str) -> None:
    """As spans under the request's: retrieve, prefill up to the first token, decode. begin_ns: by `time.time_ns`."""
    timings, usage = answer.timings, answer.usage
    stages = {"retrieve": timings.retrieve_ms, "prefill": timings.ttft_ms}
    stages["decode"] = timings.total_ms - sum(stages.values())
    facts: dict[str, Any] = {f"ragkv.{name}": value for name, value in vars(usage).items()}
    facts |= {f"ragkv.{name}_ms": getattr(timings, f"{name}_ms") for name in ("load", "probe", "recompute")}
    facts |= {"ragkv.policy": answer.policy, "ragkv.tenant": tenant}
    if answer.fallback is not None:
        facts["ragkv.fallback"] = answer.fallback
    span = tracer.start_span("answer", start_time=begin_ns, attributes=facts)
    under, start_ns = trace.set_span_in_context(span), begin_ns
    for name, took_ms in stages.items():
        end_ns = start_ns + round(1e6 * max(0.0, took_ms))
        tracer.start_span(name, under, start_time=start_ns).end(end_ns)
        start_ns = end_ns
    span.end(start_ns)
