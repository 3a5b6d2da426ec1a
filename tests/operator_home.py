"""A home with documents of two tenants and their KV, for tests of what operators do. No model."""

from contextlib import closing

import numpy as np
import torch

from ragkv.engine.task import ROOT_HASH
from ragkv.home import ANCHOR_SETTING, NUM_CONTEXTS_SETTING, Home, Owner
from ragkv.retriever.chunking import ChunkText
from ragkv.retriever.hashing import CONTEXTS, chunk_hash, mean_hash
from ragkv.store.entries import entry_bytes
from ragkv.store.record import ChunkKey, LayerKV

MODEL, OTHER_MODEL = "a" * 32, "b" * 32
ANCHOR = chunk_hash([1, 2, 3])
AVERAGE = mean_hash(ANCHOR, CONTEXTS, 2)
LAYERS = [LayerKV(torch.randn(2, 100, 8), torch.randn(2, 100, 8), base_position=3)] * 2
ENTRY_BYTES = entry_bytes([128 + 2 * 2 * 100 * 8 * 4] * 2)
DOCUMENTS = {
    "main": {
        "/papers/bees.md": ["wax", "shared"],
        "/papers/tea.md": ["flush", "shared"],
        "all.jsonl#1": ["one"],
        "all.jsonl#2": ["two"],
    },
    "acme": {"x.md": ["wax", "honey"]},
}


def chunk_of(text):
    return ChunkText(text, tuple(text.encode()))


def hash_of(text, tenant="main"):
    return chunk_hash(chunk_of(text).token_ids, "" if tenant == "main" else tenant)


def key_of(text, tenant="main", anchor=ANCHOR, model=MODEL):
    return ChunkKey(hash_of(text, tenant), anchor, model, heads=(0, 2))


ANCHOR_KEY = ChunkKey(ANCHOR, ROOT_HASH, MODEL, heads=(0, 2))


def make_home(path):
    """Return the home: each chunk has an entry, `wax` of main two, and one of another model."""
    home = Home(path)
    with closing(home.open_store()) as store:
        store.put([(ANCHOR_KEY, LAYERS)])
        store.hint([ANCHOR], "pin")
        for tenant, documents in DOCUMENTS.items():
            with home.open_catalog(tenant) as catalog:
                home.claim(catalog, Owner("tiny in float32", MODEL, "words"))
                catalog.put_setting(NUM_CONTEXTS_SETTING, "2")
                catalog.put_setting(ANCHOR_SETTING, ANCHOR)
                for name, texts in documents.items():
                    vectors = np.ones((len(texts), 4), np.float32)
                    catalog.put_document(name, name, "digest", [chunk_of(text) for text in texts], vectors)
                    store.put([(key_of(text, tenant), LAYERS) for text in texts])
        store.put([(key_of("wax", anchor=AVERAGE), LAYERS), (key_of("wax", model=OTHER_MODEL), LAYERS)])
    return home
