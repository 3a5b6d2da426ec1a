"""Restoring KV: chunks whose KV is missing are precomputed again while no request is being answered."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable

from ragkv.background.idle import Idle, stop
from ragkv.errors import RagKVError

logger = logging.getLogger(__name__)

RESTORE_EVENTS = ("restored_chunks", "failed_restores")  # names of what is counted
PAUSE_S = 60.0  # after a failure: the disk may be full


class KVRestorer:
    """The queue of one pipeline, in its event loop.

    precompute: makes the KV of one chunk, by hash, and returns whether it did.
    """

    def __init__(self, precompute: Callable[[str], Awaitable[bool]], idle: Idle) -> None:
        self._precompute, self._idle = precompute, idle
        self._missing: dict[str, None] = {}
        self._paused_until = 0.0
        self._task: asyncio.Task[None] | None = None
        self.num_restored = self.num_failed = 0

    def add(self, chunk_hashes: Iterable[str]) -> None:
        if time.monotonic() < self._paused_until:
            return
        self._missing.update(dict.fromkeys(chunk_hashes))
        if self._missing and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while self._missing:
            await self._idle.wait()
            chunk_hash = next(iter(self._missing))
            del self._missing[chunk_hash]
            try:
                self.num_restored += await self._precompute(chunk_hash)
            except Exception as error:  # whatever it is, answering continues
                details = None if isinstance(error, RagKVError) else error
                logger.warning("missing KV isn't precomputed again for %d s: %s", PAUSE_S, error, exc_info=details)
                self.num_failed += 1
                self._missing.clear()
                self._paused_until = time.monotonic() + PAUSE_S

    async def close(self) -> None:
        await stop(self._task)
