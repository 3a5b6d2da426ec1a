"""Documents to stored KV.

document -load-> text -chunk-> Chunk -prefill-> ChunkKV -put-> store
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import xxhash

from ragkv.chunk_kv import ChunkKV
from ragkv.engine.job import ROOT_HASH, Span
from ragkv.errors import DocumentError
from ragkv.home import ANCHOR_SETTING, CAPTURES_SETTING
from ragkv.ingestion import Found, IngestProgress, IngestReport, Step, Work, batches
from ragkv.retriever.chunking import Chunker
from ragkv.retriever.documents import Document, find_files, load_file, source_file
from ragkv.retriever.embedder import Vectors
from ragkv.retriever.hashing import chunk_hash
from ragkv.retriever.neighbours import nearest
from ragkv.store.eviction import Hint
from ragkv.workspace import Workspace


class Indexer:
    """Brings a workspace's catalogue, vectors and KV up to date with documents."""

    def __init__(self, workspace: Workspace) -> None:
        self._at, self._settings = workspace, workspace.config.index
        self._chunker = Chunker(workspace.folder, self._settings.chunk_tokens, self._settings.chunk_overlap)

    async def ingest(
        self,
        paths: Sequence[Path],
        progress: Callable[[IngestProgress], None] = lambda step: None,
        hint: Hint | None = None,
    ) -> IngestReport:
        """Bring the index up to date with these files and folders; documents that are gone from them are removed.

        Unchanged documents cost no work. Interrupted at any moment, it goes on where it stopped when run again: a
        document is in the catalogue only once the KV of all its chunks is in the store. hint: how the KV of all
        documents in `paths` is to be treated when room is needed; None leaves it as it was. Raises StoreError if there
        is no space or another ingest is at work; a bad document is reported and the others are indexed.
        """
        with self._at.home.indexing():
            self._at.home.check_owner(self._at.catalog, self._at.owner)
            self._at.home.claim(self._at.catalog, self._at.owner)
            self._at.catalog.put_setting(CAPTURES_SETTING, str(self._settings.captures))
            self._at.catalog.put_setting(ANCHOR_SETTING, self._at.anchor_hash)
            report = IngestReport()
            files = find_files(paths)
            found = await asyncio.to_thread(self._load, files, report, progress)
            if found.work or self._anchor_is_lost():
                await self._capture_anchor()
            captures = self._settings.captures
            total, done = captures * sum(len(item.chunks) for item in found.work), 0
            for batch in batches(found.work):
                await self._ingest_batch(batch, report, Step(progress, done, total))
                done += captures * sum(len(item.chunks) for item in batch)
            self._remove_missing(paths, found, report)
            report.chunks_deleted += self._collect_garbage()
            if hint is not None:
                self._at.store.hint(self._hashes_of(found.documents), hint)
            self._at.index.sync(self._at.catalog)
            self._at.index.save()
            return report

    def _load(self, files: Sequence[Path], report: IngestReport, progress: Callable[[IngestProgress], None]) -> Found:
        """Read every file; chunk what is new or changed."""
        found = Found({str(file.resolve()) for file in files})
        stored = self._stored(self._at.anchor_hash)
        for done, file in enumerate(files):
            progress(IngestProgress("load", done, len(files), file.name))
            for document in load_file(file):
                if isinstance(document, DocumentError):
                    report.rejected.append(document)
                    found.rejected.add(str(file.resolve()))
                    continue
                found.documents.add(document.id)
                digest = self._digest(document)
                known = self._at.catalog.document_digest(document.id)
                if known == digest and self._has_all_kv(document.id, stored):
                    report.documents_unchanged += 1
                    continue
                try:
                    found.work.append(Work(document, digest, self._chunker.split(document)))
                except DocumentError as error:
                    report.rejected.append(error)
                    continue
                report.documents_new += known is None
                report.documents_changed += known is not None
        progress(IngestProgress("load", len(files), len(files), ""))
        return found

    def _digest(self, document: Document) -> str:
        """Changes whenever the document would be indexed differently."""
        settings = (self._settings.model_dump_json(), self._at.owner.fingerprint, self._at.anchor_hash)
        return xxhash.xxh3_128_hexdigest("\0".join((document.digest, *settings)).encode())

    def _has_all_kv(self, document_id: str, stored: set[str]) -> bool:
        chunks = self._at.catalog.document_chunks(document_id)
        return not self._at.fuses or all(chunk.chunk_hash in stored for chunk in chunks)

    def needs_model(self, paths: Sequence[Path]) -> bool:
        """Whether `ingest` of these paths has anything to prefill, and so needs vLLM."""
        if self._anchor_is_lost():
            return True
        stored = self._stored(self._at.anchor_hash)
        for document in (document for file in find_files(paths) for document in load_file(file)):
            if isinstance(document, Document) and not (
                self._at.catalog.document_digest(document.id) == self._digest(document)
                and self._has_all_kv(document.id, stored)
            ):
                return True
        return False

    def _anchor_is_lost(self) -> bool:
        indexed = self._at.fuses and bool(self._at.catalog.documents())
        return indexed and self._at.anchor_hash not in self._stored(ROOT_HASH)

    def _stored(self, anchor_hash: str) -> set[str]:
        """The chunks that have this model's KV, captured behind this anchor: an import may have brought others too.

        Under a budget also those that had to make room: they come back when they are asked for.
        """
        behind = (anchor_hash, self._at.owner.fingerprint)
        keys = self._at.store.keys(evicted=self._at.config.store.disk_gib is not None)
        return {key.chunk_hash for key in keys if (key.anchor_hash, key.fingerprint) == behind}

    async def _ingest_batch(
        self, batch: Sequence[Work], report: IngestReport, progress: Callable[[int, str], None]
    ) -> None:
        """Prefill the batch's chunks that have no KV yet, all at once, then enter its documents into the catalogue."""
        engine = await self._at.start()
        texts = [chunk.text for item in batch for chunk in item.chunks]
        vectors = await asyncio.to_thread(self._at.embedder.embed, texts)
        titles = {chunk_hash(c.token_ids): item.document.title for item in batch for c in item.chunks}
        if self._at.fuses:
            tokens = [c.token_ids for item in batch for c in item.chunks]
            done = 0

            def advance(digest: str, num_captures: int) -> None:
                nonlocal done
                done += num_captures
                progress(done, titles[digest])

            kv, digests = self._at.chunk_kv(engine), list(map(chunk_hash, tokens))
            chunks = dict(zip(digests, tokens, strict=True))
            others = self._others(kv, chunks, digests, vectors)
            report.chunks_prefilled += await kv.capture(engine, self._at.store, chunks, others, advance)
        progress(self._settings.captures * len(texts), "")
        start = 0
        for item in batch:
            old = {chunk.chunk_hash for chunk in self._at.catalog.document_chunks(item.document.id)}
            end = start + len(item.chunks)
            document = item.document
            self._at.catalog.put_document(document.id, document.title, item.digest, item.chunks, vectors[start:end])
            report.chunks_deleted += self._at.forget(old)
            start = end

    def _others(
        self, kv: ChunkKV, chunks: Mapping[str, Sequence[int]], digests: Sequence[str], vectors: Vectors
    ) -> dict[str, list[Span]]:
        """The chunks that are likely to stand before each of these in a prompt: the nearest ones."""
        if kv.captures == 1:
            return {}
        self._at.index.sync(self._at.catalog)
        others = nearest(digests, vectors, self._at.catalog, self._at.index, kv.captures - 1)
        wanted = {other for found in others.values() for other in found}
        lengths = self._at.catalog.num_tokens(wanted) | {digest: len(tokens) for digest, tokens in chunks.items()}
        return {digest: [kv.span(h, lengths[h]) for h in found if h in lengths] for digest, found in others.items()}

    def _remove_missing(self, paths: Sequence[Path], found: Found, report: IngestReport) -> None:
        """Remove documents that lay in the folders and files given and are there no longer."""
        folders = [path.expanduser().resolve() for path in paths if path.is_dir()]
        for document in self._at.catalog.documents():
            file = document.id if document.id in found.files else source_file(document.id)
            read = file in found.files or any(Path(file).is_relative_to(folder) for folder in folders)
            if read and document.id not in found.documents and file not in found.rejected:
                hashes = {chunk.chunk_hash for chunk in self._at.catalog.document_chunks(document.id)}
                self._at.catalog.delete_document(document.id)
                report.chunks_deleted += self._at.forget(hashes)
                report.documents_removed += 1

    def _hashes_of(self, document_ids: Iterable[str]) -> set[str]:
        return {chunk.chunk_hash for id in document_ids for chunk in self._at.catalog.document_chunks(id)}

    def _collect_garbage(self) -> int:
        """Delete KV that an interrupted run left without a document."""
        orphans = (
            set(self._at.store.chunk_hashes(evicted=True)) - self._at.catalog.chunk_hashes() - {self._at.anchor_hash}
        )
        if orphans:
            self._at.store.delete(orphans)
        return len(orphans)

    async def _capture_anchor(self) -> None:
        engine = await self._at.start()
        if self._at.fuses:
            await self._at.chunk_kv(engine).capture_anchor(engine, self._at.store)

    async def capture_again(self, digest: str) -> bool:
        """Make what KV is lost of one chunk, or of the anchor; False if no document has it any more. Raises StoreError
        if there is no space."""
        if digest == self._at.anchor_hash:
            await self._capture_anchor()
            return True
        chunk = self._at.catalog.chunk_of(digest)
        if chunk is None:
            return False
        engine = await self._at.start()
        kv, chunks = self._at.chunk_kv(engine), {digest: chunk.token_ids}
        _, vectors = self._at.catalog.vectors([chunk.id])
        await kv.capture(engine, self._at.store, chunks, self._others(kv, chunks, [digest], vectors))
        return True
