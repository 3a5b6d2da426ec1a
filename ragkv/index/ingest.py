"""Documents that become KV, a turn at a time: cut into chunks, embedded, precomputed, and entered into the catalogue.

A turn takes about a second, however large a document is, so that nobody else who indexes has long to wait. Documents
enter the catalogue in batches, whose chunks are contexts for each other's means.
"""

import asyncio
import random
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager

import numpy as np

from ragkv.chunk_kv import ChunkKV
from ragkv.engine.task import Span
from ragkv.errors import DocumentError
from ragkv.index.work import Draft, IngestProgress, IngestReport, Piece, ReportProgress
from ragkv.retriever.chunking import ChunkText
from ragkv.retriever.documents import Document
from ragkv.retriever.encoders import Vectors
from ragkv.retriever.hashing import chunk_hash
from ragkv.retriever.index import contexts_of, nearest
from ragkv.workspace import Corpus, Workspace

BATCH_CHUNKS = 64  # or one document, if that has more
_TURN_S, _STEP_S = 1.0, 0.5  # what others wait for; a turn has several steps
_FIRST_STEP, _LONGEST_STEP = 4, 64  # pairs (chunk, context) of the first step, whose time nobody knows; of any step
_POOL = 64  # chunks of the index from which a batch's contexts are drawn, besides its own


class Ingest:
    """Documents of one corpus in work.

    digest_of: by what the catalogue knows a version of a document. is_withdrawn: whether a document, by its id, is not
    to be indexed any more. report: is told what was done.
    """

    def __init__(
        self,
        workspace: Workspace,
        corpus: Corpus,
        documents: Sequence[Document],
        digest_of: Callable[[Document], str],
        is_withdrawn: Callable[[str], bool],
        progress: ReportProgress,
        report: IngestReport,
    ) -> None:
        self._workspace, self._corpus = workspace, corpus
        self._digest_of, self._is_withdrawn = digest_of, is_withdrawn
        self._progress, self._report = progress, report
        self._documents = deque(documents)
        self._chunks: Iterator[ChunkText] | None = None  # of the newest draft, as far as they aren't cut
        self._num_contexts = workspace.config.index.num_contexts
        self._num_chars, self._num_chars_cut = sum(len(document.text) for document in documents), 0
        self._num_cut = self._num_done = 0  # chunks; pairs (chunk, context)
        self._pairs_per_s = _FIRST_STEP / _STEP_S

    async def turns(self) -> AsyncGenerator[None, None]:
        """Index the documents; yields between two turns. If it ends early, the next try finds the KV made so far."""
        async with aclosing(self._steps()) as steps:
            more = bool(self._documents)
            while more:
                async with self._workspace.turns.next():
                    end = time.monotonic() + _TURN_S
                    while more and time.monotonic() < end:
                        more = await anext(steps, False)
                if more:
                    yield

    async def _steps(self) -> AsyncGenerator[bool, None]:
        """Do a step, and yield True if there is more."""
        while self._documents:
            pieces: list[Piece] = []
            drafts: list[Draft] = []
            try:
                while taken := await asyncio.to_thread(self._cut, drafts, len(pieces)):
                    pieces += taken
                    await self._prefill(taken)
                    yield True
                for start, end in self._slices(len(pieces)):
                    await self._average(pieces, range(start, end))
                    if end < len(pieces):
                        yield True
                await asyncio.to_thread(self._enter, drafts)
            finally:
                self._corpus.drafts.difference_update(drafts)
            if self._documents:
                yield True

    def _cut(self, drafts: list[Draft], num_pieces: int) -> list[Piece]:
        """Cut the next step's chunks, and add drafts for them; none if there are enough for a batch."""
        taken: list[Piece] = []
        most = self._step_chunks(1)
        while len(taken) < most:
            if self._chunks is None:
                if not self._documents or num_pieces + len(taken) >= BATCH_CHUNKS:
                    break
                drafts.append(Draft(self._documents.popleft()))
                self._corpus.drafts.add(drafts[-1])
                self._chunks = self._workspace.chunker.split(drafts[-1].document)
            draft = drafts[-1]
            try:
                chunk = None if self._is_dropped(draft) else next(self._chunks, None)
            except DocumentError as error:
                self._report.rejected.append(str(error))
                draft.dropped, chunk = True, None
            if chunk is not None:
                taken.append(Piece(draft, chunk, chunk_hash(chunk.token_ids, self._corpus.catalog.scope)))
                draft.pieces.append(taken[-1])
                self._num_chars_cut += len(chunk.text)
            else:
                self._chunks = None
                self._num_chars_cut += len(draft.document.text) - sum(len(each.chunk.text) for each in draft.pieces)
        self._num_cut += len(taken)
        return taken

    async def _prefill(self, pieces: Sequence[Piece]) -> None:
        """Embed chunks, and precompute their KV after the anchor."""
        with self._step(pieces, 1 if self._workspace.fuses else self._num_contexts):
            texts = [piece.chunk.text for piece in pieces]
            vectors = await asyncio.to_thread(self._workspace.embedder.embed, texts)
            for piece, vector in zip(pieces, vectors, strict=True):
                piece.vector = vector
            engine, store = await self._workspace.start(), self._workspace.store
            if self._workspace.fuses:
                kv, chunks = self._workspace.chunk_kv(engine), {p.chunk_hash: p.chunk.token_ids for p in pieces}
                advance = self._advance(pieces)
                self._report.chunks_prefilled += await kv.precompute_alone(engine, store, chunks, advance)

    def _slices(self, num_pieces: int) -> Iterator[tuple[int, int]]:
        """Yield `(start, end)` of the chunks of each step that averages."""
        start = 0
        while self._workspace.fuses and self._num_contexts > 1 and start < num_pieces:
            end = min(num_pieces, start + self._step_chunks(self._num_contexts - 1))
            yield start, end
            start = end

    async def _average(self, batch: Sequence[Piece], which: range) -> None:
        """Precompute the means of these chunks of a batch, over contexts from the whole batch and the index."""
        pieces = [batch[i] for i in which]
        with self._step(pieces, self._num_contexts - 1):
            engine, store = await self._workspace.start(), self._workspace.store
            kv = self._workspace.chunk_kv(engine)
            chunks = {p.chunk_hash: p.chunk.token_ids for p in pieces if not self._is_dropped(p.draft)}
            hashes = [piece.chunk_hash for piece in batch]
            lengths = {piece.chunk_hash: len(piece.chunk.token_ids) for piece in batch}
            vectors = np.array([piece.vector for piece in batch], np.float32)
            contexts = await asyncio.to_thread(draw_contexts, self._corpus, kv, which, hashes, lengths, vectors)
            await kv.precompute_means(engine, store, chunks, contexts, self._advance(pieces))

    def _enter(self, drafts: Sequence[Draft]) -> None:
        """Enter what is complete into the catalogue, and delete the KV that nothing needs any more."""
        catalog = self._corpus.catalog
        for draft in drafts:
            document, unused = draft.document, {piece.chunk_hash for piece in draft.pieces}
            if not self._is_dropped(draft):
                digest, unused = self._digest_of(document), catalog.chunk_hashes_of([document.id])
                is_new = catalog.document_digest(document.id) is None
                vectors = np.array([piece.vector for piece in draft.pieces], np.float32)
                catalog.put_document(
                    document.id, document.title, digest, [piece.chunk for piece in draft.pieces], vectors
                )
                self._report.documents_new += is_new
                self._report.documents_changed += not is_new
            self._corpus.drafts.discard(draft)
            unused = self._corpus.unneeded(unused)
            if unused:
                self._workspace.store.delete(unused)
            self._report.chunks_deleted += len(unused)

    def _is_dropped(self, draft: Draft) -> bool:
        return draft.dropped or self._is_withdrawn(draft.document.id)

    def _step_chunks(self, num_contexts: int) -> int:
        """Return how many chunks to compute in so many contexts each, so that it takes about `_STEP_S`."""
        return min(_LONGEST_STEP, max(1, round(self._pairs_per_s * _STEP_S / num_contexts)))

    @contextmanager
    def _step(self, pieces: Sequence[Piece], num_contexts: int) -> Iterator[None]:
        """Time a step that computes these chunks in so many contexts each, and count it as done."""
        begin, num_pairs, num_done = time.monotonic(), num_contexts * len(pieces), self._num_done
        yield
        self._pairs_per_s = num_pairs / max(1e-3, time.monotonic() - begin)
        self._num_done = num_done + num_pairs  # some chunks had KV, or are of one text
        self._tell("")

    def _advance(self, pieces: Sequence[Piece]) -> Callable[[str, int], None]:
        """Return what is to be called with a chunk's hash and the number of its contexts that were computed."""
        title_of = {piece.chunk_hash: piece.draft.document.title for piece in pieces}

        def advance(chunk_hash: str, num_contexts: int) -> None:
            self._num_done += num_contexts
            self._tell(title_of[chunk_hash])

        return advance

    def _tell(self, item: str) -> None:
        share = self._num_chars_cut / self._num_chars if self._num_chars else 1
        num_chunks = max(self._num_cut, round(self._num_cut / share)) if 0 < share < 1 else self._num_cut
        self._progress(IngestProgress("prefill", self._num_done, self._num_contexts * num_chunks, item))


def draw_contexts(
    corpus: Corpus,
    kv: ChunkKV,
    which: Sequence[int],
    hashes: Sequence[str],
    lengths: Mapping[str, int],
    vectors: Vectors,
) -> dict[str, list[list[Span]]]:
    """Return what may stand before a chunk in a prompt, the contexts of its mean, for those of these chunks that
    `which` counts up. lengths: in tokens, by hash. vectors: `[n, dim]`."""
    if kv.num_contexts == 1:
        return {}
    ids = sorted(corpus.catalog.chunk_ids())
    drawn = corpus.catalog.chunks(random.Random(0).sample(ids, min(len(ids), _POOL)))
    pool = [*dict.fromkeys([*hashes, *(chunk.chunk_hash for chunk in drawn)])]
    nearest_of = nearest(which, hashes, vectors, corpus.catalog, corpus.index, kv.num_contexts - 1)
    contexts = {hash: contexts_of(hash, near, pool) for hash, near in nearest_of.items()}
    others = {each for of in contexts.values() for context in of for each in context}
    known = {**corpus.catalog.num_tokens(others), **lengths}
    return {
        hash: [[kv.span(other, known[other]) for other in context if other in known] for context in of]
        for hash, of in contexts.items()
    }
