"""From documents to stored KV.

document -load-> text -chunk-> Chunk -prefill-> ChunkKV -put-> store
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import aclosing, nullcontext
from pathlib import Path

import xxhash

from ragkv.engine.task import ROOT_HASH
from ragkv.errors import ConfigError, DocumentError
from ragkv.home import ANCHOR_SETTING, NUM_CONTEXTS_SETTING
from ragkv.index.deletion import Deletion, delete_for_good
from ragkv.index.ingest import Ingest, Postpone, draw_contexts
from ragkv.index.work import IngestProgress, IngestReport, ReportProgress, Scan
from ragkv.retriever.catalog import Chunk
from ragkv.retriever.documents import Document, document_name, find_files, source_file
from ragkv.retriever.parse import Reader
from ragkv.store.eviction import Hint
from ragkv.workspace import Corpus, Workspace

_NUM_NAMED = 3  # of the documents that an error is about


class Indexer:
    """The writer of one corpus: brings its catalogue and vectors, and the workspace's KV, up to date with documents."""

    def __init__(self, workspace: Workspace, corpus: Corpus, postpone: Postpone | None = None) -> None:
        """postpone: takes the hashes of chunks whose means are to be made when nobody waits."""
        self._workspace, self._settings, self._postpone = workspace, workspace.config.index, postpone
        self._corpus, self._catalog = corpus, corpus.catalog

    async def scan_files(self, paths: Sequence[Path], progress: ReportProgress, *, allow_empty: bool = False) -> Scan:
        """Read these files and folders, and find the documents that are new or changed.

        Raises DocumentError for a folder that documents were indexed from and that is empty now, unless allow_empty.
        """
        files = find_files(paths)
        scan = Scan(progress, files={document_name(str(file.resolve())) for file in files})
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
    ) -> AsyncGenerator[IngestReport | None, None]:
        """Index documents that were read already, a turn at a time, and remove other documents of the same files.

        Yields None between two turns, at last what was done. is_withdrawn: called with a document's id up
        to the moment when the document is entered into the catalogue.
        """
        with self._workspace.home.indexing():
            scan = Scan(progress, is_withdrawn)
            await asyncio.to_thread(self._consider, documents, scan)
            async with aclosing(self.precompute(scan)) as turns:
                async for _ in turns:
                    yield None
            scan.files = {source_file(id) for id in scan.documents if not is_withdrawn(id)}
            ids = {id for file in scan.files for id in self._catalog.document_ids_of(file)}
            scan.missing = [id for id in sorted(ids - scan.documents) if source_file(id) in scan.files]
            await self.finish(scan, hint)
            yield scan.report

    async def delete(self, ids: Collection[str]) -> Deletion:
        """Delete these documents with their vectors and KV: none of them is on disk or, unless the deletion says so, in
        the bucket when it returns.

        Waits for a turn to end if one of them is being indexed. Raises BusyError if another process is changing the
        home.
        """
        with self._workspace.home.indexing():
            drafts = {draft for draft in list(self._corpus.drafts) if draft.document.id in ids}
            async with self._workspace.turns.lock if drafts else nullcontext():
                self._corpus.drafts -= drafts
                for draft in drafts:
                    draft.dropped = True
                    await asyncio.to_thread(self._forget, [piece.chunk_hash for piece in draft.pieces])
                store, kept = self._workspace.store, self._corpus.drafted
                return await asyncio.to_thread(delete_for_good, self._catalog, store, ids, kept, self._workspace.tier)

    async def precompute(self, scan: Scan) -> AsyncGenerator[None, None]:
        """Precompute the KV of a scan's documents and enter them into the catalogue. Yields between two turns."""
        self._workspace.home.claim(self._catalog, self._workspace.owner)
        self._workspace.main.catalog.put_setting(NUM_CONTEXTS_SETTING, str(self._settings.num_contexts))
        self._workspace.main.catalog.put_setting(ANCHOR_SETTING, self._workspace.anchor_hash)
        if scan.work or self._anchor_is_missing():
            await self._precompute_anchor()
        work, scan.work = scan.work, []  # so that texts are kept no longer than they are needed
        ingest = Ingest(self._workspace, self._corpus, work, scan, self._document_digest, self._postpone)
        async with aclosing(ingest.turns()) as turns:
            async for _ in turns:
                yield

    async def finish(self, scan: Scan, hint: Hint | None) -> None:
        """Remove the missing documents with their KV, and apply the hint, or report why not."""
        store, disk_bytes = self._workspace.store, self._workspace.config.store.disk_bytes

        def finish() -> None:
            unused = self._catalog.chunk_hashes_of(scan.missing)
            for id in scan.missing:
                self._catalog.delete_document(id)
            scan.report.documents_removed += len(scan.missing)
            scan.report.chunks_deleted += self._forget(unused)
            if hint is not None:
                try:
                    store.control.hint(self._catalog.chunk_hashes_of(scan.documents), hint, disk_bytes)
                except ConfigError as error:
                    scan.report.hint_refused = str(error)

        async with self._workspace.turns.lock:
            await asyncio.to_thread(finish)

    async def delete_orphans(self) -> int:
        """Delete the KV that no tenant's documents have: interrupted runs may have left some. Returns how many chunks.

        Documents in work keep theirs. Call it while nobody is to continue such a run.
        """
        store = self._workspace.store

        def delete() -> int:
            unused = set(store.chunk_hashes(evicted=True)) - self._workspace.home.chunk_hashes()
            unused -= self._workspace.drafted
            unused.discard(self._workspace.anchor_hash)
            if unused:
                store.delete(unused)
            return len(unused)

        async with self._workspace.turns.lock:
            return await asyncio.to_thread(delete)

    def _consider(self, documents: Iterable[Document], scan: Scan) -> None:
        """Take the documents into the scan's work, but those that the catalogue has as they are."""
        stored = self._stored(self._workspace.alone_hashes)
        for document in documents:
            scan.documents.add(document.id)
            if self._is_current(document, stored):
                scan.report.documents_unchanged += 1
            else:
                scan.work.append(document)

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
        stored = self._stored(self._workspace.alone_hashes)
        documents = _loaded(find_files(paths), Scan())
        return self._anchor_is_missing() or any(not self._is_current(document, stored) for document in documents)

    def _anchor_is_missing(self) -> bool:
        return (
            self._workspace.fuses
            and self._catalog.has_documents
            and self._workspace.anchor_hash not in self._stored({ROOT_HASH})
        )

    def _stored(self, anchor_hashes: set[str]) -> set[str]:
        """Return the hashes of the chunks that have this model's KV after these anchors; an import may bring other KV.

        Under a disk budget, evicted chunks count as stored: their KV is made again when they are asked for.
        """
        fingerprint = self._workspace.owner.fingerprint
        keys = self._workspace.store.keys(evicted=self._workspace.config.store.disk_gib is not None)
        return {key.chunk_hash for key in keys if key.anchor_hash in anchor_hashes and key.fingerprint == fingerprint}

    def _missing(self, paths: Sequence[Path], scan: Scan) -> list[str]:
        """Return the ids of indexed documents that these files and folders had and no longer have."""
        folders = [document_name(str(path.expanduser().resolve())) for path in paths if path.is_dir()]
        missing = []
        for id in self._catalog.document_ids():
            file = document_name(id if id in scan.files else source_file(id))
            is_read = file in scan.files or any(Path(file).is_relative_to(folder) for folder in folders)
            if is_read and id not in scan.documents and file not in scan.rejected:
                missing.append(id)
        return missing

    def _check_emptied(self, paths: Sequence[Path], scan: Scan) -> None:
        """Raise DocumentError if all documents of a folder would go: it may be a disk that isn't mounted."""
        given = {Path(document_name(str(path.expanduser().resolve()))) for path in paths if path.is_dir()}
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
        unused = self._corpus.unneeded(hashes)
        if unused:
            self._workspace.store.delete(unused)
        return len(unused)

    async def _precompute_anchor(self) -> None:
        engine = await self._workspace.start()
        if self._workspace.fuses:
            kv = self._workspace.chunk_kv(engine)
            await self._workspace.fetch([kv.key(kv.anchor_span)])
            await kv.precompute_anchor(engine, self._workspace.store)

    async def precompute_again(self, chunk_hash: str) -> bool:
        """Fetch or precompute what KV of one chunk, or of the anchor, is missing; return False if no document has it.

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
        await self._workspace.fetch(kv.keys(chunk_hash))
        _, vectors = self._catalog.vectors([chunk.id])
        lengths = {chunk_hash: len(chunk.token_ids)}
        contexts = await asyncio.to_thread(draw_contexts, self._corpus, kv, [0], [chunk_hash], lengths, vectors)
        await kv.precompute(engine, self._workspace.store, chunks, contexts)
        return not self._forget([chunk_hash])  # the document may have been deleted meanwhile


def _loaded(files: Sequence[Path], scan: Scan) -> Iterator[Document]:
    """Yield the documents of these files; enters what can't be indexed into the scan."""
    names: set[str] = set()
    with Reader() as reader:
        for done, file in enumerate(files):
            scan.progress(IngestProgress("load", done, len(files), file.name))
            name = document_name(str(file.resolve()))
            twin = DocumentError(f"{str(file)!r}: another file has this name in another Unicode form; rename one")
            for document in [twin] if name in names else reader.read(file):
                if isinstance(document, Document):
                    yield document
                else:
                    scan.report.rejected.append(str(document))
                    scan.rejected.add(name)
            names.add(name)
    scan.progress(IngestProgress("load", len(files), len(files), ""))


def _is_empty(folder: Path) -> bool:
    return folder.is_dir() and next(folder.iterdir(), None) is None
