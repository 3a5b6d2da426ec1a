"""Uploads without a server: what is withdrawn stays withdrawn, and many of them leave nothing behind."""

import asyncio
import json
import time
from contextlib import asynccontextmanager

import pytest

from ragkv.errors import BusyError, OverloadedError, StoreError
from ragkv.index import uploads as module
from ragkv.index.uploads import MAX_WAITING, Uploads
from ragkv.index.work import IngestReport
from ragkv.retriever import parse


async def ingest_at_once(documents, progress, hint, is_withdrawn):
    yield IngestReport()


async def ingest_never(documents, progress, hint, is_withdrawn):
    await asyncio.Event().wait()
    yield IngestReport()


@asynccontextmanager
async def opened(folder, ingest):
    uploads = Uploads(folder, ingest)
    uploads.start()
    yield uploads
    await uploads.close()


async def until_gone(uploads, folder):
    """Wait until all is indexed, and the text deleted, which comes after that."""
    await until(lambda: not uploads.num_waiting and not any(folder.iterdir()))


async def until(condition):
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.01)
    pytest.fail("it doesn't happen")


@pytest.fixture
def unread(monkeypatch):
    """No process reads the files: their names are their texts."""

    async def read(out, files):
        fields = [{"id": name, "title": name, "text": name, "markdown": False} for _, name in files]
        out.write_text("".join(f"{json.dumps(each)}\n" for each in fields))
        return []

    monkeypatch.setattr(module, "_read", read)


def files(*names):
    return [(None, name) for name in names]


def test_a_document_withdrawn_between_two_tries_stays_away(tmp_path, monkeypatch):
    """Also if the next try has read it before its text is gone from the disk."""
    monkeypatch.setattr("ragkv.index.uploads.BUSY_S", 0.01)
    tries = []

    async def ingest(documents, progress, hint, is_withdrawn):
        tries.append([document.id for document in documents if not is_withdrawn(document.id)])
        if len(tries) == 1:
            (upload,) = uploads.all()
            upload.withdrawn.add("a.txt")  # as `withdraw` does first
            raise BusyError("another process")
        yield IngestReport()

    async def run():
        uploads.start()
        files = [(tmp_path / name, name) for name in ("a.txt", "b.txt")]
        for file, name in files:
            file.write_text(name)
        upload = await uploads.add(files)
        await until(lambda: upload.status == "done")
        await uploads.close()

    uploads = Uploads(tmp_path / "uploads", ingest)
    asyncio.run(run())
    assert tries == [["a.txt", "b.txt"], ["b.txt"]]


def test_thousands_of_uploads_leave_nothing_but_the_newest(tmp_path, unread, monkeypatch):
    monkeypatch.setattr("os.fsync", lambda _: None)  # most of the time that this takes

    async def run():
        async with opened(tmp_path, ingest_at_once) as uploads:
            for i in range(2000):
                await uploads.add(files(f"{i}.txt"))
                await until(lambda: uploads.num_waiting < MAX_WAITING)
            newest = [[f"{i}.txt"] for i in range(1999, 999, -1)]
            await until(lambda: not uploads.num_waiting and [upload.names for upload in uploads.all()] == newest)
            assert list(tmp_path.iterdir()) == []

    asyncio.run(run())


def test_of_large_uploads_fewer_are_remembered(tmp_path, unread, monkeypatch):
    monkeypatch.setattr(module, "_NUM_FINISHED_FILES", 10)

    async def run():
        async with opened(tmp_path, ingest_at_once) as uploads:
            for i in range(10):
                await uploads.add(files(*(f"{i}-{j}.txt" for j in range(4))))
            await until(lambda: [upload.names[0] for upload in uploads.all()] == ["9-0.txt", "8-0.txt"])

    asyncio.run(run())


def test_while_nothing_is_indexed_only_so_many_wait(tmp_path, unread):
    async def run():
        async with opened(tmp_path, ingest_never) as uploads:
            refused = 0
            for i in range(3000):
                try:
                    await uploads.add(files(f"{i}.txt"))
                except OverloadedError:
                    refused += 1
            assert (len(uploads.all()), refused) == (MAX_WAITING, 3000 - MAX_WAITING)
        assert len(list(tmp_path.iterdir())) == MAX_WAITING
        async with opened(tmp_path, ingest_at_once) as uploads:
            await until_gone(uploads, tmp_path)

    asyncio.run(run())


def test_withdrawing_while_the_upload_becomes_done_and_others_come(tmp_path, unread, monkeypatch):
    rewrite, withdrawing = parse.write_documents, asyncio.Event()

    async def ingest(documents, progress, hint, is_withdrawn):
        await withdrawing.wait()
        yield IngestReport()

    async def run():
        loop = asyncio.get_running_loop()

        async def meanwhile():
            withdrawing.set()
            await uploads.add(files("b.txt"))
            await until(lambda: not uploads.num_waiting)

        def rewrite_later(path, documents):
            asyncio.run_coroutine_threadsafe(meanwhile(), loop).result(10)
            rewrite(path, documents)

        monkeypatch.setattr(parse, "write_documents", rewrite_later)
        async with opened(tmp_path, ingest) as uploads:
            await uploads.add(files("a.txt"))
            assert await asyncio.to_thread(uploads.withdraw, "a.txt") == {"a.txt"}
            await until_gone(uploads, tmp_path)

    asyncio.run(run())


def test_documents_that_are_withdrawn_at_a_time_are_all_gone(tmp_path, unread, monkeypatch):
    rewrite = parse.write_documents

    def rewrite_slowly(path, documents):
        time.sleep(0.1)
        rewrite(path, documents)

    monkeypatch.setattr(parse, "write_documents", rewrite_slowly)

    async def run():
        async with opened(tmp_path, ingest_never) as uploads:
            await uploads.add(files("a.txt", "b.txt", "c.txt"))
            await asyncio.gather(*(asyncio.to_thread(uploads.withdraw, name) for name in ("a.txt", "b.txt")))
        (left,) = tmp_path.glob("*/documents.jsonl")
        assert [document.id for document in parse.read_documents(left)] == ["c.txt"]

    asyncio.run(run())


def test_what_a_killed_process_had_begun_to_remove_is_no_obstacle(tmp_path, unread, monkeypatch):
    monkeypatch.setattr(module.shutil, "rmtree", lambda path, **_: (path / "upload.json").unlink(missing_ok=True))

    async def run(folder):
        async with opened(folder, ingest_at_once) as uploads:
            await uploads.add(files("a.txt"))
            await until(lambda: not uploads.num_waiting)

    asyncio.run(run(tmp_path))
    monkeypatch.undo()
    assert len(list(tmp_path.iterdir())) == 1

    async def restart():
        async with opened(tmp_path, ingest_at_once) as uploads:
            assert uploads.all() == []

    asyncio.run(restart())
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_upload_is_left_alone(tmp_path, unread, caplog):
    """As a file manager or a backup leaves them."""
    strays = {".DS_Store": "", "notes.txt": "mine", "copy/documents.jsonl": "", "old/upload.json": '{"other": 1}'}
    for name, content in strays.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)

    async def run():
        async with opened(tmp_path, ingest_at_once) as uploads:
            await uploads.add(files("a.txt"))
            await until(lambda: not uploads.num_waiting)
            assert [upload.names for upload in uploads.all()] == [["a.txt"]]

    asyncio.run(run())
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} == strays.keys()
    assert len(caplog.records) == 4


def test_small_uploads_go_first_and_old_ones_go_on(tmp_path, unread):
    turns = []

    async def ingest(documents, progress, hint, is_withdrawn):
        (document,) = documents
        for left in reversed(range(len(document.id) // 10)):
            turns.append(document.id[0])
            yield None if left else IngestReport()

    async def run():
        uploads = Uploads(tmp_path, ingest)
        for name in ("a" * 60, "b" * 50, "c" * 20):
            await uploads.add(files(name))
        uploads.start()
        await until(lambda: not uploads.num_waiting)
        await uploads.close()

    asyncio.run(run())
    assert "".join(turns) == "cacabababababb"[:13]


def test_a_small_upload_waits_for_no_turn_of_a_large_one(tmp_path, unread):
    async def ingest(documents, progress, hint, is_withdrawn):
        (document,) = documents
        if document.id == "a.txt":
            yield IngestReport()
        else:
            await asyncio.Event().wait()  # for a pause between answers

    async def run():
        async with opened(tmp_path, ingest) as uploads:
            large = await uploads.add(files("l" * module.SMALL_CHARS))
            await until(lambda: large.status == "running")
            small = await uploads.add(files("a.txt"))
            await until(lambda: small.status == "done")
            assert large.status == "running"

    asyncio.run(run())


def test_a_later_upload_of_a_file_wins_although_it_is_done_first(tmp_path, unread):
    """Also after a restart."""
    entered = []

    async def ingest(documents, progress, hint, is_withdrawn):
        documents = list(documents)
        for _ in range(len(documents)):
            yield None
        entered.extend((document.id, len(documents)) for document in documents if not is_withdrawn(document.id))
        yield IngestReport()

    async def run():
        async with opened(tmp_path, ingest_never) as uploads:
            await uploads.add(files("a.txt", "b.txt", "c.txt", "x.jsonl"))
            await uploads.add(files("a.txt"))
        async with opened(tmp_path, ingest) as uploads:
            await uploads.add(files("c.txt"))
            await until(lambda: not uploads.num_waiting)

    asyncio.run(run())
    assert sorted(entered) == [("a.txt", 1), ("b.txt", 2), ("c.txt", 1), ("x.jsonl", 2)]


def test_a_full_disk_for_one_upload_keeps_no_other_waiting(tmp_path, unread):
    async def ingest(documents, progress, hint, is_withdrawn):
        (document,) = documents
        if document.id == "a.txt":
            raise StoreError("no space")
        yield IngestReport()

    async def run():
        async with opened(tmp_path, ingest) as uploads:
            first, second = await uploads.add(files("a.txt")), await uploads.add(files("b.txt"))
            await until(lambda: second.status == "done")
            await until(lambda: first.status == "waiting" and first.error == "no space")

    asyncio.run(run())


def test_who_asked_is_told_when_no_upload_waits(tmp_path, unread):
    told = []

    async def all_done():
        told.append([path for path in tmp_path.iterdir() if path.is_dir()])

    async def run():
        uploads = Uploads(tmp_path, ingest_at_once, all_done)
        for name in ("a.txt", "b.txt"):
            await uploads.add(files(name))
        uploads.start()
        await until(lambda: told)
        await uploads.close()

    asyncio.run(run())
    assert told == [[]]
