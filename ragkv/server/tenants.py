"""The tenants of a server: each has a pipeline, uploads and limits of its own. Endpoints depend on `CurrentTenant`."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from fastapi import Depends, Request
from limits import RateLimitItemPerMinute
from limits.storage import MemoryStorage
from limits.strategies import SlidingWindowCounterRateLimiter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ragkv.answer import Answer, AnswerEvent, AnswerOptions, Conversation, Delta, Reasoning
from ragkv.background import RESTORE_EVENTS
from ragkv.config import MAIN, Config, TenantConfig
from ragkv.errors import DeadlineError, OverloadedError, StoreError
from ragkv.index.uploads import Uploads
from ragkv.server.metrics import Metrics, remote_metrics, without_numbers
from ragkv.server.telemetry import trace_answer
from ragkv.server.wire import STATUSES

if TYPE_CHECKING:
    from ragkv.pipeline import Pipeline

logger = logging.getLogger(__name__)

_BUSY_S = 1.0  # a guess of when a request will have finished
_GAUGES = {
    "entries": "Entries on disk: a chunk has one for each context it is precomputed in",
    "evicted_entries": "Entries that were evicted from disk and not stored again",
    "disk_bytes": "Size of KV on disk",
    "pinned_bytes": "Size of KV that is never evicted; what was cleared counts, since it comes back pinned",
    "memory_chunks": "Chunks whose KV is in memory",
    "prefix_bytes": "Size of exact prefixes on disk",
    "waiting_uploads": "Uploads that aren't indexed yet",
}


class _Concurrency:
    """The number of requests in progress, of all tenants together, and its limit."""

    def __init__(self, limit: int) -> None:
        self.limit, self.in_progress = limit, 0


class Limits:
    """The limits of one tenant. Lives in one event loop. max_text_bytes: how large the text of all documents may be."""

    def __init__(self, config: TenantConfig, concurrency: _Concurrency) -> None:
        self._config, self._concurrency, self._in_progress = config, concurrency, 0
        self.max_text_bytes = None if config.documents_mib is None else round(config.documents_mib * (1 << 20))
        self._limiter = SlidingWindowCounterRateLimiter(MemoryStorage())
        requests, tokens = config.requests_per_minute, config.tokens_per_minute
        self._requests = RateLimitItemPerMinute(requests) if requests else None
        self._tokens = RateLimitItemPerMinute(tokens) if tokens else None

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count one request as in progress. Raises OverloadedError if too many are, or if the tenant's minute is used
        up."""
        concurrency, limit = self._concurrency, self._config.concurrent_requests
        if limit is not None and self._in_progress >= limit:
            raise OverloadedError(f"{limit} requests of yours are in progress; send fewer at a time", _BUSY_S)
        if concurrency.in_progress >= concurrency.limit:
            raise OverloadedError(f"{concurrency.limit} requests are in progress; try again", _BUSY_S)
        if self._tokens is not None and not self._limiter.test(self._tokens):
            raise self._used_up(self._tokens, "tokens")
        if self._requests is not None and not self._limiter.hit(self._requests):
            raise self._used_up(self._requests, "requests")
        concurrency.in_progress += 1
        self._in_progress += 1
        try:
            yield
        finally:
            concurrency.in_progress -= 1
            self._in_progress -= 1

    def spent(self, num_tokens: int) -> None:
        """Count the tokens of a prompt and its answer. Known only afterwards, they may exceed the limit once."""
        if self._tokens is not None and num_tokens:
            room = self._limiter.get_window_stats(self._tokens).remaining
            self._limiter.hit(self._tokens, cost=max(1, min(num_tokens, room)))

    def _used_up(self, limit: RateLimitItemPerMinute, what: str) -> OverloadedError:
        wait_s = max(1.0, self._limiter.get_window_stats(limit).reset_time - time.time())
        return OverloadedError(f"you may ask for {limit.amount} {what} a minute; try again in {wait_s:.0f} s", wait_s)


class Tenant:
    """A tenant's pipeline, uploads and limits. Its answers are counted, timed, and ended after `timeout_s`."""

    def __init__(
        self,
        pipeline: "Pipeline",
        uploads: Path,
        limits: Limits,
        metrics: Metrics,
        all_done: Callable[[], Awaitable[None]],
    ) -> None:
        self.pipeline, self.limits, self._metrics = pipeline, limits, metrics
        self.uploads = Uploads(uploads, pipeline.indexer.ingest_documents, all_done)
        metrics.budget.labels(pipeline.tenant).set(pipeline.defaults.budget)
        pipeline.canary.on_drift = lambda d: metrics.drifted(pipeline.tenant, d, pipeline.defaults.budget)

    async def answer(self, asked: str | Conversation, options: AnswerOptions) -> AsyncGenerator[AnswerEvent, None]:
        """Answer as the pipeline does. Raises OverloadedError at a limit, and DeadlineError after `timeout_s`."""
        metrics, tenant, outcome = self._metrics, self.pipeline.tenant, "refused"
        begin, begin_ns, last = time.perf_counter(), time.time_ns(), None
        try:
            with self.limits.request(), metrics.in_progress.track_inprogress():
                outcome = "cancelled"  # unless it ends otherwise
                async with aclosing(_until(self.pipeline.answer(asked, options), options.timeout_s)) as events:
                    async for event in events:
                        now = time.perf_counter()
                        if isinstance(event, Delta | Reasoning):
                            if last is not None:
                                metrics.between.observe(now - last)
                            last = now
                        elif isinstance(event, Answer):
                            outcome = "answered"
                            metrics.answered(event)
                            metrics.total.observe(now - begin)
                            trace_answer(event, begin_ns, tenant)
                            self.limits.spent(event.usage.prompt_tokens + event.usage.completion_tokens)
                        yield event
        except Exception as error:
            outcome = "refused" if isinstance(error, tuple(STATUSES)) else "failed"
            raise
        finally:
            metrics.requests.labels(outcome, tenant).inc()


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


class Tenants(Collector):
    """All tenants by name, `MAIN` among them. Lives in one event loop."""

    def __init__(self, config: Config, pipelines: Mapping[str, "Pipeline"], uploads: Mapping[str, Path]) -> None:
        """uploads: by tenant, the folder where uploads are kept until they are indexed."""
        self.config, concurrency = config, _Concurrency(config.server.max_requests)
        self.metrics = Metrics(self)
        self.metrics.ready.set_function(lambda: self.main.pipeline.is_ready)
        self._tenants = {
            name: Tenant(
                pipeline,
                uploads[name],
                Limits(config.tenants.get(name, TenantConfig()), concurrency),
                self.metrics,
                self._tidy,
            )
            for name, pipeline in pipelines.items()
        }

    @property
    def main(self) -> Tenant:
        return self._tenants[MAIN]

    def __getitem__(self, name: str) -> Tenant:
        return self._tenants[name]

    def start(self) -> None:
        """Continue with uploads that an earlier process has left."""
        for tenant in self._tenants.values():
            tenant.uploads.start()

    async def _tidy(self) -> None:
        """Delete KV that nobody is to use, once no upload of any tenant is to be continued."""
        if not sum(tenant.uploads.num_waiting for tenant in self._tenants.values()):
            try:
                await self.main.pipeline.indexer.delete_orphans()
            except StoreError as error:  # the next upload tries again
                logger.warning("KV that no document has is not deleted: %s", error)

    async def close(self) -> None:
        """Stop indexing uploads; the pipelines stay open."""
        for tenant in self._tenants.values():
            await tenant.uploads.close()

    def collect(self) -> Iterable[Metric]:
        """Yield the counters of the engine, which all share, plus those of each pipeline; and the store's gauges."""
        counts: Counter[str] = Counter()
        for event, count in self.main.pipeline.counters.items():
            counts[without_numbers(event)] += count
        for name, tenant in self._tenants.items():
            if name != MAIN:
                counts.update({event: tenant.pipeline.counters[event] for event in RESTORE_EVENTS})
        text = "How often KV wasn't reused, by reason, and chunks precomputed again"
        family = CounterMetricFamily("ragkv_kv_events", text, labels=["event"])
        for event, count in counts.items():
            family.add_metric([event], count)
        yield family
        if (tier := self.main.pipeline.remote) is not None:
            yield from remote_metrics(tier)
        try:
            gauges = self.main.pipeline.gauges
        except StoreError as error:  # the other metrics are reported all the same
            logger.warning("the store isn't counted: %s", error)
            return
        waiting = sum(tenant.uploads.num_waiting for tenant in self._tenants.values())
        for name, value in {**gauges, "waiting_uploads": waiting}.items():
            yield GaugeMetricFamily(f"ragkv_store_{name}", _GAUGES[name], value)


async def _tenants(request: Request) -> Tenants:
    tenants: Tenants = request.app.state.tenants
    return tenants


AllTenants = Annotated[Tenants, Depends(_tenants)]


async def _tenant(request: Request, tenants: AllTenants) -> Tenant:
    return tenants[request.scope["tenant"]]  # as the gate found out


CurrentTenant = Annotated[Tenant, Depends(_tenant)]
