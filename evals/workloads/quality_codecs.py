"""An example's KV in another codec, for `ragkv eval quality`: what is precomputed as `raw` is encoded anew."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import torch

from ragkv.chunk_kv import ChunkKV
from ragkv.engine.task import Span
from ragkv.store.codecs import CODECS, RAW
from ragkv.store.difference import differences
from ragkv.store.disk_store import DiskStore
from ragkv.store.record import ChunkKey, LayerKV

Entry = tuple[ChunkKey, list[LayerKV]]


@asynccontextmanager
async def encoded(
    store: DiskStore, two: ChunkKV, one: ChunkKV, spans: Sequence[Span], codec: str
) -> AsyncGenerator[None, None]:
    """Have the store keep these chunks, and the anchor, in a codec inside this, and as they were outside.

    two: of entries as `raw` keeps them, after the anchor alone and mean; one: of those that hold both, as the index
    makes them in this codec. spans: of the chunks, after the anchor alone.
    """
    alone, joined = await asyncio.to_thread(_read, store, two, one, spans, CODECS[codec].share)
    anchor, *chunks = alone
    try:
        await asyncio.to_thread(_put, store, codec, [anchor, *joined])
        store.delete_keys(key for key, _ in chunks)  # they would be preferred to what is joined
        yield
    finally:
        await asyncio.to_thread(_put, store, RAW.name, alone)
        store.delete_keys(key for key, _ in joined)


def _read(
    store: DiskStore, two: ChunkKV, one: ChunkKV, spans: Sequence[Span], share: float
) -> tuple[list[Entry], list[Entry]]:
    """Return the anchor and the chunks after it alone, and the chunks with both in one."""
    alone = [(key, _layers(store, key)) for key in map(two.key, (two.anchor_span, *spans))]
    joined = []
    for span, (_, layers) in zip(spans, alone[1:], strict=True):
        means = _layers(store, two.key(two.averaged(span)))
        changes = differences([(kv.k, kv.v) for kv in layers], [(kv.k.float(), kv.v.float()) for kv in means], share)
        both = [replace(kv, difference=change) for kv, change in zip(means, changes, strict=True)]
        joined.append((one.key(one.averaged(span)), both))
    return alone, joined


def _layers(store: DiskStore, key: ChunkKey) -> list[LayerKV]:
    layers: list[LayerKV] = []
    with store.snapshot() as snapshot:
        while (kv := snapshot.get(key, len(layers))) is not None:
            layers.append(kv.map(torch.clone))
    return layers


def _put(store: DiskStore, codec: str, entries: Sequence[Entry]) -> None:
    store.codec = CODECS[codec]
    try:
        store.put(entries)
    finally:
        store.codec = RAW
