"""The data of an ingest: the scan of its documents, the work that is left, its progress and its report."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from ragkv.retriever.chunking import ChunkText
from ragkv.retriever.documents import Document

_DOCUMENT_BATCH_CHUNKS = 64


@dataclass(frozen=True)
class IngestProgress:
    """How far a stage is: `done` of `total` items. "load" counts files; "prefill" counts (chunk, context) pairs.

    item: the file's name or the document's title; "" where it is none in particular.
    """

    stage: str
    done: int
    total: int
    item: str


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


@dataclass(frozen=True)
class Work:
    """A document to index: it is new or changed, or chunks of it have no KV."""

    document: Document
    chunks: list[ChunkText]


@dataclass
class Scan:
    """What was read, and what is left to do.

    files: paths of all files. rejected: paths of those with a rejected document. documents: ids of what was read.
    work: the documents to index. missing: ids of indexed documents whose files no longer have them.
    """

    files: set[str] = field(default_factory=set)
    rejected: set[str] = field(default_factory=set)
    documents: set[str] = field(default_factory=set)
    work: list[Work] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    report: IngestReport = field(default_factory=IngestReport)


@dataclass
class PrefillProgress:
    """A counter over all batches of an ingest, which reports each advance."""

    report: Callable[[IngestProgress], None]
    total: int
    done: int = 0

    def advance_to(self, done: int, item: str = "") -> None:
        self.done = done
        self.report(IngestProgress("prefill", done, self.total, item))


def batches(work: Sequence[Work]) -> Iterable[list[Work]]:
    """Yield whole documents in batches of at least 64 chunks; an interruption costs no more than the batch in work."""
    batch: list[Work] = []
    for item in work:
        batch.append(item)
        if sum(len(member.chunks) for member in batch) >= _DOCUMENT_BATCH_CHUNKS:
            yield batch
            batch = []
    if batch:
        yield batch
