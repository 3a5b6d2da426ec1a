"""Prometheus metrics at `/metrics`, and the wrapper of a pipeline that counts and times its answers."""

import asyncio
import logging
import re
import time
from collections import Counter as Counts
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ragkv.answer import Answer, AnswerEvent, AnswerOptions, Conversation, Delta
from ragkv.background import Drift
from ragkv.errors import DeadlineError, StoreError
from ragkv.server.limits import Limits
from ragkv.server.telemetry import trace_answer
from ragkv.server.wire import STATUSES

if TYPE_CHECKING:
    from ragkv.pipeline import Pipeline

logger = logging.getLogger(__name__)

_TTFT = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 7.5, 10, 20, 40, 80)  # seconds
_STAGE = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)
_BETWEEN = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2, 5)
_KL = (0.001, 0.003, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 1, 2, 5)
_RATIO = (0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 1, 1.05, 1.1, 1.2, 1.5, 2, 4)


class Metrics:
    """The metrics of a server in a registry of its own: a process may run several servers, as tests do."""

    def __init__(self, counters: Callable[[], dict[str, int]], gauges: Callable[[], dict[str, int]]) -> None:
        """counters, gauges: of the pipelines, read at each scrape."""
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        registry.register(_PipelineCollector(counters, gauges))

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"ragkv_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"ragkv_{name}", text, labels, buckets=buckets, registry=registry)

        self.ready = Gauge("ragkv_ready", "1 while questions can be answered, as /readyz has it", registry=registry)
        self.in_progress = Gauge("ragkv_requests_in_progress", "Questions being answered", registry=registry)
        self.requests = counter(
            "requests", "Questions, by outcome: answered, refused, failed, cancelled", "outcome", "tenant"
        )
        self.ttft = histogram("ttft_seconds", "From the prompt's submission to the first token", _TTFT, "policy")
        self.total = histogram("request_seconds", "From the question to the end of the answer", _TTFT)
        self.between = histogram("inter_token_seconds", "Between two pieces of an answer", _BETWEEN)
        self.stages = histogram(
            "stage_seconds", "Of TTFT and before: retrieve, load, probe, recompute", _STAGE, "stage"
        )
        self.prompt = counter("prompt_tokens", "Where a prompt's KV came from: prefix, reused, recomputed", "source")
        self.memory = counter("memory_tokens", "Prompt tokens whose stored KV was in memory")
        self.completion = counter("completion_tokens", "Tokens generated")
        self.fallbacks = counter("fallbacks", "Answers with less reuse than possible, by reason", "reason")
        self.plans = counter("plans", "What the controller chose: fuse, fuse warm, prefill", "way")
        self.drift = histogram("canary_kl", "Drift of answers compared with full prefill's, in nats", _KL)
        self.compared = counter("canary_tokens", "Tokens of answers that were compared with full prefill's")
        self.agreed = counter("canary_agreeing_tokens", "Those that full prefill would have chosen as well")
        self.budget = Gauge("ragkv_budget", "Share of the cached tokens recomputed", ["tenant"], registry=registry)
        self.accuracy = histogram("plan_ttft_ratio", "TTFT by what the controller expected", _RATIO, "way")

    def drifted(self, tenant: str, drift: Drift, budget: float) -> None:
        self.drift.observe(drift.kl)
        self.compared.inc(drift.num_tokens)
        self.agreed.inc(drift.agreement * drift.num_tokens)
        self.budget.labels(tenant).set(budget)

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def answered(self, answer: Answer) -> None:
        usage, timings = answer.usage, answer.timings
        self.ttft.labels(answer.policy.name).observe(timings.ttft_ms / 1e3)
        for stage in ("retrieve", "load", "probe", "recompute"):
            self.stages.labels(stage).observe(getattr(timings, f"{stage}_ms") / 1e3)
        for source in ("prefix", "reused", "recomputed"):
            self.prompt.labels(source).inc(getattr(usage, f"{source}_tokens"))
        self.memory.inc(usage.memory_tokens)
        self.completion.inc(usage.completion_tokens)
        if answer.fallback is not None:
            self.fallbacks.labels(_without_numbers(answer.fallback)).inc()
        if answer.plan is not None:
            self.plans.labels(answer.plan.way).inc()
            self.accuracy.labels(answer.plan.way).observe(timings.ttft_ms / answer.plan.predicted_ms)


class Observed:
    """A tenant's pipeline within the tenant's limits; answers are counted, timed, and ended after `timeout_s`."""

    def __init__(self, pipeline: "Pipeline", metrics: Metrics, limits: Limits) -> None:
        self.pipeline, self._metrics, self._limits = pipeline, metrics, limits

    async def answer(self, asked: str | Conversation, options: AnswerOptions) -> AsyncGenerator[AnswerEvent, None]:
        """Answer as the pipeline does. Raises OverloadedError at a limit, and DeadlineError after `timeout_s`."""
        metrics, tenant = self._metrics, self.pipeline.tenant
        outcome = "refused"
        try:
            with self._limits.request(), metrics.in_progress.track_inprogress():
                outcome = "cancelled"  # unless it ends otherwise
                timed = self._timed(_until(self.pipeline.answer(asked, options), options.timeout_s))
                async with aclosing(timed) as events:
                    async for event in events:
                        outcome = "answered" if isinstance(event, Answer) else outcome
                        yield event
        except Exception as error:
            outcome = "refused" if isinstance(error, tuple(STATUSES)) else "failed"
            raise
        finally:
            metrics.requests.labels(outcome, tenant).inc()

    async def _timed(self, events: AsyncGenerator[AnswerEvent, None]) -> AsyncGenerator[AnswerEvent, None]:
        metrics, begin, begin_ns = self._metrics, time.perf_counter(), time.time_ns()
        last: float | None = None
        async with aclosing(events):
            async for event in events:
                if isinstance(event, Delta):
                    now = time.perf_counter()
                    if last is not None:
                        metrics.between.observe(now - last)
                    last = now
                elif isinstance(event, Answer):
                    metrics.answered(event)
                    trace_answer(event, begin_ns, self.pipeline.tenant)
                    metrics.total.observe(time.perf_counter() - begin)
                    self._limits.spent(event.usage.prompt_tokens + event.usage.completion_tokens)
                yield event


async def _until(
    events: AsyncGenerator[AnswerEvent, None], timeout_s: float | None
) -> AsyncGenerator[AnswerEvent, None]:
    """Yield `events`; raise DeadlineError when the time is up."""
    end = None if timeout_s is None else time.monotonic() + timeout_s
    async with aclosing(events):
        while True:
            try:
                event = await asyncio.wait_for(anext(events), None if end is None else end - time.monotonic())
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise DeadlineError(f"the answer took longer than {timeout_s:g} s (timeout_s)") from None
            yield event


_GAUGES = {
    "entries": "Entries on disk: a chunk has one for each context it is precomputed in",
    "evicted_entries": "Entries that were evicted from disk and not stored again",
    "disk_bytes": "Size of KV on disk",
    "memory_chunks": "Chunks whose KV is in memory",
    "waiting_uploads": "Uploads that aren't indexed yet",
}


class _PipelineCollector(Collector):
    """Reads the counters and gauges of the pipelines at each scrape."""

    def __init__(self, counters: Callable[[], dict[str, int]], gauges: Callable[[], dict[str, int]]) -> None:
        self._counters, self._gauges = counters, gauges

    def collect(self) -> Iterable[Metric]:
        text = "How often KV wasn't reused, by reason, and chunks precomputed again"
        family = CounterMetricFamily("ragkv_kv_events", text, labels=["event"])
        counts: Counts[str] = Counts()
        for name, count in self._counters().items():
            counts[_without_numbers(name)] += count
        for event, count in counts.items():
            family.add_metric([event], count)
        yield family
        try:
            gauges = self._gauges()
        except StoreError as error:  # the other metrics are reported all the same
            logger.warning("the store isn't counted: %s", error)
            return
        for name, value in gauges.items():
            yield GaugeMetricFamily(f"ragkv_store_{name}", _GAUGES[name], value)


def _without_numbers(reason: str) -> str:
    return re.sub(r"\d+(\.\d+)?", "N", reason)
