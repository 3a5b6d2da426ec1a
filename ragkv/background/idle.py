"""Waiting until no request is being answered, and ending a task. Knows nothing about the work."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

IDLE_S = 0.5  # since the last answer


class Idle:
    """A count of the requests that one engine is answering; lives in its event loop."""

    def __init__(self) -> None:
        self._num_answering, self._quiet_since = 0, 0.0

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Count a request: the engine isn't idle within this context."""
        self._num_answering += 1
        try:
            yield
        finally:
            self._num_answering -= 1
            self._quiet_since = time.monotonic()

    async def wait(self) -> None:
        """Wait until no request has been answered for `IDLE_S`."""
        while (wait := IDLE_S if self._num_answering else self._quiet_since + IDLE_S - time.monotonic()) > 0:
            await asyncio.sleep(wait)


async def stop(task: "asyncio.Task[None] | None") -> None:
    """Cancel a task, if there is one, and wait until it has ended."""
    if task is not None:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
