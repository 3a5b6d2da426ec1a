"""Uploaded documents on their way into the index: kept on disk until they are in it.

`add` returns once the upload is on disk, as text: from then on it is indexed also if the process is killed meanwhile.
Uploads take turns, the smallest's and the oldest's in alternation: a small one needn't wait for large ones to be
finished, and none waits forever. Small ones have turns besides the others, which answers may keep waiting.
Files are read by a process of their own (`ragkv.retriever.parse`).
"""

import asyncio
import json
import logging
import secrets
import shutil
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ragkv.background import stop
from ragkv.errors import BusyError, DocumentError, OverloadedError, QuotaError, RagKVError
from ragkv.files import atomic_write, sync_folder
from ragkv.index.work import SMALL_CHARS, IngestProgress, IngestReport
from ragkv.retriever import parse
from ragkv.retriever.documents import Document, source_file
from ragkv.store.eviction import Hint

logger = logging.getLogger(__name__)

MAX_WAITING = 100  # uploads
BUSY_S, PAUSE_S = 2.0, 60.0  # until an upload is tried again: the home is busy; the disk is full, say
_READ_S = 150  # what reading an upload may take: more than the CPU time that it gets
_READERS = 2
_REASONS_OF_REFUSAL, _REASONS_OF_UPLOAD = 10, 100  # of the records that can't be read, how many are told
_NUM_FINISHED, _NUM_FINISHED_FILES = 1000, 10_000  # uploads that are remembered, and their files
_DOCUMENTS, _UPLOAD, _UNFINISHED = "documents.jsonl", "upload.json", ".new"

Status = Literal["waiting", "running", "done", "failed"]
Turns = AsyncGenerator[IngestReport | None, None]  # None between two turns, the report at the end
Ingest = Callable[  # as `Indexer.ingest_documents`
    [Iterator[Document], Callable[[IngestProgress], None], Hint | None, Callable[[str], bool]], Turns
]


@dataclass
class Upload:
    """Files that were uploaded together.

    names: of the files. created: seconds since 1970. rejected: why some of their records are left out. error: why it
    waits or failed. withdrawn: ids of its documents that are not to be indexed any more. size_bytes: of its text.
    retry_at: when it may be tried again, by `time.monotonic`.
    """

    id: str
    names: list[str]
    hint: Hint | None
    created: float
    status: Status = "waiting"
    progress: IngestProgress | None = None
    report: IngestReport | None = None
    rejected: list[str] = field(default_factory=list)
    error: str | None = None
    withdrawn: set[str] = field(default_factory=set)
    size_bytes: int = 0
    retry_at: float = 0.0


class Uploads:
    """The uploads of one corpus, kept in `folder`. Lives in one event loop, from `start` to `close`.

    all_done: called whenever no upload waits any more.
    """

    def __init__(self, folder: Path, ingest: Ingest, all_done: Callable[[], Awaitable[None]] | None = None) -> None:
        self._folder, self._ingest, self._all_done = folder, ingest, all_done
        self._uploads: dict[str, Upload] = {}
        self._running: dict[str, Turns] = {}  # by the upload's id
        self._arrived = asyncio.Event()
        self._reading = asyncio.Semaphore(_READERS)
        self._withdrawing = threading.Lock()
        self._num_reading = 0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Index what an earlier process left, and then what is added."""
        for path in sorted(self._folder.glob("*")):
            if path.suffix == _UNFINISHED:
                shutil.rmtree(path, ignore_errors=True)
                continue
            try:
                upload = Upload(path.name, **json.loads((path / _UPLOAD).read_text()))
                upload.size_bytes = (path / _DOCUMENTS).stat().st_size
                self._uploads[path.name] = upload
            except (OSError, ValueError, TypeError) as error:
                logger.warning("%s is no upload (%s), and is left as it is; move it somewhere else", path, error)
        self._arrived.set()
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        await stop(self._task)
        for turns in self._running.values():
            await turns.aclose()

    def all(self) -> list[Upload]:
        """Return the uploads, newest first."""
        return list(reversed(self._uploads.values()))

    def get(self, id: str) -> Upload | None:
        return self._uploads.get(id)

    @property
    def num_waiting(self) -> int:
        return sum(upload.status != "done" for upload in self._uploads.values())

    async def add(self, files: Sequence[tuple[Path, str]], hint: Hint | None = None, room: int | None = None) -> Upload:
        """Take files, each with its document's name, and return once they are on disk, as text.

        room: bytes of text that all waiting uploads may have together. Takes all of the files or none, but for bad
        records of JSONL files: raises DocumentError if nothing in a file can be read, QuotaError if there is no room
        for them, and OverloadedError if too many uploads are waiting.
        """
        async with self._admitted():
            id = f"{time.time_ns():x}{secrets.token_hex(4)}"
            upload = Upload(id, [name for _, name in files], hint, time.time())
            folder = self._folder / f"{id}{_UNFINISHED}"
            try:
                folder.mkdir(parents=True)
                upload.rejected = await _read(folder / _DOCUMENTS, files)
                self._check_room(room)
                with atomic_write(folder / _UPLOAD) as file:
                    fields = {"names": upload.names, "hint": hint, "created": upload.created}
                    fields["rejected"] = upload.rejected
                    file.write(json.dumps(fields).encode())
                folder.rename(self._folder / id)
                sync_folder(self._folder)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
        upload.size_bytes = (self._folder / id / _DOCUMENTS).stat().st_size
        self._uploads[id] = upload
        await asyncio.to_thread(self._replace, upload)
        self._arrived.set()
        return upload

    def _replace(self, upload: Upload) -> None:
        """Withdraw what earlier uploads have of the same files: it might be indexed after this one."""
        earlier = list(self._uploads.values())
        earlier = earlier[: earlier.index(upload)]
        for name in upload.names:
            if affected := [each for each in earlier if name in each.names]:
                self.withdraw(name, affected)

    def withdraw(self, name: str, uploads: Iterable[Upload] | None = None) -> set[str]:
        """Withdraw documents that aren't indexed yet, by id or all of a file, and return their ids. Thread-safe."""
        withdrawn: set[str] = set()
        with self._withdrawing:  # two at a time would write back what the other takes out
            for upload in list(self._uploads.values() if uploads is None else uploads):
                if upload.status == "done":
                    continue
                path = self._folder / upload.id / _DOCUMENTS
                with suppress(FileNotFoundError):  # it is done by now
                    documents = list(parse.read_documents(path))
                    meant = {each.id for each in documents if name in (each.id, source_file(each.id))}
                    if meant:
                        upload.withdrawn |= meant
                        withdrawn |= meant
                        parse.write_documents(path, (each for each in documents if each.id not in meant))
        return withdrawn

    def _check_room(self, room: int | None) -> None:
        if room is None:
            return
        waiting = sum(file.stat().st_size for file in self._folder.glob(f"*/{_DOCUMENTS}"))
        if waiting > room:
            raise QuotaError(
                f"there is room for {max(0, room)} bytes of text more, this is {waiting}; delete documents"
            )

    @asynccontextmanager
    async def _admitted(self) -> AsyncIterator[None]:
        if self.num_waiting + self._num_reading >= MAX_WAITING:
            raise OverloadedError(f"{MAX_WAITING} uploads are waiting; try again when some of them are indexed", BUSY_S)
        self._num_reading += 1
        try:
            async with self._reading:
                yield
        finally:
            self._num_reading -= 1

    async def _run(self) -> None:
        for upload in list(self._uploads.values()):  # the process may have been killed before this was done
            await asyncio.to_thread(self._replace, upload)
        async with asyncio.TaskGroup() as group:
            for small in (True, False):
                group.create_task(self._take_turns(small))

    async def _take_turns(self, small: bool) -> None:
        """Index the uploads that are small, or the others."""
        last: Upload | None = None
        while True:
            last = await self._next(last, small)
            await self._take_turn(last)
            if self._all_done is not None and not self.num_waiting:
                await self._all_done()

    async def _next(self, last: Upload | None, small: bool) -> Upload:
        """Return the upload whose turn it is after that of `last`, as soon as there is one."""
        while True:
            now = time.monotonic()
            unfinished = [
                upload
                for upload in self._uploads.values()
                if upload.status in ("waiting", "running") and (upload.size_bytes <= SMALL_CHARS) == small
            ]
            if ready := [upload for upload in unfinished if upload.retry_at <= now]:
                oldest = min(ready, key=lambda upload: upload.created)
                return min(ready, key=lambda upload: upload.size_bytes) if last in (None, oldest) else oldest
            self._arrived.clear()
            pause_s = min((upload.retry_at - now for upload in unfinished), default=None)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._arrived.wait(), pause_s)

    async def _take_turn(self, upload: Upload) -> None:
        """Index a part of an upload."""
        try:
            if upload.id not in self._running:
                upload.status, upload.progress = "running", None
                self._running[upload.id] = self._begin(upload)
            upload.report = await anext(self._running[upload.id])
            if upload.report is None:
                return
            upload.status, upload.error = "done", None
        except RagKVError as error:
            upload.status, upload.error = "waiting", str(error)
            upload.retry_at = time.monotonic() + (BUSY_S if isinstance(error, BusyError) else PAUSE_S)
        except Exception:  # a bug of ours with one upload must not keep the others waiting
            logger.exception("the upload %s isn't indexed; the next start of the server tries again", upload.id)
            upload.status, upload.error = "failed", "something went wrong; see the server's log"
        await self._running.pop(upload.id).aclose()
        if upload.status == "done":
            await asyncio.to_thread(self._remove, self._folder / upload.id)
            self._forget_oldest()

    def _begin(self, upload: Upload) -> Turns:
        def progress(step: IngestProgress) -> None:
            upload.progress = step

        documents = parse.read_documents(self._folder / upload.id / _DOCUMENTS)
        return self._ingest(documents, progress, upload.hint, lambda id: id in upload.withdrawn)

    @staticmethod
    def _remove(folder: Path) -> None:
        with suppress(OSError):  # what can't be removed is indexed again by the next process, which costs nothing
            leftover = folder.rename(folder.with_suffix(_UNFINISHED))  # so that no half of it is found then
            shutil.rmtree(leftover, ignore_errors=True)

    def _forget_oldest(self) -> None:
        num_uploads = num_files = 0
        for upload in [each for each in self.all() if each.status == "done"]:
            num_uploads, num_files = num_uploads + 1, num_files + len(upload.names)
            if num_uploads > _NUM_FINISHED or num_files > _NUM_FINISHED_FILES:
                del self._uploads[upload.id]


async def _read(out: Path, files: Sequence[tuple[Path, str]]) -> list[str]:
    """Write the files' documents, and return why records of them are left out."""
    reader = parse.Reader()
    try:
        return await asyncio.wait_for(asyncio.to_thread(_write, reader, out, files), _READ_S)
    except TimeoutError:
        raise DocumentError(f"it takes longer than {_READ_S} s to read; convert it to plain text") from None
    finally:
        reader.stop()


def _write(reader: parse.Reader, out: Path, files: Sequence[tuple[Path, str]]) -> list[str]:
    rejected: list[str] = []

    def documents() -> Iterator[Document]:
        for file, name in files:
            num_documents, reasons = 0, []
            for document in reader.read(file, name):
                if isinstance(document, Document):
                    num_documents += 1
                    yield document
                else:
                    reasons.append(str(document))
            if not num_documents:
                raise DocumentError("; ".join(_first(reasons, _REASONS_OF_REFUSAL)))
            rejected.extend(reasons)

    with reader:
        parse.write_documents(out, documents())
    return _first(rejected, _REASONS_OF_UPLOAD)


def _first(reasons: list[str], most: int) -> list[str]:
    return reasons[:most] + [f"and {len(reasons) - most} more"] * (len(reasons) > most)
