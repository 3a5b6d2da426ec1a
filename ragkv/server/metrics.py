"""Prometheus metrics at `/metrics`."""

import logging
import re
from collections.abc import Iterable, Iterator

from openai.types.chat.completion_create_params import CompletionCreateParamsBase
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ragkv.answer import Answer
from ragkv.background import Drift
from ragkv.store.fetching import MISSES
from ragkv.store.remote_state import Traffic
from ragkv.store.tier import RemoteTier

logger = logging.getLogger(__name__)

_MAX_NAMES = 1000  # of ignored fields that are logged; clients choose them
_TTFT = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 7.5, 10, 20, 40, 80)  # seconds
_STAGE = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)
_BETWEEN = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2, 5)
_KL = (0.001, 0.003, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 1, 2, 5)
_RATIO = (0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 1, 1.05, 1.1, 1.2, 1.5, 2, 4)


class Metrics:
    """The metrics of a server in a registry of its own: a process may run several servers, as tests do."""

    def __init__(self, pipelines: Collector) -> None:
        """pipelines: the figures that they have themselves, read at each scrape."""
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        registry.register(pipelines)

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
        self.stored = counter("stored_prefix_tokens", "Prompt tokens with the KV of an exact prefix from the disk")
        self.memory = counter("memory_tokens", "Prompt tokens whose stored KV was in memory")
        self.completion = counter("completion_tokens", "Tokens generated")
        self.fallbacks = counter("fallbacks", "Answers with less reuse or fewer sources, by reason", "reason")
        self.fields = counter("ignored_fields", "Fields of chat requests without effect; other: not OpenAI's", "field")
        self._ignored: set[str] = set()
        self.estimates = histogram("drift_estimate", "Estimated drift of answers with a quality target, in nats", _KL)
        self.rejected = counter("rejected_answers", "Answers begun again, since their estimate was above the target")
        self.plans = counter("plans", "What the controller chose: fuse, fuse warm, prefill", "way")
        self.drift = histogram("canary_kl", "Drift of answers compared with full prefill's, in nats", _KL)
        self.guessed = histogram("canary_estimated_kl", "What the same answers' drift is estimated as, in nats", _KL)
        self.compared = counter("canary_tokens", "Tokens of answers that were compared with full prefill's")
        self.agreed = counter("canary_agreeing_tokens", "Those that full prefill would have chosen as well")
        self.budget = Gauge("ragkv_budget", "Share of the cached tokens recomputed", ["tenant"], registry=registry)
        self.accuracy = histogram("plan_ttft_ratio", "TTFT by what the controller expected", _RATIO, "way")

    def drifted(self, tenant: str, drift: Drift, budget: float) -> None:
        self.drift.observe(drift.kl)
        if drift.estimate is not None:
            self.guessed.observe(drift.estimate)
        self.compared.inc(drift.num_tokens)
        self.agreed.inc(drift.agreement * drift.num_tokens)
        self.budget.labels(tenant).set(budget)

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def ignored(self, names: Iterable[str]) -> None:
        """Count fields of a request that had no effect, and log each name once."""
        for name in names:
            self.fields.labels(name if name in CompletionCreateParamsBase.__annotations__ else "other").inc()
            if name not in self._ignored and len(self._ignored) < _MAX_NAMES:
                self._ignored.add(name)
                logger.warning("the field %.100r of chat requests is ignored", name)

    def answered(self, answer: Answer) -> None:
        usage, timings = answer.usage, answer.timings
        self.ttft.labels(answer.policy.name).observe(timings.ttft_ms / 1e3)
        for stage in ("retrieve", "load", "probe", "recompute"):
            self.stages.labels(stage).observe(getattr(timings, f"{stage}_ms") / 1e3)
        for source in ("prefix", "reused", "recomputed"):
            self.prompt.labels(source).inc(getattr(usage, f"{source}_tokens"))
        self.memory.inc(usage.memory_tokens)
        self.stored.inc(usage.stored_prefix_tokens)
        self.completion.inc(usage.completion_tokens)
        self.rejected.inc(answer.attempts - 1)
        if answer.drift_estimate is not None:
            self.estimates.observe(answer.drift_estimate)
        if answer.fallback is not None:
            self.fallbacks.labels(without_numbers(answer.fallback)).inc()
        if answer.plan is not None:
            self.plans.labels(answer.plan.way).inc()
            self.accuracy.labels(answer.plan.way).observe(timings.ttft_ms / answer.plan.predicted_ms)


def remote_metrics(tier: RemoteTier) -> Iterator[Metric]:
    """Yield what went between the store and its bucket, and how the bucket is; of exact prefixes what went."""
    yield from _traffic_metrics("ragkv_remote", tier.traffic)
    if tier.derived is not None:
        yield from _traffic_metrics("ragkv_remote_prefix", tier.derived.traffic)
    gauges = {
        "up": ("1 unless calls rest after an outage", not tier.remote.breaker.rests),
        "pending_deletions": (
            "Chunks deleted here that the bucket still has; all exact prefixes are one",
            tier.num_pending_deletions,
        ),
        "unsent_entries": ("Entries that the bucket lacks", tier.num_unsent),
    }
    for name, (text, value) in gauges.items():
        yield GaugeMetricFamily(f"ragkv_remote_{name}", text, value)


def _traffic_metrics(prefix: str, traffic: Traffic) -> Iterator[Metric]:
    counts = {
        "entries": ("Entries read from the bucket and sent to it", traffic.entries_read, traffic.entries_sent),
        "bytes": ("Their bytes", traffic.bytes_read, traffic.bytes_sent),
    }
    for name, (text, read, sent) in counts.items():
        family = CounterMetricFamily(f"{prefix}_{name}", text, labels=["direction"])
        family.add_metric(["read"], read)
        family.add_metric(["sent"], sent)
        yield family
    misses = CounterMetricFamily(f"{prefix}_misses", "Entries that didn't come, by reason", labels=["reason"])
    for reason in MISSES:
        misses.add_metric([reason], traffic.misses[reason])
    yield misses


def without_numbers(reason: str) -> str:
    return re.sub(r"\d+(\.\d+)?", "N", reason)
