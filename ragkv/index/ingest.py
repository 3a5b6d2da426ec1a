"""Documents that become KV, a turn at a time: cut into chunks, embedded, precomputed, and entered into the catalogue.

A turn takes about a second, however large a document is, so that nobody else who indexes has long to wait. Documents
enter the catalogue in batches, whose chunks are contexts for each other's means.

Answers go first: a request that comes breaks the turn off, and while they come without a pause, only a chunk is
precomputed once in a while. A small document needn't wait for a pause, but the means of its chunks do.
"""

import asyncio
import random
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from functools import partial
from typing import Any, TypeVar

import numpy as np

from ragkv.background import SOON_S, AnswerBegunError
from ragkv.chunk_kv import ChunkKV
from ragkv.engine.task import Span
from ragkv.errors import DocumentError
from ragkv.index.work import SMALL_CHARS, Draft, IngestProgress, Piece, Scan
from ragkv.retriever.chunking import ChunkText
from ragkv.retriever.documents import Document
from ragkv.retriever.encoders import Vectors
from ragkv.retriever.hashing import chunk_hash
from ragkv.retriever.index import contexts_of, nearest
from ragkv.workspace import Corpus, Workspace

Postpone = Callable[[Iterable[str]], None]
_T = TypeVar("_T")
BATCH_CHUNKS = 64  # or one document, if that has more
_TURN_S, _STEP_S = 1.0, 0.5  # what others wait for; a turn has several steps
_FIRST_STEP, _LONGEST_STEP = 4, 64  # pairs (chunk, context) of the first step, whose time nobody knows; of any step
_POOL = 64  # chunks of the index from which a batch's contexts are drawn, besides its own


class Ingest:
    """Documents of one corpus in work.

    digest_of: by what the catalogue knows a version of a document. postpone: takes the hashes of chunks whose means
    are to be made when nobody waits.
    """

    def __init__(
        self,
        workspace: Workspace,
        corpus: Corpus,
        documents: Sequence[Document],
        scan: Scan,
        digest_of: Callable[[Document], str],
        postpone: Postpone | None,
    ) -> None:
        self._workspace, self._corpus = workspace, corpus
        self._digest_of, self._is_withdrawn, self._postpone = digest_of, scan.is_withdrawn, postpone
        self._progress, self._report = scan.progress, scan.report
        self._documents = deque(documents)
        self._chunks: Iterator[ChunkText] | None = None  # of the newest draft, as far as they aren't cut
        self._num_contexts = workspace.config.index.num_contexts
        self._num_chars, self._num_chars_cut = sum(len(document.text) for document in documents), 0
        self._num_cut = self._num_done = 0  # chunks; pairs (chunk, context)
        self._pairs_per_s = _FIRST_STEP / _STEP_S
        self._is_small = self._num_chars <= SMALL_CHARS
        self._is_quiet, self._was_broken_off = True, False  # in the turn

    async def turns(self) -> AsyncGenerator[None, None]:
        """Index the documents; yields between two turns. If it ends early, the next try finds the KV made so far."""
        patience_s = SOON_S if self._is_small else self._workspace.idle.patience_s
        async with aclosing(self._steps()) as steps:
            more, waits_until = bool(self._documents), time.monotonic() + patience_s
            while more:
                async with self._workspace.turns.next(waits_until) as self._is_quiet:
                    end = time.monotonic() + (_TURN_S if self._is_quiet or self._is_small else 0)
                    self._was_broken_off = False
                    while True:
                        more = await anext(steps, False)
                        if not more or self._was_broken_off or time.monotonic() > end:
                            break
                if not self._was_broken_off:
                    waits_until = time.monotonic() + patience_s
                if more:
                    yield

    async def _steps(self) -> AsyncGenerator[bool, None]:
        """Do a step, and yield True if there is more."""
        fuses = self._workspace.fuses
        while self._documents:
            pieces: list[Piece] = []
            drafts: list[Draft] = []
            try:
                while taken := await asyncio.to_thread(self._cut, drafts, len(pieces)):
                    pieces += taken
                    async for _ in self._each(taken, self._prefill, 1 if fuses else self._num_contexts):
                        yield True
                    yield True
                postpone = self._postpone if self._is_small and not self._is_quiet else None
                if fuses and self._num_contexts > 1 and postpone is None:
                    average = partial(self._average, pieces)
                    async for _ in self._each(range(len(pieces)), average, self._num_contexts - 1):
                        yield True
                await asyncio.to_thread(self._enter, drafts)
                if postpone is not None:
                    postpone([piece.chunk_hash for piece in pieces])
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
            fresh = [piece for piece in pieces if piece.vector is None]
            texts = [piece.chunk.text for piece in fresh]
            vectors = await asyncio.to_thread(self._workspace.embedder.embed, texts)
            for piece, vector in zip(fresh, vectors, strict=True):
                piece.vector = vector
            engine, store = await self._workspace.start(), self._workspace.store
            if self._workspace.fuses:
                kv, chunks = self._workspace.chunk_kv(engine), {p.chunk_hash: p.chunk.token_ids for p in pieces}
                advance = self._advance(pieces)
                keys = [key for chunk_hash in chunks for key in kv.keys(chunk_hash)]
                self._report.entries_fetched += await self._workspace.fetch(keys)
                self._report.chunks_prefilled += await kv.precompute_alone(engine, store, chunks, advance)

    async def _each(
        self, what: Sequence[_T], work: Callable[[Sequence[_T]], Coroutine[Any, Any, None]], num_contexts: int
    ) -> AsyncGenerator[None, None]:
        """Do the work, a step at a time: each computes chunks in so many contexts. Yields between two steps."""
        while what:
            num_chunks, gives_way = self._step_chunks(num_contexts), self._is_quiet and not self._is_small
            doing = work(what[:num_chunks])
            try:
                await (self._workspace.idle.unless_answering(doing) if gives_way else doing)
                what = what[num_chunks:]
            except AnswerBegunError:
                self._was_broken_off = True
            if what:
                yield

    async def _average(self, batch: Sequence[Piece], which: Sequence[int]) -> None:
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
        if not self._is_quiet and not self._is_small:
            return 1
        return min(_LONGEST_STEP, max(1, round(self._pairs_per_s * _STEP_S / num_contexts)))

    @contextmanager
    def _step(self, pieces: Sequence[Piece], num_contexts: int) -> Iterator[None]:
        """Time a step that computes these chunks in so many contexts each, and count it as done."""
        begin, num_pairs, num_done = time.monotonic(), num_contexts * len(pieces), self._num_done
        try:
            yield
        except BaseException:
            self._num_done = num_done
            raise
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
