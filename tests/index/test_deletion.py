"""Documents and KV that leave a home: a real catalogue, store and vector index, without a model."""

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from ragkv.config import StoreConfig
from ragkv.engine.task import ROOT_HASH
from ragkv.errors import ConfigError, RemoteError, StoreError
from ragkv.home import ANCHOR_SETTING, NUM_CONTEXTS_SETTING, Home, Owner
from ragkv.index.deletion import NO_DOCUMENT, OTHER_CONTEXT, OTHER_MODEL, REPLACED, collect_garbage, delete_documents
from ragkv.retriever.chunking import ChunkText
from ragkv.retriever.hashing import CONTEXTS, chunk_hash, mean_hash
from ragkv.retriever.index import VectorIndex
from ragkv.store.record import ChunkKey, LayerKV
from ragkv.store.remote import Remote
from ragkv.store.tier import open_tier

ANCHOR, MODEL = chunk_hash([1, 2, 3]), f"{8:032x}"
AVERAGE, JOINED = (mean_hash(ANCHOR, CONTEXTS, 4, joins=joins) for joins in (False, True))
ENTRY_BYTES = 4096 + 2 * 16384


def make_chunk(text):
    return ChunkText(f"{text}\n\n", tuple(f"{text}\n\n".encode()))


def make_key(text, anchor=ANCHOR, model=MODEL):
    digest = ANCHOR if text is None else chunk_hash(make_chunk(text).token_ids)
    return ChunkKey(digest, ROOT_HASH if text is None else anchor, model, heads=(0, 2))


def make_layers(seed=0):
    generator = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(2, 100, 8, generator=generator) for _ in "kv")
    return [LayerKV(k, v, base_position=3)] * 2


@pytest.fixture
def folder(tmp_path):
    """Where the documents were: nothing here is read."""
    return tmp_path / "papers"


@pytest.fixture
def home(tmp_path, folder):
    home = Home(tmp_path / "home")
    documents = {
        "bees.md": ["wax", "shared"],
        "tea.md": ["flush", "shared"],
        "old/all.jsonl#1": ["one"],
        "old/all.jsonl#a#b": ["two"],
    }
    with home.open_catalog() as catalog, closing(home.open_store()) as store:
        home.claim(catalog, Owner("tiny in float32", MODEL, "words"))
        catalog.put_setting(NUM_CONTEXTS_SETTING, "4")
        catalog.put_setting(ANCHOR_SETTING, ANCHOR)
        store.put([(make_key(None), make_layers())])
        for name, texts in documents.items():
            vectors = np.random.default_rng(len(texts)).standard_normal((len(texts), 4)).astype(np.float32)
            catalog.put_document(str(folder / name), name, "digest", [make_chunk(text) for text in texts], vectors)
            for text in texts:
                store.put([(make_key(text), make_layers(1)), (make_key(text, AVERAGE), make_layers(2))])
    return home


def state_of(home):
    """Names of the documents, keys in the store, and how many chunks can be found."""
    with home.open_catalog() as catalog, closing(home.open_store()) as store:
        names = [document.title for document in catalog.documents()]
        assert store.admin.verify().problems == []
        index = VectorIndex(catalog)
        index.sync()
        return names, set(store.admin.sizes()), len(index)


def test_a_document_goes_with_all_that_is_its_own(home, folder, monkeypatch):
    _, before, _ = state_of(home)
    monkeypatch.chdir(folder.parent)
    deletion = delete_documents(home, ["papers/bees.md"])
    assert (deletion.documents, deletion.num_chunks, deletion.num_shared) == ([str(folder / "bees.md")], 1, 1)
    names, keys, num_vectors = state_of(home)
    assert names == ["old/all.jsonl#1", "old/all.jsonl#a#b", "tea.md"] and num_vectors == 4
    assert before - keys == {make_key("wax"), make_key("wax", AVERAGE)}
    assert deletion.size_bytes == 2 * ENTRY_BYTES


@pytest.mark.parametrize(
    ("name", "gone"),
    [
        ("old/all.jsonl#1", ["old/all.jsonl#1"]),
        ("old/all.jsonl#a#b", ["old/all.jsonl#a#b"]),
        ("old/all.jsonl", ["old/all.jsonl#1", "old/all.jsonl#a#b"]),
        ("old", ["old/all.jsonl#1", "old/all.jsonl#a#b"]),
        ("", ["bees.md", "old/all.jsonl#1", "old/all.jsonl#a#b", "tea.md"]),
    ],
)
def test_what_a_name_means(home, folder, name, gone):
    deletion = delete_documents(home, [str(folder / name)])
    assert deletion.documents == [str(folder / each) for each in gone]


def test_a_text_that_only_one_document_had_is_in_no_file_any_more(home, folder):
    def found():
        return [file.name for file in home.path.rglob("*") if file.is_file() and b"flush\n\n" in file.read_bytes()]

    assert found()
    with home.open_catalog():  # another process has it open: closing the last one would empty the log
        delete_documents(home, [str(folder / "tea.md")])
        assert not found()


@pytest.mark.parametrize("tenant", ["main", "acme"])
def test_the_index_file_of_an_earlier_release_goes(home, tenant):
    home.open_catalog(tenant).close()
    kept = sorted(home.path.rglob("*"))
    for name in ("index.faiss", "index.faiss.lock", "index.faiss.tmp"):
        (home.folder(tenant) / name).write_bytes(b"vectors of deleted documents")
    home.open_catalog(tenant).close()
    assert sorted(home.path.rglob("*")) == kept


@pytest.mark.parametrize("unknown", ["bee.md", "papers/bees", ""])
def test_an_unknown_name_deletes_nothing(home, folder, monkeypatch, unknown):
    before = state_of(home)
    monkeypatch.chdir(folder.parent)
    with pytest.raises(StoreError, match="nothing was deleted") as error:
        delete_documents(home, [str(folder / "tea.md"), unknown])
    assert f"no document {unknown!r} in {home.path}; the nearest by name: " in str(error.value)
    assert str(folder / "bees.md") in str(error.value)
    assert state_of(home) == before


def test_a_home_where_nothing_is_indexed(tmp_path):
    home = Home(tmp_path / "none")
    with pytest.raises(StoreError, match="nothing is indexed in .*; `ragkv index PATH`"):
        delete_documents(home, ["x.md"])
    with pytest.raises(StoreError, match="nothing was indexed in .*; `ragkv index PATH` first"):
        collect_garbage(home)
    assert not home.path.exists()


def test_each_tenant_has_what_is_its_own(home, folder):
    """The same text of two tenants is stored twice, and collecting garbage spares both."""
    chunk = make_chunk("wax")
    theirs = ChunkKey(chunk_hash(chunk.token_ids, "acme"), ANCHOR, MODEL, heads=(0, 2))
    with home.open_catalog("acme") as catalog, closing(home.open_store()) as store:
        home.claim(catalog, Owner("tiny in float32", MODEL, "words"))
        catalog.put_document("a.md", "a", "digest", [chunk], np.ones((1, 4), np.float32))
        assert [each.chunk_hash for each in catalog.document_chunks("a.md")] == [theirs.chunk_hash]
        store.put([(theirs, make_layers(3))])
    assert home.tenants() == ["main", "acme"] and theirs.chunk_hash != make_key("wax").chunk_hash
    assert sum(part.num_chunks for part in collect_garbage(home)) == 0
    delete_documents(home, [str(folder / "bees.md")])
    assert theirs in state_of(home)[1] and make_key("wax") not in state_of(home)[1]
    with pytest.raises(StoreError, match="no document 'a.md'"):
        delete_documents(home, ["a.md"])
    assert delete_documents(home, ["a.md"], "acme").documents == ["a.md"]
    assert theirs not in state_of(home)[1]
    for name in ("Acme", "../x", "", "a/b"):
        with pytest.raises(ConfigError, match="can't be a tenant's name"):
            delete_documents(home, ["a.md"], name)


def test_one_command_at_a_time_changes_a_home(home, folder):
    with Home(home.path).indexing():
        for change in (lambda: delete_documents(home, [str(folder)]), lambda: collect_garbage(home)):
            with pytest.raises(StoreError, match="is changing .*; wait until it has finished"):
                change()


GARBAGE = {
    NO_DOCUMENT: [make_key("lost"), make_key("lost", AVERAGE), make_key("lost too")],
    OTHER_MODEL: [make_key("wax", model=f"{9:032x}"), make_key(None, model=f"{9:032x}")],
    OTHER_CONTEXT: [make_key("wax", mean_hash(ANCHOR, CONTEXTS, 2)), make_key("wax", f"{5:032x}")],
}


def fill_with_garbage(home):
    with closing(home.open_store()) as store:
        store.put([(key, make_layers()) for keys in GARBAGE.values() for key in keys])


def test_garbage_goes_and_nothing_else(home):
    before = state_of(home)
    fill_with_garbage(home)
    full = state_of(home)
    expected = [
        (NO_DOCUMENT, 2, 3 * ENTRY_BYTES),
        (OTHER_MODEL, 2, 2 * ENTRY_BYTES),
        (OTHER_CONTEXT, 1, 2 * ENTRY_BYTES),
        (REPLACED, 0, 0),
    ]
    found = collect_garbage(home, dry_run=True)
    assert [(part.reason, part.num_chunks, part.size_bytes) for part in found] == expected
    assert state_of(home) == full
    assert collect_garbage(home) == found
    assert state_of(home) == before
    assert {part.num_chunks for part in collect_garbage(home)} == {0}


@pytest.mark.parametrize(
    ("codec", "stored", "garbage"),
    [
        ("int8", (ANCHOR, JOINED), {ANCHOR}),  # as a kill leaves it
        ("int8", (ANCHOR, AVERAGE, JOINED), {ANCHOR, AVERAGE}),  # the codec was raw
        ("int8", (ANCHOR, AVERAGE), set()),
        ("raw", (ANCHOR, AVERAGE, JOINED), {JOINED}),  # the codec was int8
        ("raw", (ANCHOR, JOINED), set()),
    ],
)
def test_what_another_entry_took_the_place_of_is_garbage(home, codec, stored, garbage):
    with closing(home.open_store()) as store:
        store.delete([make_key("wax").chunk_hash])
        store.put([(make_key("wax", anchor), make_layers()) for anchor in stored])
        collected = collect_garbage(home, StoreConfig(codec=codec))[-1]
        assert (collected.reason, collected.size_bytes) == (REPLACED, len(garbage) * ENTRY_BYTES)
        left = {key.anchor_hash for key in store.entries.keys_of(make_key("wax").chunk_hash)}
        assert left == set(stored) - garbage


def test_an_anchor_nobody_knows_keeps_its_kv(home):
    """A home that an earlier release indexed doesn't say what its anchor is."""
    before = state_of(home)
    fill_with_garbage(home)
    with home.open_catalog() as catalog:
        catalog.put_setting(ANCHOR_SETTING, "")
    collect_garbage(home)
    assert state_of(home)[1] == before[1] | set(GARBAGE[OTHER_CONTEXT])


def test_what_an_interrupted_deletion_leaves_is_garbage(home, folder):
    with home.open_catalog() as catalog:
        catalog.delete_document(str(folder / "bees.md"))
    orphans, *_ = collect_garbage(home)
    assert (orphans.reason, orphans.num_chunks) == (NO_DOCUMENT, 1)


def test_imported_before_anything_is_indexed_is_no_garbage(home):
    other = Home(Path(f"{home.path}-other"))
    with closing(other.open_store()) as store:
        store.put([(make_key("wax"), make_layers())])
    other.open_catalog().close()
    with pytest.raises(StoreError, match="nothing was indexed"):
        collect_garbage(other)
    with closing(other.open_store()) as store:
        assert store.contains(make_key("wax"))


def test_a_deletion_in_the_bucket_is_done_or_said_and_tried_again(home, folder, tmp_path, monkeypatch):
    (tmp_path / "bucket").mkdir()
    settings = StoreConfig(remote=(tmp_path / "bucket").as_uri())
    with closing(home.open_store()) as store, closing(open_tier(store, settings)) as tier:
        assert tier.send() == 0
    num_objects = len(list((tmp_path / "bucket").rglob("*.v5")))
    with pytest.raises(StoreError, match="is also in .*bucket, and store.remote is not set"):
        delete_documents(home, [str(folder / "bees.md")])
    assert "bees.md" in state_of(home)[0]

    def unreachable(self, chunk_hash):
        raise RemoteError("the bucket is away")

    with monkeypatch.context() as outage:
        outage.setattr(Remote, "delete_chunk", unreachable)
        deletion = delete_documents(home, [str(folder / "bees.md")], settings=settings)
    assert (deletion.num_chunks, deletion.num_unreached) == (1, 1)
    assert len(list((tmp_path / "bucket").rglob("*.v5"))) == num_objects
    deletion = delete_documents(home, [str(folder / "tea.md")], settings=settings)
    assert (deletion.num_chunks, deletion.num_unreached) == (2, 0)  # "shared" is nobody's now
    with closing(home.open_store()) as store, closing(open_tier(store, settings)) as tier:
        assert tier.num_pending_deletions == 1 and not tier.delete_pending()
        assert {key for key, _ in tier.remote.sizes()} == set(store.entries)
