"""One home and its models, open: what indexing and answering share."""

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from ragkv import models
from ragkv.background import Idle
from ragkv.chunk_kv import ChunkKV
from ragkv.config import MAIN, Config, RetrievalConfig
from ragkv.engine.engine import Engine
from ragkv.home import NUM_CONTEXTS_SETTING, Home, Owner
from ragkv.prompt import PromptLayout
from ragkv.retriever.chunking import Chunker
from ragkv.retriever.embedder import Embedder
from ragkv.retriever.hashing import chunk_hash
from ragkv.retriever.index import VectorIndex
from ragkv.retriever.reranker import Reranker
from ragkv.retriever.retriever import Retriever

if TYPE_CHECKING:
    from ragkv.retriever.keywords import KeywordIndex

_UNSUPPORTED_SETTING = "unsupported"  # in the catalogue: why the home's model can't be fused, empty if it can
logger = logging.getLogger(__name__)


class Corpus:
    """One tenant's documents, open: their catalogue, the index of their vectors and, in hybrid mode, of their words."""

    def __init__(self, home: Home, tenant: str, config: RetrievalConfig) -> None:
        self.tenant = tenant
        self.catalog = home.open_catalog(tenant)
        self.index = VectorIndex(self.catalog)
        self.keywords: KeywordIndex | None = None
        if config.mode == "hybrid":
            from ragkv.retriever import keywords  # its library takes a second to import

            self.keywords = keywords.KeywordIndex(self.catalog)


class Workspace:
    """An open home that was checked to belong to the configured models, with the embedder and, once needed, vLLM.

    engine: None until vLLM has started. precomputing: a lock for precomputing chunks of documents that are in no
    catalogue yet, and for deleting KV that no catalogue mentions. Raises ModelError for a missing model, StoreError for
    a home of another model or version.
    """

    def __init__(self, config: Config, report: Callable[[str], None]) -> None:
        self.config, self.home = config, Home(config.home)
        self.folder = models.resolve(config.model.name, self.home.path)
        fingerprint = models.model_fingerprint(self.folder, config.model.dtype, self.home.path)
        self.owner = Owner(f"{config.model.name} in {config.model.dtype}", fingerprint, config.index.embedder)
        self.home.check_owner(self.owner)
        self.main = Corpus(self.home, MAIN, config.retrieval)
        self._corpora = {MAIN: self.main}
        report(f"loading {config.index.embedder}")
        self.layout = PromptLayout(self.folder)
        self.anchor_hash = chunk_hash(self.layout.anchor)
        self.chunker = Chunker(self.folder, config.index.chunk_tokens, config.index.chunk_overlap)
        self.embedder = Embedder(models.resolve(config.index.embedder, config.home))
        self._reranker: Reranker | None = None
        if config.retrieval.reranker is not None:
            self._reranker = Reranker(models.resolve(config.retrieval.reranker, self.home.path))
        self.store = self.home.open_store()
        self.engine: Engine | None = None
        self.num_restarts = 0
        self.idle, self.precomputing = Idle(), asyncio.Lock()
        self._starting = asyncio.Lock()

    def corpus(self, tenant: str) -> Corpus:
        """Open a tenant's documents, or return them if they are open. Raises ConfigError for a name that is none."""
        if tenant not in self._corpora:
            self._corpora[tenant] = Corpus(self.home, tenant, self.config.retrieval)
        return self._corpora[tenant]

    def retriever(self, corpus: Corpus) -> Retriever:
        """Make a retriever. Each user needs its own, since it remembers questions."""
        candidates = self.config.retrieval.candidates
        return Retriever(corpus.catalog, corpus.index, self.embedder, corpus.keywords, self._reranker, candidates)

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
                model = self.config.model
                self.engine = await Engine.start(
                    self.folder, model, self.home.kv, self.owner.fingerprint, self.config.store.worker_options()
                )
                self.main.catalog.put_setting(_UNSUPPORTED_SETTING, self.engine.unsupported or "")
            return self.engine

    async def close(self) -> None:
        if self.engine is not None:
            await self.engine.close()
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

    def chunk_kv(self, engine: Engine) -> ChunkKV:
        num_contexts = int(self.main.catalog.get_setting(NUM_CONTEXTS_SETTING) or 1)
        return ChunkKV(self.layout.anchor, self.owner.fingerprint, engine.kv_heads, num_contexts)
