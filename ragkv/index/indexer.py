"""From documents to stored KV.

document -load-> text -chunk-> Chunk -prefill-> ChunkKV -put-> store
"""

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

import xxhash

from ragkv.chunk_kv import ChunkKV
from ragkv.engine.task import ROOT_HASH, Span
from ragkv.errors import DocumentError
from ragkv.home import ANCHOR_SETTING, NUM_CONTEXTS_SETTING
from ragkv.index.deletion import Deletion, delete_for_good
from ragkv.index.ingestion import IngestProgress, IngestReport, PrefillProgress, Scan, Work, batches
from ragkv.retriever.catalog import Chunk
from ragkv.retriever.documents import Document, find_files, load_file, source_file
from ragkv.retriever.embedder import Vectors
from ragkv.retriever.hashing import chunk_hash
from ragkv.retriever.neighbours import nearest
from ragkv.store.eviction import Hint
from ragkv.workspace import Corpus, Workspace


class Indexer:
    """The writer of one corpus: brings its catalogue and vectors, and the workspace's KV, up to date with documents."""

    def __init__(self, workspace: Workspace, corpus: Corpus) -> None:
        self._workspace, self._settings = workspace, workspace.config.index
        self._catalog, self._index = corpus.catalog, corpus.index
        self._in_work: set[str] = set()  # ids of the documents whose chunks are being precomputed
        self._precomputed: set[str] = set()  # hashes of these chunks

    async def scan_files(self, paths: Sequence[Path], progress: Callable[[IngestProgress], None]) -> Scan:
        """Read these files and folders, and chunk the documents that are new or changed."""
        scan = Scan()
        files = find_files(paths)
        scan.files |= {str(file.resolve()) for file in files}
        await asyncio.to_thread(self._load, files, scan, progress)
        scan.missing = self._missing(paths, scan)
        return scan

    async def ingest_documents(
        self,
        documents: Iterable[Document],
        progress: Callable[[IngestProgress], None] = lambda step: None,
        hint: Hint | None = None,
        is_withdrawn: Callable[[str], bool] = lambda id: False,
    ) -> IngestReport:
        """Index documents that were read already, and remove other documents of the same files.

        is_withdrawn: called with a document's id just before the document is entered into the catalogue.
        """
        with self._workspace.home.indexing():
            scan = Scan()
            await asyncio.to_thread(self._consider_all, documents, scan)
            await self.precompute(scan, progress, is_withdrawn)
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

    async def precompute(
        self,
        scan: Scan,
        progress: Callable[[IngestProgress], None],
        is_withdrawn: Callable[[str], bool] = lambda id: False,
    ) -> None:
        """Precompute the KV of a scan's chunks and enter its documents into the catalogue, batch by batch."""
        self._workspace.home.claim(self._catalog, self._workspace.owner)
        self._workspace.main.catalog.put_setting(NUM_CONTEXTS_SETTING, str(self._settings.num_contexts))
        self._workspace.main.catalog.put_setting(ANCHOR_SETTING, self._workspace.anchor_hash)
        if scan.work or self._anchor_is_missing():
            await self._precompute_anchor()
        total = self._settings.num_contexts * sum(len(item.chunks) for item in scan.work)
        prefill = PrefillProgress(progress, total)
        for batch in batches(scan.work):
            async with self._workspace.precomputing:
                self._in_work = {item.document.id for item in batch}
                try:
                    await self._ingest_batch(batch, scan.report, prefill, is_withdrawn)
                finally:
                    self._in_work, self._precomputed = set(), set()

    async def finish(self, scan: Scan, hint: Hint | None) -> None:
        """Remove the missing documents and the KV that nothing uses, and apply the hint."""
        report = scan.report

        def finish() -> None:
            hashes = self._catalog.chunk_hashes_of(scan.missing)
            for id in scan.missing:
                self._catalog.delete_document(id)
            report.documents_removed += len(scan.missing)
            report.chunks_deleted += self._forget(hashes) + self._collect_garbage()
            if hint is not None:
                self._workspace.store.hint(self._catalog.chunk_hashes_of(scan.documents), hint)

        async with self._workspace.precomputing:
            await asyncio.to_thread(finish)

    def _load(self, files: Sequence[Path], scan: Scan, progress: Callable[[IngestProgress], None]) -> None:
        stored = self._stored(self._workspace.anchor_hash)
        for done, file in enumerate(files):
            progress(IngestProgress("load", done, len(files), file.name))
            for document in load_file(file):
                if isinstance(document, DocumentError):
                    scan.report.rejected.append(str(document))
                    scan.rejected.add(str(file.resolve()))
                else:
                    self._consider(document, stored, scan)
        progress(IngestProgress("load", len(files), len(files), ""))

    def _consider_all(self, documents: Iterable[Document], scan: Scan) -> None:
        stored = self._stored(self._workspace.anchor_hash)
        for document in documents:
            scan.files.add(source_file(document.id))
            self._consider(document, stored, scan)

    def _consider(self, document: Document, stored: set[str], scan: Scan) -> None:
        """Chunk the document, unless the catalogue has it as it is."""
        scan.documents.add(document.id)
        if self._is_current(document, stored):
            scan.report.documents_unchanged += 1
            return
        try:
            scan.work.append(Work(document, self._workspace.chunker.split(document)))
        except DocumentError as error:
            scan.report.rejected.append(str(error))
            return
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
        stored = set(self._workspace.store.chunk_hashes())
        return [(chunk, chunk.chunk_hash in stored) for chunk in self._catalog.document_chunks(document_id)]

    def needs_model(self, paths: Sequence[Path]) -> bool:
        """Return whether `ingest` of these paths has anything to prefill, and so needs vLLM."""
        stored = self._stored(self._workspace.anchor_hash)
        documents = (document for file in find_files(paths) for document in load_file(file))
        return self._anchor_is_missing() or any(
            isinstance(document, Document) and not self._is_current(document, stored) for document in documents
        )

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

    async def _ingest_batch(
        self,
        batch: Sequence[Work],
        report: IngestReport,
        prefill: PrefillProgress,
        is_withdrawn: Callable[[str], bool],
    ) -> None:
        """Prefill the batch's chunks that have no KV yet, all at once, then enter its documents into the catalogue."""
        engine, catalog = await self._workspace.start(), self._catalog
        chunks = [chunk for item in batch for chunk in item.chunks]
        titles = [item.document.title for item in batch for _ in item.chunks]
        vectors = await asyncio.to_thread(self._workspace.embedder.embed, [chunk.text for chunk in chunks])
        hashes = [chunk_hash(chunk.token_ids, catalog.scope) for chunk in chunks]
        self._precomputed = set(hashes)
        end_of_batch = prefill.done + self._settings.num_contexts * len(chunks)
        if self._workspace.fuses:
            title_of = dict(zip(hashes, titles, strict=True))
            tokens = dict(zip(hashes, (chunk.token_ids for chunk in chunks), strict=True))
            kv = self._workspace.chunk_kv(engine)
            others = await asyncio.to_thread(self._others, kv, tokens, hashes, vectors)

            def advance(chunk_hash: str, num_contexts: int) -> None:
                prefill.advance_to(prefill.done + num_contexts, title_of[chunk_hash])

            report.chunks_prefilled += await kv.precompute(engine, self._workspace.store, tokens, others, advance)
        prefill.advance_to(end_of_batch)
        start = 0
        for item in batch:
            document, old, end = item.document, catalog.chunk_hashes_of([item.document.id]), start + len(item.chunks)
            if is_withdrawn(document.id):
                report.chunks_deleted += self._forget(hashes[start:end])
            else:
                digest = self._document_digest(document)
                catalog.put_document(document.id, document.title, digest, item.chunks, vectors[start:end])
                report.chunks_deleted += self._forget(old)
            start = end

    def _others(
        self, kv: ChunkKV, chunks: Mapping[str, Sequence[int]], chunk_hashes: Sequence[str], vectors: Vectors
    ) -> dict[str, list[Span]]:
        """Return, for each chunk, the chunks that are likely to stand before it in a prompt: the nearest ones."""
        if kv.num_contexts == 1:
            return {}
        nearest_of = nearest(chunk_hashes, vectors, self._catalog, self._index, kv.num_contexts - 1)
        lengths = self._catalog.num_tokens({other for others in nearest_of.values() for other in others})
        lengths |= {chunk_hash: len(tokens) for chunk_hash, tokens in chunks.items()}
        return {
            chunk_hash: [kv.span(other, lengths[other]) for other in others if other in lengths]
            for chunk_hash, others in nearest_of.items()
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

    def _forget(self, hashes: Iterable[str]) -> int:
        """Delete the KV of those of these chunks that no document has. Returns how many chunks it was."""
        unused = self._catalog.unreferenced(hashes)
        if unused:
            self._workspace.store.delete(unused)
        return len(unused)

    def _collect_garbage(self) -> int:
        """Delete KV that an interrupted run left without a document."""
        orphans = (
            set(self._workspace.store.chunk_hashes(evicted=True))
            - self._workspace.home.chunk_hashes()
            - {self._workspace.anchor_hash}
        )
        if orphans:
            self._workspace.store.delete(orphans)
        return len(orphans)

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
        others = await asyncio.to_thread(self._others, kv, chunks, [chunk_hash], vectors)
        await kv.precompute(engine, self._workspace.store, chunks, others)
        return not self._forget([chunk_hash])  # the document may have been deleted meanwhile
