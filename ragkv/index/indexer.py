"""From documents to stored KV.

document -load-> text -chunk-> Chunk -prefill-> ChunkKV -put-> store
"""

import asyncio
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from ragkv.chunk_kv import ChunkKV
from ragkv.engine.task import ROOT_HASH, Span
from ragkv.errors import DocumentError
from ragkv.home import ANCHOR_SETTING, NUM_CONTEXTS_SETTING
from ragkv.index.deletion import Deletion, delete_for_good
from ragkv.retriever.catalog import Chunk
from ragkv.retriever.chunking import ChunkText
from ragkv.retriever.documents import Document, find_files, load_file, source_file
from ragkv.retriever.encoders import Vectors
from ragkv.retriever.hashing import chunk_hash
from ragkv.retriever.index import contexts_of, nearest
from ragkv.store.eviction import Hint
from ragkv.workspace import Corpus, Workspace

_DOCUMENT_BATCH_CHUNKS = 64
_NUM_NAMED = 3  # of the documents that an error is about
_POOL = 64  # chunks of the index from which a batch's contexts are drawn, besides its own


@dataclass(frozen=True)
class IngestProgress:
    """How far a stage is: `done` of `total` items. "load" counts files; "prefill" counts (chunk, context) pairs.

    item: the file's name or the document's title; "" where it is none in particular.
    """

    stage: str
    done: int
    total: int
    item: str


ReportProgress = Callable[[IngestProgress], None]
Work = tuple[Document, list[ChunkText]]  # a document that is new or changed, or chunks of it have no KV


@dataclass
class IngestReport:
    """The result of an ingest. rejected: why documents are not indexed; what was indexed of them before is kept."""

    documents_new: int = 0
    documents_changed: int = 0
    documents_unchanged: int = 0
    documents_removed: int = 0
    chunks_prefilled: int = 0
    chunks_deleted: int = 0
    rejected: list[str] = field(default_factory=list)


@dataclass
class Scan:
    """What was read, what is left to do, and who is told of the progress.

    is_withdrawn: whether a document, by its id, is not to be indexed any more.
    files: paths of all files. rejected: paths of those with a rejected document. documents: ids of what was read.
    work: the documents to index. missing: ids of indexed documents whose files no longer have them. done, total: pairs
    (chunk, context) of the work.
    """

    progress: ReportProgress = lambda step: None
    is_withdrawn: Callable[[str], bool] = lambda id: False
    files: set[str] = field(default_factory=set)
    rejected: set[str] = field(default_factory=set)
    documents: set[str] = field(default_factory=set)
    work: list[Work] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    total: int = 0
    done: int = 0
    report: IngestReport = field(default_factory=IngestReport)


class Indexer:
    """The writer of one corpus: brings its catalogue and vectors, and the workspace's KV, up to date with documents."""

    def __init__(self, workspace: Workspace, corpus: Corpus) -> None:
        self._workspace, self._settings = workspace, workspace.config.index
        self._catalog, self._index = corpus.catalog, corpus.index
        self._in_work: set[str] = set()  # ids of the documents whose chunks are being precomputed
        self._precomputed: set[str] = set()  # hashes of these chunks

    async def scan_files(self, paths: Sequence[Path], progress: ReportProgress, *, allow_empty: bool = False) -> Scan:
        """Read these files and folders, and chunk the documents that are new or changed.

        Raises DocumentError for a folder that documents were indexed from and that is empty now, unless allow_empty.
        """
        files = find_files(paths)
        scan = Scan(progress, files={str(file.resolve()) for file in files})
        if not allow_empty:
            self._check_emptied(paths, scan)
        await asyncio.to_thread(self._consider, _loaded(files, scan), scan)
        scan.missing = self._missing(paths, scan)
        return scan

    async def ingest_documents(
        self,
        documents: Iterable[Document],
        progress: ReportProgress,
        hint: Hint | None,
        is_withdrawn: Callable[[str], bool],
    ) -> IngestReport:
        """Index documents that were read already, and remove other documents of the same files.

        is_withdrawn: called with a document's id just before the document is entered into the catalogue.
        """
        with self._workspace.home.indexing():
            scan = Scan(progress, is_withdrawn)
            await asyncio.to_thread(self._consider, documents, scan)
            scan.files = set(map(source_file, scan.documents))
            await self.precompute(scan)
            ids = {id for file in scan.files for id in self._catalog.document_ids_of(file)}
            scan.missing = [id for id in sorted(ids - scan.documents) if source_file(id) in scan.files]
            await self.finish(scan, hint)
            return scan.report

    async def delete(self, ids: Collection[str]) -> Deletion:
        """Delete these documents with their vectors and KV: none of them is on disk when it returns.

        Waits for a batch in work that has one of them. Raises BusyError if another process is changing the home.
        """
        with self._workspace.home.indexing():
            async with self._workspace.precomputing if self._in_work & set(ids) else nullcontext():
                store, kept = self._workspace.store, set(self._precomputed)
                return await asyncio.to_thread(delete_for_good, self._catalog, store, ids, kept)

    async def precompute(self, scan: Scan) -> None:
        """Precompute the KV of a scan's chunks and enter its documents into the catalogue, batch by batch."""
        self._workspace.home.claim(self._catalog, self._workspace.owner)
        self._workspace.main.catalog.put_setting(NUM_CONTEXTS_SETTING, str(self._settings.num_contexts))
        self._workspace.main.catalog.put_setting(ANCHOR_SETTING, self._workspace.anchor_hash)
        if scan.work or self._anchor_is_missing():
            await self._precompute_anchor()
        scan.total = self._settings.num_contexts * sum(len(chunks) for _, chunks in scan.work)
        for batch in _batches(scan.work):
            async with self._workspace.precomputing:
                self._in_work = {document.id for document, _ in batch}
                try:
                    await self._ingest_batch(batch, scan)
                finally:
                    self._in_work, self._precomputed = set(), set()

    async def finish(self, scan: Scan, hint: Hint | None) -> None:
        """Remove the missing documents and the KV that nothing uses, and apply the hint."""
        store = self._workspace.store

        def finish() -> None:
            unused = self._catalog.chunk_hashes_of(scan.missing)
            for id in scan.missing:
                self._catalog.delete_document(id)
            unused |= set(store.chunk_hashes(evicted=True))  # an interrupted run may have left some without a document
            unused -= self._workspace.home.chunk_hashes() | {self._workspace.anchor_hash}
            if unused:
                store.delete(unused)
            scan.report.documents_removed += len(scan.missing)
            scan.report.chunks_deleted += len(unused)
            if hint is not None:
                store.hint(self._catalog.chunk_hashes_of(scan.documents), hint)

        async with self._workspace.precomputing:
            await asyncio.to_thread(finish)

    def _consider(self, documents: Iterable[Document], scan: Scan) -> None:
        """Chunk the documents, but those that the catalogue has as they are."""
        stored = self._stored(self._workspace.anchor_hash)
        for document in documents:
            scan.documents.add(document.id)
            if self._is_current(document, stored):
                scan.report.documents_unchanged += 1
                continue
            try:
                scan.work.append((document, list(self._workspace.chunker.split(document))))
            except DocumentError as error:
                scan.report.rejected.append(str(error))
                continue
            is_new = self._catalog.document_digest(document.id) is None
            scan.report.documents_new += is_new
            scan.report.documents_changed += not is_new

    def _is_current(self, document: Document, stored: set[str]) -> bool:
        """Return whether the catalogue has the document as it is, and `stored` all of its chunks."""
        if self._catalog.document_digest(document.id) != self._document_digest(document):
            return False
        return not self._workspace.fuses or self._catalog.chunk_hashes_of([document.id]) <= stored

    def _document_digest(self, document: Document) -> str:
        """Return a hex digest of the document and of everything else that decides how it is indexed."""
        settings = (self._settings.model_dump_json(), self._workspace.owner.fingerprint, self._workspace.anchor_hash)
        return xxhash.xxh3_128_hexdigest("\0".join((document.digest, *settings)).encode())

    def document_chunks(self, document_id: str) -> list[tuple[Chunk, bool]]:
        """Return a document's chunks, each with whether its KV is stored."""
        chunks, entries = self._catalog.document_chunks(document_id), self._workspace.store.entries
        return [(chunk, bool(entries.keys_of(chunk.chunk_hash))) for chunk in chunks]

    def needs_model(self, paths: Sequence[Path]) -> bool:
        """Return whether `ingest` of these paths has anything to prefill, and so needs vLLM."""
        stored = self._stored(self._workspace.anchor_hash)
        documents = _loaded(find_files(paths), Scan())
        return self._anchor_is_missing() or any(not self._is_current(document, stored) for document in documents)

    def _anchor_is_missing(self) -> bool:
        return (
            self._workspace.fuses
            and self._catalog.has_documents
            and self._workspace.anchor_hash not in self._stored(ROOT_HASH)
        )

    def _stored(self, anchor_hash: str) -> set[str]:
        """Return the hashes of the chunks that have this model's KV after this anchor; an import may bring other KV.

        Under a disk budget, evicted chunks count as stored: their KV is made again when they are asked for.
        """
        context = (anchor_hash, self._workspace.owner.fingerprint)
        keys = self._workspace.store.keys(evicted=self._workspace.config.store.disk_gib is not None)
        return {key.chunk_hash for key in keys if (key.anchor_hash, key.fingerprint) == context}

    async def _ingest_batch(self, batch: Sequence[Work], scan: Scan) -> None:
        """Prefill the batch's chunks that have no KV yet, all at once, then enter its documents into the catalogue."""
        engine, catalog = await self._workspace.start(), self._catalog
        chunks = [chunk for _, of_document in batch for chunk in of_document]
        titles = [document.title for document, of_document in batch for _ in of_document]
        vectors = await asyncio.to_thread(self._workspace.embedder.embed, [chunk.text for chunk in chunks])
        hashes = [chunk_hash(chunk.token_ids, catalog.scope) for chunk in chunks]
        self._precomputed = set(hashes)
        end_of_batch = scan.done + self._settings.num_contexts * len(chunks)
        if self._workspace.fuses:
            title_of = dict(zip(hashes, titles, strict=True))
            tokens = dict(zip(hashes, (chunk.token_ids for chunk in chunks), strict=True))
            kv = self._workspace.chunk_kv(engine)
            contexts = await asyncio.to_thread(self._contexts, kv, tokens, hashes, vectors)

            def advance(chunk_hash: str, num_contexts: int) -> None:
                scan.done += num_contexts
                scan.progress(IngestProgress("prefill", scan.done, scan.total, title_of[chunk_hash]))

            scan.report.chunks_prefilled += await kv.precompute(
                engine, self._workspace.store, tokens, contexts, advance
            )
        scan.done = end_of_batch
        scan.progress(IngestProgress("prefill", scan.done, scan.total, ""))
        start = 0
        for document, of_document in batch:
            end = start + len(of_document)
            unused = set(hashes[start:end])
            if not scan.is_withdrawn(document.id):
                digest, unused = self._document_digest(document), catalog.chunk_hashes_of([document.id])
                catalog.put_document(document.id, document.title, digest, of_document, vectors[start:end])
            scan.report.chunks_deleted += self._forget(unused)
            start = end

    def _contexts(
        self, kv: ChunkKV, chunks: Mapping[str, Sequence[int]], chunk_hashes: Sequence[str], vectors: Vectors
    ) -> dict[str, list[list[Span]]]:
        """Return, for each chunk, what may stand before it in a prompt: the contexts of its mean."""
        if kv.num_contexts == 1:
            return {}
        ids = sorted(self._catalog.chunk_ids())
        drawn = self._catalog.chunks(random.Random(0).sample(ids, min(len(ids), _POOL)))
        pool = [*dict.fromkeys([*chunk_hashes, *(chunk.chunk_hash for chunk in drawn)])]
        nearest_of = nearest(chunk_hashes, vectors, self._catalog, self._index, kv.num_contexts - 1)
        contexts = {chunk_hash: contexts_of(chunk_hash, near, pool) for chunk_hash, near in nearest_of.items()}
        lengths = self._catalog.num_tokens({each for of in contexts.values() for context in of for each in context})
        lengths |= {chunk_hash: len(tokens) for chunk_hash, tokens in chunks.items()}
        return {
            chunk_hash: [[kv.span(other, lengths[other]) for other in context if other in lengths] for context in of]
            for chunk_hash, of in contexts.items()
        }

    def _missing(self, paths: Sequence[Path], scan: Scan) -> list[str]:
        """Return the ids of indexed documents that these files and folders had and no longer have."""
        folders = [path.expanduser().resolve() for path in paths if path.is_dir()]
        missing = []
        for id in self._catalog.document_ids():
            file = id if id in scan.files else source_file(id)
            is_read = file in scan.files or any(Path(file).is_relative_to(folder) for folder in folders)
            if is_read and id not in scan.documents and file not in scan.rejected:
                missing.append(id)
        return missing

    def _check_emptied(self, paths: Sequence[Path], scan: Scan) -> None:
        """Raise DocumentError if all documents of a folder would go: it may be a disk that isn't mounted."""
        given = {path.expanduser().resolve() for path in paths if path.is_dir()}
        with_files = {folder for file in scan.files for folder in Path(file).parents}
        emptied: dict[Path, list[str]] = {}
        for id in self._missing(paths, scan):
            for folder in Path(source_file(id)).parents:
                is_below = any(folder.is_relative_to(each) for each in given)
                if is_below and folder not in with_files and (folder in given or _is_empty(folder)):
                    emptied.setdefault(folder, []).append(id)
                    break
        for folder, ids in emptied.items():
            names = ", ".join(sorted(Path(id).name for id in ids)[:_NUM_NAMED])
            raise DocumentError(
                f"{str(folder)!r} has no documents now; {len(ids)} were indexed from it ({names}"
                f"{', …' if len(ids) > _NUM_NAMED else ''}). If its disk isn't mounted, mount it; to remove them "
                "from the index, give --allow-empty"
            )

    def _forget(self, hashes: Iterable[str]) -> int:
        """Delete the KV of those of these chunks that no document has. Returns how many chunks it was."""
        unused = self._catalog.unreferenced(hashes)
        if unused:
            self._workspace.store.delete(unused)
        return len(unused)

    async def _precompute_anchor(self) -> None:
        engine = await self._workspace.start()
        if self._workspace.fuses:
            await self._workspace.chunk_kv(engine).precompute_anchor(engine, self._workspace.store)

    async def precompute_again(self, chunk_hash: str) -> bool:
        """Precompute what KV of one chunk, or of the anchor, is missing; return False if no document has the chunk.

        Raises StoreError if there is no space.
        """
        if chunk_hash == self._workspace.anchor_hash:
            await self._precompute_anchor()
            return True
        chunk = self._catalog.chunk_of(chunk_hash)
        if chunk is None:
            return False
        engine = await self._workspace.start()
        kv, chunks = self._workspace.chunk_kv(engine), {chunk_hash: chunk.token_ids}
        _, vectors = self._catalog.vectors([chunk.id])
        contexts = await asyncio.to_thread(self._contexts, kv, chunks, [chunk_hash], vectors)
        await kv.precompute(engine, self._workspace.store, chunks, contexts)
        return not self._forget([chunk_hash])  # the document may have been deleted meanwhile


def _loaded(files: Sequence[Path], scan: Scan) -> Iterator[Document]:
    """Yield the documents of these files; enters what can't be indexed into the scan."""
    for done, file in enumerate(files):
        scan.progress(IngestProgress("load", done, len(files), file.name))
        for document in load_file(file):
            if isinstance(document, Document):
                yield document
            else:
                scan.report.rejected.append(str(document))
                scan.rejected.add(str(file.resolve()))
    scan.progress(IngestProgress("load", len(files), len(files), ""))


def _is_empty(folder: Path) -> bool:
    return folder.is_dir() and next(folder.iterdir(), None) is None


def _batches(work: Sequence[Work]) -> Iterable[list[Work]]:
    """Yield whole documents in batches of at least 64 chunks; an interruption costs no more than the batch in work."""
    batch: list[Work] = []
    for item in work:
        batch.append(item)
        if sum(len(chunks) for _, chunks in batch) >= _DOCUMENT_BATCH_CHUNKS:
            yield batch
            batch = []
    if batch:
        yield batch
