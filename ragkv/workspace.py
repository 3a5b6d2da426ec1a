"""One home and its models, open: what indexing and answering share; and a tenant's search."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

from ragkv import models
from ragkv.answer import Source
from ragkv.background import Idle, Turns
from ragkv.chunk_kv import ChunkKV
from ragkv.config import MAIN, Config, RetrievalConfig
from ragkv.engine.engine import Engine
from ragkv.errors import ConfigError, StoreError
from ragkv.home import NUM_CONTEXTS_SETTING, Home, Owner
from ragkv.index.work import Draft
from ragkv.prompt import PromptLayout
from ragkv.retriever.chunking import Chunker
from ragkv.retriever.encoders import Embedder, Reranker
from ragkv.retriever.hashing import CONTEXTS, chunk_hash, mean_hash
from ragkv.retriever.index import VectorIndex
from ragkv.retriever.keywords import KeywordIndex
from ragkv.retriever.retriever import Hit, Retriever, Scores, merged
from ragkv.store.record import ChunkKey

_UNSUPPORTED_SETTING = "unsupported"  # in the catalogue: why the home's model can't be fused, empty if it can
logger = logging.getLogger(__name__)


class Corpus:
    """One tenant's documents, open: their catalogue, the index of their vectors and, in hybrid mode, of their words.

    drafts: documents that are being indexed, and aren't in the catalogue yet.
    """

    def __init__(self, home: Home, tenant: str, config: RetrievalConfig) -> None:
        self.tenant = tenant
        self.catalog = home.open_catalog(tenant)
        self.index = VectorIndex(self.catalog)
        self.keywords = KeywordIndex(self.catalog) if config.mode == "hybrid" else None
        self.drafts: set[Draft] = set()

    def unneeded(self, chunk_hashes: Iterable[str]) -> set[str]:
        """Return those of these chunks that no document has, nor any draft."""
        return self.catalog.unreferenced(chunk_hashes) - self.drafted

    @property
    def drafted(self) -> set[str]:
        """The hashes of the drafts' chunks. Thread-safe."""
        return {piece.chunk_hash for draft in list(self.drafts) for piece in draft.pieces}


class Workspace:
    """An open home that was checked to belong to the configured models, with the embedder and, once needed, vLLM.

    engine: None until vLLM has started. turns: of what precomputes chunks of documents that are in no catalogue yet, or
    deletes KV that no catalogue mentions. Raises ModelError for a missing model, StoreError for
    a home of another model or version, ConfigError for chunks that fit into no prompt.

    tier: the bucket behind the store, None if there is none. It sends and deletes in a thread of its own.
    """

    def __init__(self, config: Config, report: Callable[[str], None]) -> None:
        self.config, self.home = config, Home(config.home)
        self.folder = models.resolve(config.model.name, self.home.path)
        fingerprint = models.model_fingerprint(self.folder, config.model.dtype, self.home.path)
        self.owner = Owner(f"{config.model.name} in {config.model.dtype}", fingerprint, config.index.embedder)
        self.home.check_owner(self.owner)
        self.main = Corpus(self.home, MAIN, config.retrieval)
        self._corpora = {MAIN: self.main}
        self.layout = PromptLayout(self.folder, thinking=config.model.thinking)
        self._check_chunk_tokens()
        self.anchor_hash = chunk_hash(self.layout.anchor)
        self.chunker = Chunker(self.folder, config.index.chunk_tokens, config.index.chunk_overlap)
        report(f"loading {config.index.embedder}")
        self.embedder = Embedder(models.resolve(config.index.embedder, config.home))
        self._scores: Scores | None = None
        if config.retrieval.reranker is not None:
            self._scores = Reranker(models.resolve(config.retrieval.reranker, self.home.path)).scores
        self.engine: Engine | None = None
        self.num_restarts = 0
        self.idle = Idle(config.server.indexing_patience_s)
        self.turns = Turns(self.idle)
        self._starting = asyncio.Lock()
        self.store = self.home.open_store(**config.store.options())
        try:
            is_quiet = lambda: self.idle.is_quiet  # noqa: E731
            self.tier = self.home.open_tier(self.store, config.store, self._unneeded, is_quiet, self._waiting)
        except (ConfigError, StoreError):
            self.store.close()
            raise
        if self.tier is not None:
            self.tier.start()

    def _check_chunk_tokens(self) -> None:
        config, limits = self.config, (self.config.model.max_model_len, models.context_length(self.folder))
        context = min((limit for limit in limits if limit is not None), default=None)
        if context is None:
            return
        taken = len(self.layout.anchor) + len(self.layout.question_tokens("Why?")) + config.answer.max_tokens
        if config.index.chunk_tokens > context - taken:
            raise ConfigError(
                f"index.chunk_tokens = {config.index.chunk_tokens} is more than fits into the model's context of "
                f"{context} tokens: instruction, question and an answer of answer.max_tokens = "
                f"{config.answer.max_tokens} leave {max(0, context - taken)}; lower one of the two"
                + (", or raise model.max_model_len" if context == config.model.max_model_len else "")
            )

    def corpus(self, tenant: str) -> Corpus:
        """Open a tenant's documents, or return them if they are open. Raises ConfigError for a name that is none."""
        if tenant not in self._corpora:
            self._corpora[tenant] = Corpus(self.home, tenant, self.config.retrieval)
        return self._corpora[tenant]

    @property
    def drafted(self) -> set[str]:
        """The hashes of all tenants' chunks that are being precomputed. Thread-safe."""
        return set().union(*(corpus.drafted for corpus in list(self._corpora.values())))

    def _unneeded(self, chunk_hashes: Iterable[str]) -> set[str]:
        """Return those of these chunks that no document of an open corpus has, nor any draft. Thread-safe."""
        unneeded = set(chunk_hashes) - {self.anchor_hash}
        for corpus in list(self._corpora.values()):
            unneeded = corpus.unneeded(unneeded) if unneeded else unneeded
        return unneeded

    def _waiting(self) -> set[str]:
        """Return what stands in the anchor's place in the keys of entries that only wait for their mean, which takes
        their place: the anchor, where a mean holds both. Thread-safe."""
        return {self.anchor_hash} if len(self.alone_hashes) > 1 else set()

    async def fetch(self, keys: Iterable[ChunkKey]) -> int:
        """Bring entries that aren't stored from the bucket, if there is one, and wait for them: `RemoteTier.fetch`."""
        return 0 if self.tier is None else await self.tier.fetch(keys)

    def retriever(self, corpus: Corpus) -> Retriever:
        """Make a retriever. Each user needs its own, since it remembers questions."""
        embed, candidates = self.embedder.embed_question, self.config.retrieval.candidates
        return Retriever(corpus.catalog, corpus.index, embed, corpus.keywords, self._scores, candidates)

    async def start(self, report: Callable[[str], None] = lambda line: None) -> Engine:
        """Start vLLM, unless it is running, and return it."""
        async with self._starting:
            if self.engine is not None and not self.engine.is_ready:
                logger.error("vLLM has ended; starting it again")
                self.num_restarts += 1
                engine, self.engine = self.engine, None
                await engine.close()
            if self.engine is None:
                report(f"starting vLLM with {self.config.model.name}")
                model, store = self.config.model, self.config.store
                self.engine = await Engine.start(
                    self.folder,
                    model,
                    self.home.kv,
                    self.owner.fingerprint,
                    store.worker_options(),
                    store.prefix_options(self.home.prefixes),
                )
                self.main.catalog.put_setting(_UNSUPPORTED_SETTING, self.engine.unsupported or "")
            return self.engine

    async def close(self) -> None:
        if self.engine is not None:
            await self.engine.close()
        if self.tier is not None:
            await asyncio.to_thread(self.tier.close)
        self.store.close()
        for corpus in self._corpora.values():
            corpus.catalog.close()

    @property
    def fallback(self) -> str | None:
        """Why this model's KV can't be fused, None if it can: as found when vLLM last started on this home."""
        return self.main.catalog.get_setting(_UNSUPPORTED_SETTING) or None

    @property
    def fuses(self) -> bool:
        return self.fallback is None

    @property
    def num_contexts(self) -> int:
        return int(self.main.catalog.get_setting(NUM_CONTEXTS_SETTING) or 1)

    def chunk_kv(self, engine: Engine) -> ChunkKV:
        anchor, fingerprint, joins = self.layout.anchor, self.owner.fingerprint, self.config.store.joins
        return ChunkKV(anchor, fingerprint, engine.kv_heads, self.num_contexts, joins=joins)

    @property
    def alone_hashes(self) -> set[str]:
        """What stands in the anchor's place in the keys of entries that have a chunk's KV after the anchor alone."""
        joins = self.config.store.joins and self.num_contexts > 1
        joined = [mean_hash(self.anchor_hash, CONTEXTS, self.num_contexts, joins=True)] if joins else []
        return {self.anchor_hash, *joined}


class Search:
    """Searches a tenant's documents, and those of other tenants that it may read, as one collection.

    corpora: by their catalogue's scope.
    """

    def __init__(self, workspace: Workspace, tenant: str) -> None:
        tenants, settings = workspace.config.tenants, workspace.config.retrieval
        reads = tenants[tenant].reads if tenant in tenants else []
        self._tenant = tenant
        self.corpora = {corpus.catalog.scope: corpus for corpus in map(workspace.corpus, (tenant, *reads))}
        self._retrievers = [workspace.retriever(corpus) for corpus in self.corpora.values()]
        self._by_rank = settings.mode != "vector" or settings.reranker is not None

    def hits(self, questions: Sequence[str], top_k: int, first: int = 0) -> list[list[Hit]]:
        """Return the best chunks for each question of a conversation from the `first` on, with regard to those before.

        Takes milliseconds for each question: call it in a thread.
        """
        return [self._hits(questions[i], top_k, questions[:i]) for i in range(first, len(questions))]

    @property
    def is_empty(self) -> bool:
        """Whether no document is indexed."""
        return not any(corpus.catalog.has_documents for corpus in self.corpora.values())

    def _hits(self, question: str, top_k: int, before: Sequence[str]) -> list[Hit]:
        hits = [retriever.search(question, top_k, before) for retriever in self._retrievers]
        return merged(hits, top_k, by_rank=self._by_rank)

    def sources(self, hits: Sequence[Hit]) -> list[Source]:
        """Name the documents that hits are from."""
        titles = {
            (scope, id): title
            for scope, corpus in self.corpora.items()
            for id, title in corpus.catalog.titles({h.chunk.document_id for h in hits if h.scope == scope}).items()
        }
        return [self._source(hit, titles.get((hit.scope, hit.chunk.document_id), "")) for hit in hits]

    def _source(self, hit: Hit, title: str) -> Source:
        chunk, owner = hit.chunk, self.corpora[hit.scope].tenant
        corpus = owner if owner != self._tenant else None
        return Source(chunk.document_id, title, chunk.id, chunk.ordinal, hit.score, chunk.text, corpus)
