"""Limits of a tenant and of the whole server: requests beyond them are refused at once."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from limits import RateLimitItemPerMinute
from limits.storage import MemoryStorage
from limits.strategies import SlidingWindowCounterRateLimiter

from ragkv.config import TenantConfig
from ragkv.errors import OverloadedError

_BUSY_S = 1.0  # a guess of when a request will have finished


class Concurrency:
    """The number of requests in progress, of all tenants together, and its limit."""

    def __init__(self, limit: int) -> None:
        self.limit, self.in_progress = limit, 0


class Limits:
    """The limits of one tenant. Lives in one event loop."""

    def __init__(self, config: TenantConfig, concurrency: Concurrency) -> None:
        self._config, self._concurrency, self._in_progress = config, concurrency, 0
        self._limiter = SlidingWindowCounterRateLimiter(MemoryStorage())
        requests, tokens = config.requests_per_minute, config.tokens_per_minute
        self._requests = RateLimitItemPerMinute(requests) if requests else None
        self._tokens = RateLimitItemPerMinute(tokens) if tokens else None

    @property
    def max_text_bytes(self) -> int | None:
        """How large the text of all documents may be."""
        size = self._config.documents_mib
        return None if size is None else round(size * (1 << 20))

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
