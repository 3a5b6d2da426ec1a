"""What an ingest is made of: the data that `Pipeline.ingest` reads, works through and reports."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from ragkv.errors import DocumentError
from ragkv.retriever.chunking import ChunkText
from ragkv.retriever.documents import Document

_DOCUMENT_BATCH_CHUNKS = 64


@dataclass(frozen=True)
class IngestProgress:
    """`done` of `total` items of a stage: "load" counts files, "prefill" contexts."""

    stage: str
    done: int
    total: int
    item: str


@dataclass
class IngestReport:
    """What an ingest did. `rejected` documents are not indexed; what was indexed of them before is kept."""

    documents_new: int = 0
    documents_changed: int = 0
    documents_unchanged: int = 0
    documents_removed: int = 0
    chunks_prefilled: int = 0
    chunks_deleted: int = 0
    rejected: list[DocumentError] = field(default_factory=list)


@dataclass(frozen=True)
class Work:
    """A document to index: new, changed, or without KV."""

    document: Document
    digest: str
    chunks: list[ChunkText]


@dataclass
class Scan:
    """What was read: paths of all files, and of those with a rejected document; document ids; the documents to index;
    the ids of documents that vanished since; the report so far."""

    files: set[str] = field(default_factory=set)
    rejected: set[str] = field(default_factory=set)
    documents: set[str] = field(default_factory=set)
    work: list[Work] = field(default_factory=list)
    vanished: list[str] = field(default_factory=list)
    report: IngestReport = field(default_factory=IngestReport)


@dataclass(frozen=True)
class Step:
    """Progress within a batch as progress of the whole."""

    progress: Callable[[IngestProgress], None]
    before: int
    total: int

    def __call__(self, done: int, item: str) -> None:
        self.progress(IngestProgress("prefill", self.before + done, self.total, item))


def batches(work: Sequence[Work]) -> Iterable[list[Work]]:
    """Whole documents, so many that each batch has 64 chunks or more: they survive an interruption this often."""
    batch: list[Work] = []
    for item in work:
        batch.append(item)
        if sum(len(member.chunks) for member in batch) >= _DOCUMENT_BATCH_CHUNKS:
            yield batch
            batch = []
    if batch:
        yield batch
