"""One home and its models, open: what indexing and answering share."""

import asyncio
from collections.abc import Callable, Iterable

from ragkv import models
from ragkv.chunk_kv import ChunkKV
from ragkv.config import Config, RetrievalConfig
from ragkv.engine.engine import Engine
from ragkv.home import CAPTURES_SETTING, Home, Owner
from ragkv.prompt import PromptLayout
from ragkv.retriever.embedder import Embedder
from ragkv.retriever.hashing import chunk_hash
from ragkv.retriever.index import VectorIndex
from ragkv.retriever.reranker import Reranker
from ragkv.retriever.retriever import Retriever
from ragkv.store.segment_store import SegmentStore

_UNSUPPORTED_SETTING = "unsupported"  # in the catalogue: why the home's model can't be fused, empty if it can


class Workspace:
    """Opens a home, after checking that it belongs to the configured models, and loads the embedder. vLLM starts with
    the first work that needs it.

    engine: None until then. store: another object afterwards. Raises ModelError for a missing model, StoreError for a
    home of another model or version.
    """

    def __init__(self, config: Config, report: Callable[[str], None]) -> None:
        self.config, self.home = config, Home(config.home)
        self.folder = models.resolve(config.model.name, self.home.path)
        fingerprint = models.model_fingerprint(self.folder, config.model.dtype, self.home.path)
        self.owner = Owner(f"{config.model.name} in {config.model.dtype}", fingerprint, config.index.embedder)
        self.catalog = self.home.open_catalog()
        self.home.check_owner(self.catalog, self.owner)
        report(f"loading {config.index.embedder}")
        self.layout = PromptLayout(self.folder)
        self.anchor_hash = chunk_hash(self.layout.anchor)
        self.embedder = Embedder(models.resolve(config.index.embedder, config.home))
        self.index = VectorIndex(self.home.index)
        self.retriever = self._retriever(config.retrieval)
        self.store: SegmentStore = self.home.open_store()
        self.engine: Engine | None = None
        self._starting = asyncio.Lock()

    def _retriever(self, config: RetrievalConfig) -> Retriever:
        keywords = reranker = None
        if config.mode == "hybrid":
            from ragkv.retriever.keywords import KeywordIndex  # its library takes a second to import

            keywords = KeywordIndex()
        if config.reranker is not None:
            reranker = Reranker(models.resolve(config.reranker, self.home.path))
        return Retriever(self.catalog, self.index, self.embedder, keywords, reranker, config.candidates)

    async def start(self, report: Callable[[str], None] = lambda line: None) -> Engine:
        """Start vLLM, if it isn't running."""
        async with self._starting:
            if self.engine is None:
                report(f"starting vLLM with {self.config.model.name}")
                self.store.close()  # an open SQLite must not be carried into vLLM's processes
                model = self.config.model
                self.engine = await Engine.start(
                    self.folder, model, self.home.kv, self.owner.fingerprint, self.config.store.worker_options()
                )
                self.store = self.home.open_store()
                self.catalog.put_setting(_UNSUPPORTED_SETTING, self.engine.unsupported or "")
            return self.engine

    async def close(self) -> None:
        if self.engine is not None:
            await self.engine.close()
        self.store.close()
        self.catalog.close()

    @property
    def fallback(self) -> str | None:
        """Why this model's KV can't be fused, None if it can: as found out when vLLM last started on this home."""
        return self.catalog.get_setting(_UNSUPPORTED_SETTING) or None

    @property
    def fuses(self) -> bool:
        return self.fallback is None

    def chunk_kv(self, engine: Engine) -> ChunkKV:
        captures = int(self.catalog.get_setting(CAPTURES_SETTING) or 1)
        return ChunkKV(self.layout.anchor, self.owner.fingerprint, engine.kv_heads, captures)

    def forget(self, hashes: Iterable[str]) -> int:
        """Delete the KV of these chunks unless some document still has them. Returns how many chunks went."""
        gone = self.catalog.unreferenced(hashes)
        if gone:
            self.store.delete(gone)
        return len(gone)
