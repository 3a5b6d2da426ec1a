"""Exact prefixes between processes: what a prompt begins with is brought from the bucket before vLLM looks for it, and
one server's prompt is stored before another one answers by it."""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from ragkv.controller.cost_model import GIVEN_SHARE, WAIT_SHARE, Profile, longest_wait_s
from ragkv.engine.engine import Engine
from ragkv.engine.prefixes import Beginnings, Prefixes
from ragkv.routing import Request
from ragkv.store.entries import EntryFolder
from ragkv.store.prefixes import generation
from ragkv.store.record import FORMAT_VERSION, ChunkKey
from ragkv.workspace import Workspace

logger = logging.getLogger(__name__)

_POLL_S, _LONGEST_S = 0.01, 5.0  # until a prompt's KV is written


class SharedPrefixes:
    """The exact prefixes of a home, which other processes have too, and those of its bucket, if it shares them."""

    def __init__(self, workspace: Workspace) -> None:
        config, self._folder = workspace.config.store, workspace.home.prefixes
        self._tier = workspace.tier.derived if workspace.tier is not None and config.shares_prefixes else None
        self._fingerprint = workspace.owner.fingerprint

    async def fetch(
        self,
        request: Request,
        engine: Engine,
        profile: Profile | None,
        waited_s: float,
        late: ExitStack,
        *,
        is_there: bool,
    ) -> float:
        """Bring the longest prefix of a request that the bucket has, as far as it isn't stored; wait for it as for
        chunks' KV (`longest_wait_s`). Returns the seconds that it took.

        What has come is found on the disk. waited_s: how long the request has waited for the bucket already. late: is
        closed once the request has its first token; then the rest is brought, for the next one. is_there: another
        machine has just made all of it for this request and sent it, which the bucket's list may not tell yet; it is
        waited for longer.
        """
        begun_at, begun_in, num_tokens = time.monotonic(), request.prefix.generation, len(request.prompt.token_ids)
        if self._tier is None or begun_in is None or engine.unsupported is not None:  # it loads none
            return 0.0
        tier, store = self._tier, self._tier.store

        def may_have(key: ChunkKey) -> bool:
            return is_there or store.contains(key) or tier.is_listed(key)

        sizes = await asyncio.to_thread(self._longest, request, engine, may_have)
        missing = {key: size for key, size in sizes.items() if not store.contains(key)}
        if missing:
            share = GIVEN_SHARE if is_there else WAIT_SHARE
            longest_s = longest_wait_s(profile, num_tokens, sum(missing.values()), share) - waited_s
            is_wanted = lambda: generation(store.path) == begun_in  # noqa: E731
            if is_there:
                for key in missing:
                    tier.expect(key)
            late.callback(tier.begin, list(missing), is_wanted)
            await tier.fetch(missing, max(0.0, longest_s), is_wanted)
        return time.monotonic() - begun_at

    async def give(self, request: Request, engine: Engine) -> bool:
        """Wait until a request that has ended, and whose prompt is kept, is stored, and in the bucket if prefixes are
        shared there. Returns whether it is."""
        if engine.unsupported is not None or request.prefix.generation is None:
            return False
        keys = await asyncio.to_thread(self._kept, request, engine)
        end = time.monotonic() + _LONGEST_S
        while not all(map(EntryFolder(self._folder / f"v{FORMAT_VERSION}").contains, keys)):
            if time.monotonic() > end or generation(self._folder) != request.prefix.generation:
                logger.warning("a prompt of %d tokens isn't stored for others", len(request.prompt.token_ids))
                return False
            await asyncio.sleep(_POLL_S)
        return self._tier is None or not await asyncio.to_thread(self._tier.send)

    def _kept(self, request: Request, engine: Engine) -> list[ChunkKey]:
        """Return the segments of all full blocks of a request's prompt."""
        known, token_ids = self._known(engine, lambda key: False), request.prompt.token_ids
        return [known.key(span) for span in known.missing(_full_blocks(request, engine), len(token_ids))]

    def _longest(self, request: Request, engine: Engine, contains: Callable[[ChunkKey], bool]) -> dict[ChunkKey, int]:
        """Return the segments of a request's longest prefix of which `contains` is true, and their tokens."""
        known, token_ids = self._known(engine, contains), request.prompt.token_ids
        spans = known.find(_full_blocks(request, engine), 0, len(token_ids) - 1)
        return {known.key(span): span.end - span.start for span in spans}

    def _known(self, engine: Engine, contains: Callable[[ChunkKey], bool]) -> Prefixes:
        since = partial(generation, self._folder)
        return Prefixes(contains, since, self._fingerprint, engine.kv_heads, engine.block_size)


def _full_blocks(request: Request, engine: Engine) -> Beginnings:
    """Return the names of a prompt's beginnings without tails, which are too short to wait for."""
    return Beginnings(engine.block_hashes(request.prompt.token_ids, request.salt), (), engine.block_size)
