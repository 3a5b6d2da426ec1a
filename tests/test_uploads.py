"""Uploads without a server: what is withdrawn stays withdrawn, whenever it happens."""

import asyncio

from ragkv.errors import BusyError
from ragkv.ingestion import IngestReport
from ragkv.uploads import Uploads


def test_a_document_withdrawn_between_two_tries_stays_away(tmp_path, monkeypatch):
    """Also if the next try has read it before its text is gone from the disk."""
    monkeypatch.setattr("ragkv.uploads.BUSY_S", 0.01)
    tries = []

    async def ingest(documents, progress, hint, is_withdrawn):
        tries.append([document.id for document in documents if not is_withdrawn(document.id)])
        if len(tries) == 1:
            (upload,) = uploads.all()
            upload.withdrawn.add("a.txt")  # as `withdraw` does first
            raise BusyError("another process")
        return IngestReport()

    async def run():
        uploads.start()
        files = [(tmp_path / name, name) for name in ("a.txt", "b.txt")]
        for file, name in files:
            file.write_text(name)
        upload = await uploads.add(files)
        for _ in range(500):
            if upload.status == "done":
                break
            await asyncio.sleep(0.01)
        await uploads.close()

    uploads = Uploads(tmp_path / "uploads", ingest)
    asyncio.run(run())
    assert tries == [["a.txt", "b.txt"], ["b.txt"]]
