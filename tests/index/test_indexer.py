"""The indexer without vLLM: what is precomputed, entered, reported and deleted."""

import asyncio
from types import SimpleNamespace

import numpy as np
import openpyxl
import pytest
import torch

from ragkv.background import Idle, Turns
from ragkv.config import MAIN, Config, RetrievalConfig
from ragkv.errors import DocumentError
from ragkv.home import Home, Owner
from ragkv.index import ingest
from ragkv.index.indexer import Indexer
from ragkv.retriever.chunking import ChunkText
from ragkv.retriever.documents import Document
from ragkv.retriever.hashing import chunk_hash
from ragkv.retriever.index import VectorIndex
from ragkv.store.record import ChunkKey, LayerKV
from ragkv.workspace import Corpus


class Words:
    """A chunk for each word."""

    def split(self, document):
        for word in document.text.split():
            yield ChunkText(word, tuple(map(ord, word)))


class OneCorpus(SimpleNamespace):
    """A workspace of one corpus."""

    tier = None

    @property
    def drafted(self):
        return self.corpus.drafted

    async def fetch(self, keys):
        return 0


class KV:
    """Precomputes nothing, in two contexts, and keeps what it was given."""

    num_contexts = 2

    def __init__(self):
        self.chunks, self.contexts = {}, {}

    anchor_span = None

    def span(self, chunk_hash, num_tokens):
        return chunk_hash, num_tokens

    def keys(self, chunk_hash):
        return [chunk_hash]

    def key(self, span):
        return span

    async def precompute_anchor(self, engine, store):
        pass

    async def precompute_alone(self, engine, store, chunks, done):
        self.chunks |= chunks
        for each in chunks:
            done(each, 1)
        return len(chunks)

    async def precompute_means(self, engine, store, chunks, contexts, done):
        self.contexts |= contexts
        for each in chunks:
            done(each, 1)


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
        corpus = Corpus(home, MAIN, RetrievalConfig())
        corpus.catalog, corpus.index = catalog, VectorIndex(catalog)
        idle = Idle(60)
        workspace = OneCorpus(
            corpus=corpus,
            idle=idle,
            config=Config(home=home.path, index={"num_contexts": 2}),
            home=home,
            owner=Owner("model", "f" * 32, "embedder"),
            main=corpus,
            anchor_hash="a" * 32,
            alone_hashes={"a" * 32},
            store=store,
            fuses=True,
            chunker=Words(),
            turns=Turns(idle),
            start=start,
            chunk_kv=lambda engine: kv,
            embedder=SimpleNamespace(embed=lambda texts: np.eye(16, dtype=np.float32)[[len(text) for text in texts]]),
        )
        yield Indexer(workspace, corpus)
    store.close()


def index(indexer, paths, is_withdrawn=lambda id: False, hint=None, **options):
    """Ingest as the pipeline does. Returns the report and the progress of prefill."""
    steps = []

    async def run():
        scan = await indexer.scan_files(paths, steps.append, **options)
        scan.is_withdrawn = is_withdrawn
        async for _ in indexer.precompute(scan):
            pass
        await indexer.finish(scan, hint)
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
    assert [done for done, _, _ in steps] == sorted(done for done, _, _ in steps)
    assert {item for _, _, item in steps} == {"a.txt", "b.txt", ""} and steps[-1] == (10, 10, "")
    assert all(done <= total <= 11 for done, total, _ in steps)  # an estimate until all is cut
    assert (report.documents_new, report.chunks_prefilled, report.rejected) == (2, 4, [])


def test_what_is_withdrawn_meanwhile_is_not_entered(tmp_path, indexer, kv):
    (tmp_path / "a.txt").write_text("one three")
    (tmp_path / "b.txt").write_text("one seven")
    report, _ = index(
        indexer, [tmp_path / "a.txt", tmp_path / "b.txt"], lambda id: id.endswith("b.txt") and kv.contexts
    )
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


def test_more_pins_than_the_budget_holds_are_refused_and_the_documents_are_indexed(tmp_path, indexer):
    layers = [LayerKV(torch.zeros(1, 4, 8), torch.zeros(1, 4, 8), base_position=0)]
    store, keys = indexer._workspace.store, [ChunkKey(hash_of(word), "a" * 32, "f" * 32, (0, 1)) for word in "ab"]
    store.put([(key, layers) for key in keys])
    size = store.entries.size(keys[0])
    indexer._workspace.config = Config(store={"disk_gib": 1.5 * size / (1 << 30)}, index={"num_contexts": 2})
    for word in "ab":
        (tmp_path / f"{word}.txt").write_text(word)
    assert index(indexer, [tmp_path / "a.txt"], hint="pin")[0].hint_refused is None
    report = index(indexer, [tmp_path / "b.txt"], hint="pin")[0]
    assert "would be pinned with these" in report.hint_refused and "store.disk_gib is" in report.hint_refused
    assert store.control.hints(map(hash_of, "ab")) == {hash_of("a"): "pin", hash_of("b"): None}
    assert len(indexer.document_chunks(str(tmp_path / "b.txt"))) == 1
    assert index(indexer, [tmp_path / "b.txt"], hint="session")[0].hint_refused is None


def test_a_file_that_ends_its_reader_is_rejected_and_the_others_are_indexed(tmp_path, indexer):
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "a.txt").write_text("one")
    (folder / "c.jsonl").write_text('{"id": null, "text": "two"}\n{"text": ""}\n')
    index(indexer, [folder])
    book = openpyxl.Workbook()
    book.active["A1"] = book.active["XFD1048576"] = 1  # all between them takes more memory than there is
    book.save(folder / "b.xlsx")
    report = index(indexer, [folder])[0]
    assert (report.documents_new, report.documents_removed) == (0, 0)
    bomb, record = report.rejected
    assert "b.xlsx" in bomb and "takes more" in bomb and "line 2" in record


def test_a_name_in_two_unicode_forms_is_one_document(tmp_path, indexer):
    nfd, nfc = "re\u0301sume\u0301.txt", "r\u00e9sum\u00e9.txt"
    folder = tmp_path / "cafe\u0301"
    folder.mkdir()
    (folder / nfd).write_text("one")
    index(indexer, [folder])
    (folder / nfd).rename(folder / nfc)
    report = index(indexer, [folder])[0]
    assert (report.documents_new, report.documents_removed) == (0, 0)
    (folder / nfd).write_text("another")
    report = index(indexer, [folder])[0]
    assert report.documents_new == 0 and "another Unicode form" in report.rejected[0]
    (folder / nfd).unlink()
    (folder / nfc).unlink()
    assert index(indexer, [folder], allow_empty=True)[0].documents_removed == 1


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


def words(name, *texts):
    return [Document(f"{name}{i}", f"{name}{i}", text, False) for i, text in enumerate(texts)]


async def finished(turns):
    """Take all turns."""
    async for _ in turns:
        pass


NEVER = lambda id: False  # noqa: E731
LARGE = " ".join(f"w{i:03}"[: 3 + i % 9] + "x" * (i % 11) for i in range(300))


@pytest.fixture
def slow(kv, monkeypatch):
    """Each chunk takes a hundredth of a second, a turn a twentieth."""
    monkeypatch.setattr(ingest, "_TURN_S", 0.05)
    monkeypatch.setattr(ingest, "_STEP_S", 0.02)
    alone = kv.precompute_alone

    async def precompute_alone(engine, store, chunks, done):
        await asyncio.sleep(0.01 * len(chunks))
        return await alone(engine, store, chunks, done)

    monkeypatch.setattr(kv, "precompute_alone", precompute_alone)


def test_a_small_document_is_done_while_a_large_one_is_indexed(indexer, slow):
    async def run():
        ended = []

        async def ingest_one(name, text):
            await finished(indexer.ingest_documents(words(name, text), lambda step: None, None, NEVER))
            ended.append(name)

        await asyncio.gather(ingest_one("large", LARGE), ingest_one("small", "one two"))
        return ended

    assert asyncio.run(run()) == ["small", "large"]
    assert len(indexer.document_chunks("large0")) == 300


@pytest.fixture
def answering(indexer, monkeypatch):
    monkeypatch.setattr("ragkv.background.IDLE_S", 0.02)
    monkeypatch.setattr(ingest, "SOON_S", 0.05)
    monkeypatch.setattr(ingest, "SMALL_CHARS", 100)
    return indexer._workspace.idle.answering


def test_an_answer_breaks_indexing_off_and_afterwards_it_goes_on(indexer, answering, kv, monkeypatch):
    alone, tries, steps = kv.precompute_alone, [], []

    async def precompute_alone(engine, store, chunks, done):
        tries.append(len(chunks))
        if len(tries) == 1:
            done(next(iter(chunks)), 1)
            await asyncio.Event().wait()  # until it is broken off
        return await alone(engine, store, chunks, done)

    monkeypatch.setattr(kv, "precompute_alone", precompute_alone)

    async def run():
        indexing = asyncio.create_task(
            finished(indexer.ingest_documents(words("large", LARGE), steps.append, None, NEVER))
        )
        while not tries:
            await asyncio.sleep(0.01)
        with answering():
            await asyncio.sleep(0.2)
            assert tries == [4]
        await asyncio.wait_for(indexing, 60)

    asyncio.run(run())
    assert tries[1] == 4 and len(indexer.document_chunks("large0")) == 300
    assert (steps[-1].done, steps[-1].total) == (600, 600)


def test_beside_answers_without_a_pause_a_chunk_is_precomputed_once_in_a_while(indexer, slow, answering, kv):
    indexer._workspace.idle.patience_s = 0.2

    async def run():
        with answering():
            turns = indexer.ingest_documents(words("large", LARGE), lambda step: None, None, NEVER)
            for i in range(3):
                assert len(kv.chunks) == i
                await anext(turns)
            await turns.aclose()

    asyncio.run(run())


def test_a_small_document_waits_for_no_pause_but_its_means_do(indexer, slow, answering, kv):
    postponed = []
    indexer._postpone = postponed.extend

    async def run(name):
        await finished(indexer.ingest_documents(words(name, f"one two {name}"), lambda step: None, None, NEVER))

    async def beside_an_answer():
        with answering():
            await asyncio.wait_for(run("a"), 10)

    asyncio.run(beside_an_answer())
    assert len(indexer.document_chunks("a0")) == 3 and not kv.contexts
    assert set(postponed) == set(kv.chunks)
    asyncio.run(asyncio.wait_for(run("b"), 10))
    assert len(indexer.document_chunks("b0")) == 3 and len(kv.contexts) == 3 and len(postponed) == 3


def test_kv_of_a_document_in_work_is_kept_whatever_others_delete(indexer, slow, kv):
    """They share a chunk, which only the large one needs once the small one is deleted."""
    deleted = []
    indexer._workspace.store.delete = deleted.extend

    async def run():
        turns = indexer.ingest_documents(words("large", f"one {LARGE}"), lambda step: None, None, NEVER)
        await anext(turns)
        assert hash_of("one") in kv.chunks and not indexer.document_chunks("large0")
        await finished(indexer.ingest_documents(words("small", "one two"), lambda step: None, None, NEVER))
        await indexer.delete(["small0"])
        await finished(turns)

    asyncio.run(run())
    assert deleted == [hash_of("two")]


def test_deleting_a_document_in_work_leaves_nothing_of_it(indexer, slow, kv):
    deleted = []
    indexer._workspace.store.delete = deleted.extend

    async def run():
        turns = indexer.ingest_documents(words("large", LARGE, "one"), lambda step: None, None, NEVER)
        await anext(turns)
        cut = set(kv.chunks)
        await indexer.delete(["large0"])
        assert set(deleted) == cut and cut
        await finished(turns)
        assert set(kv.chunks) - cut <= {hash_of("one")}

    asyncio.run(run())
    assert indexer.document_chunks("large0") == [] and len(indexer.document_chunks("large1")) == 1


def test_an_ingest_that_ends_early_leaves_no_drafts(indexer, slow):
    async def run():
        turns = indexer.ingest_documents(words("large", LARGE), lambda step: None, None, NEVER)
        await anext(turns)
        assert indexer._corpus.drafts
        await turns.aclose()

    asyncio.run(run())
    assert not indexer._corpus.drafts
    with indexer._workspace.home.indexing():
        pass


def test_kv_of_a_document_in_work_is_no_orphan(indexer, slow, kv):
    deleted = []
    store = indexer._workspace.store
    store.delete, store.chunk_hashes = deleted.extend, lambda evicted: {"f" * 32, *kv.chunks}

    async def run():
        turns = indexer.ingest_documents(words("large", LARGE), lambda step: None, None, NEVER)
        await anext(turns)
        assert kv.chunks and await indexer.delete_orphans() == 1
        await turns.aclose()

    asyncio.run(run())
    assert deleted == ["f" * 32]


def test_orphans_of_an_interrupted_run_are_deleted(indexer):
    deleted = []
    store = indexer._workspace.store
    store.delete, store.chunk_hashes = deleted.extend, lambda evicted: {"f" * 32, "a" * 32, hash_of("one")}

    async def run():
        await finished(indexer.ingest_documents(words("small", "one"), lambda step: None, None, NEVER))
        return await indexer.delete_orphans()

    assert asyncio.run(run()) == 1 and deleted == ["f" * 32]  # neither the anchor nor what a document has
