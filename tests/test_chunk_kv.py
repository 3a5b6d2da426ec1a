"""What an ingest does with KV that was imported before. No model runs."""

import asyncio
import io

import torch

from ragkv.chunk_kv import ChunkKV
from ragkv.store.disk_store import DiskStore
from ragkv.store.record import LayerKV
from ragkv.store.transfer import export_chunks, import_chunks, open_export

CHUNKS = {"a" * 32: [4, 5, 6], "b" * 32: [7, 8]}
MODEL, HEADS = f"{8:032x}", (0, 2)


class Recorder:
    """An engine that stores what it is asked to precompute, as the worker would, and counts."""

    max_model_len = 100

    def __init__(self, store, kv):
        self._store, self._kv, self.num_precomputed = store, kv, 0

    async def precompute(self, token_ids, task):
        self.num_precomputed += 1
        layers = [LayerKV(torch.ones(2, len(token_ids), 8), torch.ones(2, len(token_ids), 8), 0)] * 2
        self._store.put([(self._kv.key(task.span), layers)])


async def ingest(store, num_contexts):
    kv = ChunkKV([1, 2, 3], MODEL, HEADS, num_contexts)
    engine = Recorder(store, kv)
    await kv.precompute_anchor(engine, store)
    num_prefilled = await kv.precompute(engine, store, CHUNKS, {})
    return num_prefilled, engine.num_precomputed


def test_imported_kv_is_not_prefilled_again(tmp_path):
    source, target = DiskStore(tmp_path / "source"), DiskStore(tmp_path / "target")
    assert asyncio.run(ingest(source, num_contexts=2)) == (2, 5)  # the anchor; each chunk, and its average
    file = io.BytesIO()
    export_chunks(source, file)
    file.seek(0)
    import_chunks(open_export(file, "the file"), target)
    assert asyncio.run(ingest(target, num_contexts=2)) == (0, 0)
    assert asyncio.run(ingest(target, num_contexts=3)) == (0, 2)  # other averages
    source.close()
    target.close()
