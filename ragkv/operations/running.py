"""What operators do with the KV of a running server, in its worker's memory too. Answers go first."""

import asyncio
import functools
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ragkv.background import SOON_S
from ragkv.engine.engine import Engine
from ragkv.errors import ConfigError, EngineStoppedError
from ragkv.operations import changes, health, lookup
from ragkv.operations.changes import Clearing, Demotion, Pinning, Recoding, Warming
from ragkv.operations.health import Health
from ragkv.operations.lookup import DocumentKV, Held
from ragkv.operations.selection import Chosen, Selection, choose
from ragkv.store.control import codec_named
from ragkv.store.record import ChunkKey

if TYPE_CHECKING:
    from ragkv.workspace import Workspace

logger = logging.getLogger(__name__)

_PIECE_BYTES = 16 << 20  # that the worker reads at a time, some milliseconds, while requests wait
_HEALTH_S = 10.0  # beyond which the store counts as hanging


class RunningStore:
    """An open workspace's store. Lives in its event loop. Raises what `ragkv.operations.selection.choose` raises, and
    StoreError for a store that can't be read or written."""

    def __init__(self, workspace: "Workspace") -> None:
        self._workspace, self._home, self._store = workspace, workspace.home, workspace.store
        self._disk_bytes = workspace.config.store.disk_bytes
        self._memory_bytes: int = workspace.config.store.worker_options()["memory_bytes"]
        self._examining: asyncio.Future[Health] | None = None

    async def lookup(self, selection: Selection, after: str, limit: int) -> tuple[list[DocumentKV], str | None]:
        """Return a page of the documents of a selection, and the `after` of the next one, None on the last."""
        held = await self._held()

        def look() -> list[DocumentKV]:
            found: list[DocumentKV] = []
            for page in lookup.pages(self._home, self._store, selection, lambda: held, after, limit + 1):
                found += page
                if len(found) > limit:
                    break
            return found

        found = await asyncio.to_thread(look)
        last = found[limit - 1] if len(found) > limit else None
        return found[:limit], f"{last.tenant}:{last.name}" if last else None

    async def pin(self, selection: Selection) -> Pinning:
        """Pin documents' KV. Raises ConfigError if the budget can't hold all that is pinned."""
        return await asyncio.to_thread(changes.pin, self._store, await self._choose(selection), self._disk_bytes)

    async def unpin(self, selection: Selection) -> Pinning:
        return await asyncio.to_thread(changes.unpin, self._store, await self._choose(selection), self._disk_bytes)

    async def warm(self, selection: Selection) -> Warming:
        """Bring documents' KV into the worker's memory, the most used first, a few entries at a time between answers.

        What is worth least gives way, but nothing that is pinned. Raises EngineStoppedError if there is no worker, and
        ConfigError if it has no memory for KV.
        """
        engine, chosen = self._engine(), await self._choose(selection)
        if engine.unsupported is not None or not self._memory_bytes:
            why = engine.unsupported or "store.memory_gib is 0; the tier 'page_cache' can be warmed"
            raise ConfigError(f"no KV is kept in memory: {why}")
        keys = await asyncio.to_thread(self._store.control.keys_of, chosen.chunk_hashes)
        sizes = await asyncio.to_thread(self._store.admin.sizes, keys)
        held = await engine.held()
        warmed = [key for key in keys if key in held]
        room = self._memory_bytes - sum(held[key] for key in warmed)
        for piece in _pieces({key: size for key, size in sizes.items() if key not in held}, room):
            await asyncio.to_thread(lambda: [self._store.control.warm(key) for key in piece])  # noqa: B023
            await self._workspace.idle.wait(time.monotonic() + SOON_S)
            await engine.hold(piece, warmed)
            warmed += piece
        held = await engine.held()
        there = [key for key in keys if key in held]
        return changes.warming("memory", chosen, sizes, there)

    async def warm_page_cache(self, selection: Selection) -> Warming:
        """Bring documents' KV into the system's page cache."""
        return await asyncio.to_thread(changes.warm, self._store, await self._choose(selection))

    async def demote(self, selection: Selection) -> Demotion:
        """Drop documents' KV from the worker's memory and from the page cache."""
        chosen = await self._choose(selection)
        memory_bytes = await self._release(await asyncio.to_thread(self._store.control.keys_of, chosen.chunk_hashes))
        demotion = await asyncio.to_thread(changes.demote, self._store, chosen)
        return replace(demotion, memory_bytes=memory_bytes)

    async def recode(self, selection: Selection | None, codec: str, timeout_s: float) -> Recoding:
        """Encode the KV of documents anew, or all of it, an entry at a time between answers, until the time is up.

        Raises ConfigError for a codec that it can't be encoded with.
        """
        done, target, end = Recoding(codec), codec_named(codec), time.monotonic() + timeout_s
        chosen = None if selection is None else await self._choose(selection)
        keys = await asyncio.to_thread(changes.keys_to_recode, self._store, chosen)
        pair_of = await asyncio.to_thread(changes.pairs, self._home, self._workspace.config.store)
        for i, key in enumerate(keys):
            await self._workspace.idle.wait(time.monotonic() + SOON_S)
            if time.monotonic() >= end:
                done.num_left = len(keys) - i
                break
            done.add(key, await asyncio.to_thread(changes.recode_one, self._store, key, pair_of(key), target))
        return done

    async def clear(self, selection: Selection | None, *, dry_run: bool, local: bool) -> Clearing:
        """Delete the KV of documents, or of all the store. The documents stay indexed. local: not in the bucket."""
        tier = None if local else self._workspace.tier
        chosen = await self._choose(selection or Selection())
        clear = changes.clear_all if selection is None else changes.clear
        keys = await asyncio.to_thread(self._store.control.keys_of, chosen.chunk_hashes)
        clearing = await asyncio.to_thread(lambda: clear(self._store, tier, chosen, dry_run=dry_run))
        if not dry_run:
            await self._release([key for key in keys if not self._store.contains(key)])
        return clearing

    async def clear_model(self, model: str, *, dry_run: bool, local: bool) -> Clearing:
        """Delete the KV of other models than the home's. Errors as of `changes.clear_model`. local: as of `clear`."""
        tier = None if local else self._workspace.tier
        clear = functools.partial(changes.clear_model, self._home, self._store, tier, model, dry_run=dry_run)
        return await asyncio.to_thread(clear)

    async def health(self) -> Health:
        """Examine the store. One that doesn't answer in ten seconds isn't well; only one examination runs at a time."""
        engine = self._workspace.engine
        damaged = engine.counters["corrupt_chunks"] if engine else None
        if self._examining is None or self._examining.done():
            examine = asyncio.to_thread(health.examine, self._home, self._store, self._disk_bytes, damaged)
            self._examining = asyncio.ensure_future(examine)
        await asyncio.wait([self._examining], timeout=_HEALTH_S)
        if self._examining.done():
            return self._examining.result()
        problem = f"the store didn't answer in {_HEALTH_S:g} s: a slow disk, or another process that writes"
        return await asyncio.to_thread(health.unusable, self._home, self._disk_bytes, problem, damaged)

    async def _choose(self, selection: Selection) -> Chosen:
        return await asyncio.to_thread(choose, self._home, selection)

    def _engine(self) -> Engine:
        engine = self._workspace.engine
        if engine is None or not engine.is_ready:
            raise EngineStoppedError("vLLM isn't running, and KV is in its worker's memory; ask again in a minute")
        return engine

    async def _held(self) -> Held | None:
        """Return what the worker has in memory, None if there is no worker."""
        try:
            return await self._engine().held()
        except EngineStoppedError:
            return None

    async def _release(self, keys: Sequence[ChunkKey]) -> int | None:
        try:
            engine = self._engine()
            released = await engine.release(keys)
            await engine.held()
        except EngineStoppedError:
            return None
        return released


def _pieces(sizes: dict[ChunkKey, int], limit: int) -> Iterator[list[ChunkKey]]:
    """Yield the keys in pieces of about `_PIECE_BYTES`; leaves out those that would make it more than `limit` bytes."""
    piece: list[ChunkKey] = []
    piece_bytes = 0
    for key, size in sizes.items():
        if size > limit:
            continue
        limit -= size
        piece.append(key)
        piece_bytes += size
        if piece_bytes >= _PIECE_BYTES:
            yield piece
            piece, piece_bytes = [], 0
    if piece:
        yield piece
