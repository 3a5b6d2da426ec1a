"""A prompt that is given to another server: what is waited for, and what ends the wait."""

import asyncio
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from ragkv import shared_prefixes
from ragkv.config import Config
from ragkv.engine.prefixes import EXACT
from ragkv.shared_prefixes import SharedPrefixes
from ragkv.store.disk_store import DiskStore
from ragkv.store.prefixes import clear_prefixes, generation
from ragkv.store.record import ChunkKey, LayerKV

BLOCK, FINGERPRINT = 128, "f" * 32


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "prefixes"


@pytest.fixture
def shared(tmp_path, folder):
    home = SimpleNamespace(prefixes=folder)
    owner = SimpleNamespace(fingerprint=FINGERPRINT)
    return SharedPrefixes(SimpleNamespace(config=Config(home=tmp_path), home=home, tier=None, owner=owner))


def hash_of(block):
    return f"{block:032x}"


def give(shared, folder, num_tokens, since=None):
    hashes = [bytes.fromhex(hash_of(i)) for i in range(num_tokens // BLOCK)]
    engine = SimpleNamespace(
        unsupported=None, kv_heads=(0, 1), block_size=BLOCK, block_hashes=lambda token_ids, salt: hashes
    )
    prefix = SimpleNamespace(generation=generation(folder) if since is None else since)
    request = SimpleNamespace(prompt=SimpleNamespace(token_ids=[0] * num_tokens), salt="a", prefix=prefix)
    return asyncio.run(shared.give(request, engine))


def put(folder, *blocks):
    """Store segments by their last blocks."""
    store, kv = DiskStore(folder), LayerKV(torch.zeros(1, 1, 8), torch.zeros(1, 1, 8), 0)
    store.put([(ChunkKey(hash_of(block), EXACT, FINGERPRINT, (0, 1)), [kv]) for block in blocks])
    store.close()


@pytest.mark.parametrize(("num_tokens", "last_blocks"), [(600, (1, 3)), (512, (1, 3)), (650, (1, 3, 4)), (200, ())])
def test_it_ends_once_all_full_blocks_are_stored(shared, folder, num_tokens, last_blocks):
    before = time.monotonic()
    later = threading.Timer(0.3, put, (folder, *last_blocks))
    put(folder, *last_blocks[:1])
    later.start()
    assert give(shared, folder, num_tokens)
    assert (time.monotonic() - before > 0.25) == (len(last_blocks) > 1)
    later.join()


def test_it_doesnt_wait_without_end(shared, folder, monkeypatch):
    monkeypatch.setattr(shared_prefixes, "_LONGEST_S", 0.1)
    put(folder, 1)
    assert not give(shared, folder, 600)


def test_a_deletion_ends_it(shared, folder):
    put(folder, 1)
    since = generation(folder)
    clear_prefixes(folder)
    before = time.monotonic()
    assert not give(shared, folder, 600, since)
    assert time.monotonic() - before < 2
