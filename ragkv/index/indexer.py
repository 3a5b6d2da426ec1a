"""Documents to stored KV.

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
from ragkv.home import ANCHOR_SETTING, CONTEXTS_SETTING
from ragkv.index.deletion import Deletion, delete_for_good
from ragkv.index.ingestion import IngestProgress, IngestReport, Scan, Step, Work, batches
from ragkv.retriever.catalog import Chunk
from ragkv.retriever.documents import Document, find_files, load_file, source_file
from ragkv.retriever.embedder import Vectors
from ragkv.retriever.hashing import chunk_hash
from ragkv.retriever.neighbours import nearest
from ragkv.store.eviction import Hint
from ragkv.workspace import Corpus, Workspace


class Indexer:
    """Brings a corpus' catalogue and vectors, and the workspace's KV, up to date with documents."""

    def __init__(self, workspace: Workspace, corpus: Corpus) -> None:
        self._workspace, self._corpus, self._settings = workspace, corpus, workspace.config.index
        self._in_work: set[str] = set()  # documents whose chunks are being precomputed
        self._precomputed: set[str] = set()  # chunks that are precomputed for them

    async def scan_files(self, paths: Sequence[Path], progress: Callable[[IngestProgress], None]) -> Scan:
        """Read these files and folders, and chunk the documents that are new or changed."""
        scan = Scan()
        files = find_files(paths)
        scan.files |= {str(file.resolve()) for file in files}
        await asyncio.to_thread(self._load, files, scan, progress)
        scan.vanished = self._missing(paths, scan)
        return scan

    async def ingest_documents(
        self,
        documents: Iterable[Document],
        progress: Callable[[IngestProgress], None] = lambda step: None,
        hint: Hint | None = None,
        is_withdrawn: Callable[[str], bool] = lambda id: False,
    ) -> IngestReport:
        """Index documents that were read before, as `Pipeline.ingest` does; other documents of their files are removed.

        is_withdrawn: asked just before a document would be entered into the catalogue.
        """
        with self._workspace.home.indexing():
            scan = Scan()
            await asyncio.to_thread(self._consider_all, documents, scan)
            await self.precompute(scan, progress, is_withdrawn)
            ids = {id for file in scan.files for id in self._corpus.catalog.document_ids_of(file)}
            scan.vanished = [id for id in sorted(ids - scan.documents) if source_file(id) in scan.files]
            await self.finish(scan, hint)
            return scan.report

    async def delete(self, ids: Collection[str]) -> Deletion:
        """Delete these documents with their vectors and KV, for good before it returns. Waits for a batch in work that
        has one of them. Raises BusyError if another process is changing the home."""
        with self._workspace.home.indexing():
            async with self._workspace.precomputing if self._in_work & set(ids) else nullcontext():
                corpus, store = self._corpus, self._workspace.store
                return await asyncio.to_thread(
                    delete_for_good, corpus.catalog, corpus.index, store, ids, wanted=set(self._precomputed)
                )

    async def precompute(
        self,
        scan: Scan,
        progress: Callable[[IngestProgress], None],
        is_withdrawn: Callable[[str], bool] = lambda id: False,
    ) -> None:
        """Precompute the KV of a scan's chunks and enter its documents into the catalogue, batch by batch."""
        self._workspace.home.claim(self._corpus.catalog, self._workspace.owner)
        self._workspace.main.catalog.put_setting(CONTEXTS_SETTING, str(self._settings.num_contexts))
        self._workspace.main.catalog.put_setting(ANCHOR_SETTING, self._workspace.anchor_hash)
        if scan.work or self._anchor_is_lost():
            await self._precompute_anchor()
        num_contexts = self._settings.num_contexts
        total, done = num_contexts * sum(len(item.chunks) for item in scan.work), 0
        for batch in batches(scan.work):
            async with self._workspace.precomputing:
                self._in_work = {item.document.id for item in batch}
                try:
                    await self._ingest_batch(batch, scan.report, Step(progress, done, total), is_withdrawn)
                finally:
                    self._in_work, self._precomputed = set(), set()
            done += num_contexts * sum(len(item.chunks) for item in batch)

    async def finish(self, scan: Scan, hint: Hint | None) -> None:
        """Remove the documents that vanished and the KV that nothing uses, and save the vectors."""
        report = scan.report

        def finish() -> None:
            for id in scan.vanished:
                hashes = self._hashes_of([id])
                self._corpus.catalog.delete_document(id)
                report.chunks_deleted += self.forget(hashes)
                report.documents_removed += 1
            report.chunks_deleted += self._collect_garbage()
            if hint is not None:
                self._workspace.store.hint(self._hashes_of(scan.documents), hint)
            self._corpus.index.sync(self._corpus.catalog)
            self._corpus.index.save(few=False)

        async with self._workspace.precomputing:
            await asyncio.to_thread(finish)

    def _load(self, files: Sequence[Path], scan: Scan, progress: Callable[[IngestProgress], None]) -> None:
        """Read every file; chunk what is new or changed."""
        stored = self._stored(self._workspace.anchor_hash)
        for done, file in enumerate(files):
            progress(IngestProgress("load", done, len(files), file.name))
            for document in load_file(file):
                if isinstance(document, DocumentError):
                    scan.report.rejected.append(document)
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
        digest = self._digest(document)
        known = self._corpus.catalog.document_digest(document.id)
        if known == digest and self._has_all_kv(document.id, stored):
            scan.report.documents_unchanged += 1
            return
        try:
            scan.work.append(Work(document, digest, self._workspace.chunker.split(document)))
        except DocumentError as error:
            scan.report.rejected.append(error)
            return
        scan.report.documents_new += known is None
        scan.report.documents_changed += known is not None

    def _digest(self, document: Document) -> str:
        """Changes whenever the document would be indexed differently."""
        settings = (self._settings.model_dump_json(), self._workspace.owner.fingerprint, self._workspace.anchor_hash)
        return xxhash.xxh3_128_hexdigest("\0".join((document.digest, *settings)).encode())

    def _has_all_kv(self, document_id: str, stored: set[str]) -> bool:
        chunks = self._corpus.catalog.document_chunks(document_id)
        return not self._workspace.fuses or all(chunk.chunk_hash in stored for chunk in chunks)

    def document_chunks(self, document_id: str) -> list[tuple[Chunk, bool]]:
        """Return a document's chunks, each with whether its KV is stored."""
        stored = set(self._workspace.store.chunk_hashes())
        return [(chunk, chunk.chunk_hash in stored) for chunk in self._corpus.catalog.document_chunks(document_id)]

    def needs_model(self, paths: Sequence[Path]) -> bool:
        """Whether `ingest` of these paths has anything to prefill, and so needs vLLM."""
        if self._anchor_is_lost():
            return True
        stored = self._stored(self._workspace.anchor_hash)
        for document in (document for file in find_files(paths) for document in load_file(file)):
            if isinstance(document, Document) and not (
                self._corpus.catalog.document_digest(document.id) == self._digest(document)
                and self._has_all_kv(document.id, stored)
            ):
                return True
        return False

    def _anchor_is_lost(self) -> bool:
        return (
            self._workspace.fuses
            and self._corpus.catalog.has_documents
            and self._workspace.anchor_hash not in self._stored(ROOT_HASH)
        )

    def _stored(self, anchor_hash: str) -> set[str]:
        """The chunks that have this model's KV, precomputed behind this anchor: an import may have brought others too.

        Under a budget also those that had to make room: they come back when they are asked for.
        """
        behind = (anchor_hash, self._workspace.owner.fingerprint)
        keys = self._workspace.store.keys(evicted=self._workspace.config.store.disk_gib is not None)
        return {key.chunk_hash for key in keys if (key.anchor_hash, key.fingerprint) == behind}

    async def _ingest_batch(
        self,
        batch: Sequence[Work],
        report: IngestReport,
        progress: Callable[[int, str], None],
        is_withdrawn: Callable[[str], bool],
    ) -> None:
        """Prefill the batch's chunks that have no KV yet, all at once, then enter its documents into the catalogue."""
        engine = await self._workspace.start()
        texts = [chunk.text for item in batch for chunk in item.chunks]
        vectors = await asyncio.to_thread(self._workspace.embedder.embed, texts)
        hashes = [[chunk_hash(c.token_ids, self._corpus.catalog.scope) for c in item.chunks] for item in batch]
        self._precomputed = {digest for each in hashes for digest in each}
        if self._workspace.fuses:
            tokens = [c.token_ids for item in batch for c in item.chunks]
            done = 0

            def advance(digest: str, num_captures: int) -> None:
                nonlocal done
                done += num_captures
                progress(done, titles[digest])

            titles = {digest: item.document.title for item, each in zip(batch, hashes, strict=True) for digest in each}
            kv, digests = self._workspace.chunk_kv(engine), [digest for each in hashes for digest in each]
            chunks = dict(zip(digests, tokens, strict=True))
            others = self._others(kv, chunks, digests, vectors)
            report.chunks_prefilled += await kv.precompute(engine, self._workspace.store, chunks, others, advance)
        progress(self._settings.num_contexts * len(texts), "")
        start = 0
        for item, new in zip(batch, hashes, strict=True):
            document, old, end = item.document, self._hashes_of([item.document.id]), start + len(item.chunks)
            if is_withdrawn(document.id):
                report.chunks_deleted += self.forget(new)
            else:
                catalog = self._corpus.catalog
                catalog.put_document(document.id, document.title, item.digest, item.chunks, vectors[start:end])
                report.chunks_deleted += self.forget(old)
            start = end

    def _others(
        self, kv: ChunkKV, chunks: Mapping[str, Sequence[int]], digests: Sequence[str], vectors: Vectors
    ) -> dict[str, list[Span]]:
        """The chunks that are likely to stand before each of these in a prompt: the nearest ones."""
        if kv.num_contexts == 1:
            return {}
        self._corpus.index.sync(self._corpus.catalog)
        others = nearest(digests, vectors, self._corpus.catalog, self._corpus.index, kv.num_contexts - 1)
        wanted = {other for found in others.values() for other in found}
        lengths = self._corpus.catalog.num_tokens(wanted) | {digest: len(tokens) for digest, tokens in chunks.items()}
        return {digest: [kv.span(h, lengths[h]) for h in found if h in lengths] for digest, found in others.items()}

    def _missing(self, paths: Sequence[Path], scan: Scan) -> list[str]:
        """Documents that lay in the folders and files given and are there no longer."""
        folders = [path.expanduser().resolve() for path in paths if path.is_dir()]
        missing = []
        for id in self._corpus.catalog.document_ids():
            file = id if id in scan.files else source_file(id)
            read = file in scan.files or any(Path(file).is_relative_to(folder) for folder in folders)
            if read and id not in scan.documents and file not in scan.rejected:
                missing.append(id)
        return missing

    def _hashes_of(self, document_ids: Iterable[str]) -> set[str]:
        return {chunk.chunk_hash for id in document_ids for chunk in self._corpus.catalog.document_chunks(id)}

    def forget(self, hashes: Iterable[str]) -> int:
        """Delete the KV of these chunks unless some document still has them. Returns how many chunks went."""
        gone = self._corpus.catalog.unreferenced(hashes)
        if gone:
            self._workspace.store.delete(gone)
        return len(gone)

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

    async def precompute_again(self, digest: str) -> bool:
        """Make what KV is lost of one chunk, or of the anchor; False if no document has it any more. Raises StoreError
        if there is no space."""
        if digest == self._workspace.anchor_hash:
            await self._precompute_anchor()
            return True
        chunk = self._corpus.catalog.chunk_of(digest)
        if chunk is None:
            return False
        engine = await self._workspace.start()
        kv, chunks = self._workspace.chunk_kv(engine), {digest: chunk.token_ids}
        _, vectors = self._corpus.catalog.vectors([chunk.id])
        await kv.precompute(engine, self._workspace.store, chunks, self._others(kv, chunks, [digest], vectors))
        return not self.forget([digest])  # the document may have been deleted meanwhile
