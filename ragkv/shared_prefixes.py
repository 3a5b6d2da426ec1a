"""Brings what a prompt begins with from the bucket, where another machine has put it, before vLLM looks for it."""

import asyncio
import time
from functools import partial

from ragkv.controller.cost_model import Profile, longest_wait_s
from ragkv.engine.engine import Engine
from ragkv.engine.prefixes import Prefixes
from ragkv.routing import Request
from ragkv.store.prefixes import generation
from ragkv.store.record import ChunkKey
from ragkv.store.tier import RemoteTier
from ragkv.workspace import Workspace


class SharedPrefixes:
    """The exact prefixes behind a store of them.

    tier: of that store. fingerprint: of the model.
    """

    def __init__(self, tier: RemoteTier, fingerprint: str) -> None:
        self._tier, self._fingerprint = tier, fingerprint

    @classmethod
    def of(cls, workspace: Workspace) -> "SharedPrefixes | None":
        """Return those of a home; None if its machine shares none."""
        tier = workspace.tier and workspace.tier.derived
        if tier is None or not workspace.config.store.shares_prefixes:
            return None
        return cls(tier, workspace.owner.fingerprint)

    async def fetch(self, request: Request, engine: Engine, profile: Profile | None, waited_s: float) -> float:
        """Bring the longest prefix of a request that the bucket has, as far as it isn't stored; wait for it as for
        chunks' KV (`longest_wait_s`). Returns the seconds that it took.

        What has come is found on the disk; what comes later is there for the next request. waited_s: how long the
        request has waited for the bucket already.
        """
        begun_at, begun_in, num_tokens = time.monotonic(), request.prefix.generation, len(request.prompt.token_ids)
        if begun_in is None or engine.unsupported is not None:  # it loads none, or vLLM keeps none
            return 0.0
        missing = await asyncio.to_thread(self._missing, request, engine)
        if missing:
            longest_s = longest_wait_s(profile, num_tokens, sum(missing.values())) - waited_s
            is_wanted = lambda: generation(self._tier.store.path) == begun_in  # noqa: E731
            await self._tier.fetch(missing, max(0.0, longest_s), is_wanted)
        return time.monotonic() - begun_at

    def _missing(self, request: Request, engine: Engine) -> dict[ChunkKey, int]:
        """Return the segments of the longest prefix, stored or in the bucket, that aren't stored, and their tokens."""
        store, token_ids = self._tier.store, request.prompt.token_ids
        known = Prefixes(
            lambda key: store.contains(key) or self._tier.is_listed(key),
            partial(generation, store.path),
            self._fingerprint,
            engine.kv_heads,
            engine.block_size,
        )
        spans = known.find(engine.block_hashes(token_ids, request.salt), 0, len(token_ids) - 1)
        sizes = {known.key(span): span.end - span.start for span in spans}
        return {key: num_tokens for key, num_tokens in sizes.items() if not store.contains(key)}
