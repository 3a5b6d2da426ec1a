"""What a tenant may ask for, and how much the server takes on at all: beyond it a request is refused at once."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from limits import RateLimitItemPerMinute
from limits.storage import MemoryStorage
from limits.strategies import SlidingWindowCounterRateLimiter

from ragkv.config import TenantConfig
from ragkv.errors import OverloadedError

_BUSY_S = 1.0  # until a place is free, as a guess


class Concurrency:
    """Requests that may be worked on at a time, of all tenants: the rest would only wait."""

    def __init__(self, count: int) -> None:
        self.count, self.taken = count, 0


class Limits:
    """One tenant's. Lives in one event loop."""

    def __init__(self, config: TenantConfig, places: Concurrency) -> None:
        self._config, self._places, self._taken = config, places, 0
        self._limiter = SlidingWindowCounterRateLimiter(MemoryStorage())
        requests, tokens = config.requests_per_minute, config.tokens_per_minute
        self._requests = RateLimitItemPerMinute(requests) if requests else None
        self._tokens = RateLimitItemPerMinute(tokens) if tokens else None

    @property
    def max_text_bytes(self) -> int | None:
        """What the text of all documents may have together."""
        size = self._config.documents_mib
        return None if size is None else round(size * (1 << 20))

    @contextmanager
    def request(self) -> Iterator[None]:
        """Hold a place for one request. Raises OverloadedError if there is none, or if the tenant has used up what it
        may in a minute."""
        places, most = self._places, self._config.concurrent_requests
        if most is not None and self._taken >= most:
            raise OverloadedError(f"{most} requests of yours are being worked on; send fewer at a time", _BUSY_S)
        if places.taken >= places.count:
            raise OverloadedError(f"{places.count} requests are being worked on; try again", _BUSY_S)
        if self._tokens is not None and not self._limiter.test(self._tokens):
            raise self._used_up(self._tokens, "tokens")
        if self._requests is not None and not self._limiter.hit(self._requests):
            raise self._used_up(self._requests, "requests")
        places.taken += 1
        self._taken += 1
        try:
            yield
        finally:
            places.taken -= 1
            self._taken -= 1

    def spent(self, num_tokens: int) -> None:
        """Of a prompt and its answer: known only afterwards, so that the last request may go beyond the limit."""
        if self._tokens is not None and num_tokens:
            room = self._limiter.get_window_stats(self._tokens).remaining
            self._limiter.hit(self._tokens, cost=max(1, min(num_tokens, room)))

    def _used_up(self, limit: RateLimitItemPerMinute, what: str) -> OverloadedError:
        wait_s = max(1.0, self._limiter.get_window_stats(limit).reset_time - time.time())
        return OverloadedError(f"you may ask for {limit.amount} {what} a minute; try again in {wait_s:.0f} s", wait_s)
