"""The indexer without vLLM: what is precomputed, entered, reported and deleted."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from ragkv.config import Config
from ragkv.errors import DocumentError
from ragkv.home import Home, Owner
from ragkv.index.indexer import Indexer
from ragkv.retriever.chunking import ChunkText
from ragkv.retriever.hashing import chunk_hash
from ragkv.retriever.index import VectorIndex


class Words:
    """A chunk for each word."""

    def split(self, document):
        return [ChunkText(word, tuple(map(ord, word))) for word in document.text.split()]


class KV:
    """Precomputes nothing, in two contexts, and keeps what it was given."""

    num_contexts = 2

    def __init__(self):
        self.chunks, self.contexts = {}, {}

    def span(self, chunk_hash, num_tokens):
        return chunk_hash, num_tokens

    async def precompute_anchor(self, engine, store):
        pass

    async def precompute(self, engine, store, chunks, contexts, done):
        self.chunks, self.contexts = chunks, contexts
        for each in chunks:
            done(each, 2)
        return len(chunks)


async def start():
    return None


def hash_of(word):
    return chunk_hash(tuple(map(ord, word)))


@pytest.fixture
def kv():
    return KV()


@pytest.fixture
def indexer(tmp_path, kv):
    home = Home(tmp_path / "home")
    store = home.open_store()
    with home.open_catalog() as catalog:
        corpus = SimpleNamespace(catalog=catalog, index=VectorIndex(catalog))
        workspace = SimpleNamespace(
            config=Config(home=home.path, index={"num_contexts": 2}),
            home=home,
            owner=Owner("model", "f" * 32, "embedder"),
            main=corpus,
            anchor_hash="a" * 32,
            store=store,
            fuses=True,
            chunker=Words(),
            precomputing=asyncio.Lock(),
            start=start,
            chunk_kv=lambda engine: kv,
            embedder=SimpleNamespace(embed=lambda texts: np.eye(16, dtype=np.float32)[[len(text) for text in texts]]),
        )
        yield Indexer(workspace, corpus)
    store.close()


def index(indexer, paths, is_withdrawn=lambda id: False, **options):
    """Ingest as the pipeline does. Returns the report and the progress of prefill."""
    steps = []

    async def run():
        scan = await indexer.scan_files(paths, steps.append, **options)
        scan.is_withdrawn = is_withdrawn
        await indexer.precompute(scan)
        await indexer.finish(scan, None)
        return scan.report

    report = asyncio.run(run())
    return report, [(step.done, step.total, step.item) for step in steps if step.stage == "prefill"]


def test_chunks_are_precomputed_once_behind_their_nearest_and_others_and_progress_ends_at_the_total(
    tmp_path, indexer, kv
):
    (tmp_path / "a.txt").write_text("one three four")
    (tmp_path / "b.txt").write_text("one seven")
    report, steps = index(indexer, [tmp_path / "a.txt", tmp_path / "b.txt"])
    assert kv.chunks == {hash_of(word): tuple(map(ord, word)) for word in ("one", "three", "four", "seven")}
    (context,) = kv.contexts[hash_of("three")]  # its nearest among two others
    assert set(context) == {(hash_of("seven"), 5), (hash_of("one"), 3), (hash_of("four"), 4)}
    assert steps == [(2, 10, "b.txt"), (4, 10, "a.txt"), (6, 10, "a.txt"), (8, 10, "b.txt"), (10, 10, "")]
    assert (report.documents_new, report.chunks_prefilled, report.rejected) == (2, 4, [])


def test_what_is_withdrawn_meanwhile_is_not_entered(tmp_path, indexer):
    (tmp_path / "a.txt").write_text("one three")
    (tmp_path / "b.txt").write_text("one seven")
    report, _ = index(indexer, [tmp_path / "a.txt", tmp_path / "b.txt"], lambda id: id.endswith("b.txt"))
    assert [chunk.text for chunk, _ in indexer.document_chunks(str(tmp_path / "a.txt"))] == ["one", "three"]
    assert indexer.document_chunks(str(tmp_path / "b.txt")) == []
    assert report.chunks_deleted == 1  # "one" is also the other document's


def test_documents_whose_files_are_gone_are_removed(tmp_path, indexer):
    folder = tmp_path / "documents"
    folder.mkdir()
    (folder / "a.txt").write_text("one")
    (folder / "b.txt").write_text("two")
    index(indexer, [folder])
    (folder / "a.txt").unlink()
    report, _ = index(indexer, [folder])
    assert (report.documents_removed, indexer.document_chunks(str(folder / "a.txt"))) == (1, [])
    assert len(indexer.document_chunks(str(folder / "b.txt"))) == 1


@pytest.mark.parametrize("mount", [".", "nas", "nas/deep"])
def test_a_folder_that_is_empty_now_takes_no_document_away_unasked(tmp_path, indexer, mount):
    """As a disk that isn't mounted, at the folder itself or below it."""
    folder = tmp_path / "documents"
    (folder / mount).mkdir(parents=True)
    for name in ("a", "b", "c", "d"):
        (folder / mount / f"{name}.txt").write_text(name)
    if mount != ".":
        (folder / "e.txt").write_text("e")
    index(indexer, [folder])
    for name in ("a", "b", "c", "d"):
        (folder / mount / f"{name}.txt").unlink()
    message = rf"{folder / mount}' has no documents now; 4 were .* \(a\.txt, b\.txt, c\.txt, …\).*--allow-empty"
    with pytest.raises(DocumentError, match=message):
        index(indexer, [folder])
    assert len(indexer.document_chunks(str(folder / mount / "a.txt"))) == 1
    report, _ = index(indexer, [folder], allow_empty=True)
    assert report.documents_removed == 4


def test_a_folder_whose_last_documents_were_moved_or_deleted_with_it_is_no_surprise(tmp_path, indexer):
    folder = tmp_path / "documents"
    (folder / "old").mkdir(parents=True)
    (folder / "a.txt").write_text("a")
    (folder / "old" / "b.txt").write_text("b")
    index(indexer, [folder])
    (folder / "old" / "b.txt").unlink()
    (folder / "old").rmdir()
    assert index(indexer, [folder])[0].documents_removed == 1
