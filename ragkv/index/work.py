"""What an ingest works on, and what it tells: documents on their way into the catalogue, progress, a report."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ragkv.retriever.chunking import ChunkText
from ragkv.retriever.documents import Document

SMALL_CHARS = 16_000  # of what is indexed also beside answers: some ten chunks


@dataclass(frozen=True)
class IngestProgress:
    """How far a stage is: `done` of `total` items. "load" counts files; "prefill" counts (chunk, context) pairs, their
    total estimated by the length of what isn't cut yet; "send" counts entries on their way to the bucket.

    item: the file's name or the document's title; "" where it is none in particular.
    """

    stage: str
    done: int
    total: int
    item: str


ReportProgress = Callable[[IngestProgress], None]


@dataclass
class IngestReport:
    """The result of an ingest. rejected: why documents are not indexed; what was indexed of them before is kept.
    hint_refused: why the KV isn't treated as was asked, although the documents are indexed; None if it is.

    Of the bucket behind the store, if there is one: entries that came from it, entries that aren't in it yet, and
    chunks whose deletion it hasn't heard of.
    """

    documents_new: int = 0
    documents_changed: int = 0
    documents_unchanged: int = 0
    documents_removed: int = 0
    chunks_prefilled: int = 0
    chunks_deleted: int = 0
    entries_fetched: int = 0
    entries_unsent: int = 0
    chunks_unreached: int = 0
    hint_refused: str | None = None
    rejected: list[str] = field(default_factory=list)


@dataclass
class Scan:
    """What was read, what is left to do, and who is told of the progress.

    is_withdrawn: whether a document, by its id, is not to be indexed any more.
    files: paths of all files. rejected: paths of those with a rejected document. documents: ids of what was read.
    work: the documents that are new or changed, or chunks of them have no KV. missing: ids of indexed documents whose
    files no longer have them.
    """

    progress: ReportProgress = lambda step: None
    is_withdrawn: Callable[[str], bool] = lambda id: False
    files: set[str] = field(default_factory=set)
    rejected: set[str] = field(default_factory=set)
    documents: set[str] = field(default_factory=set)
    work: list[Document] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    report: IngestReport = field(default_factory=IngestReport)


@dataclass(eq=False)
class Draft:
    """A document that isn't in the catalogue yet: its chunks as far as they have been cut.

    dropped: it was deleted, or can't be indexed, and isn't to enter the catalogue.
    """

    document: Document
    pieces: list["Piece"] = field(default_factory=list)
    dropped: bool = False


@dataclass(eq=False)
class Piece:
    """A chunk of a draft. vector: `[dim]`, once it is embedded."""

    draft: Draft
    chunk: ChunkText
    chunk_hash: str
    vector: npt.NDArray[np.float32] | None = None
