"""ragkv in anybody's `vllm serve`: the connector that vLLM loads by its configuration (`ragkv.vllm_config`).

Nothing else of ragkv runs there: what clients send goes to vLLM's own server, with prompts of their own. The connector
finds the home's chunks in them.
"""

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ragkv import models
from ragkv.chunk_kv import ChunkKV
from ragkv.config import MAIN
from ragkv.engine.attached import Attached
from ragkv.engine.connector import RagKVConnector
from ragkv.engine.finding import Finding
from ragkv.engine.reuse_metrics import ReuseMetrics, ReuseStats
from ragkv.engine.task import Span
from ragkv.errors import RagKVError
from ragkv.home import NUM_CONTEXTS_SETTING, Home
from ragkv.policies import Policy
from ragkv.prompt import PromptLayout
from ragkv.retriever.tokens import TokenIndex
from ragkv.store.entries import EntryFolder
from ragkv.store.record import FORMAT_VERSION

logger = logging.getLogger(__name__)


class RagKV(RagKVConnector):
    """The connector for plain vLLM. Where it can't work with the home, vLLM serves as ever; the log says why, once."""

    _problem: str | None = "no worker has attached to its model"
    _chunks: "StoredChunks | None" = None  # on the scheduler's side

    def _options(self) -> dict[str, Any]:
        extra, model = super()._options(), self._vllm_config.model_config
        try:
            home = Path(extra["home"])
            folder = models.resolve(model.model, home)
            dtype = str(model.dtype).removeprefix("torch.")
            fingerprint = models.model_fingerprint(folder, dtype, home)
        except (RagKVError, KeyError) as error:
            logger.warning("ragkv does nothing, vLLM serves as ever: %s", error)
            return {}
        return {**extra, "folder": str(folder), "fingerprint": fingerprint}

    def _finding(self) -> Finding | None:
        if not self._extra:
            return None
        try:
            self._chunks = StoredChunks(self._extra, self._heads())
        except RagKVError as error:
            logger.warning("no chunk will be found in prompts: %s", error)
            return None
        return Finding(self._find, Policy.parse(self._extra["policy"]), self._block_size())

    def _find(self, token_ids: Sequence[int], salt: str | None) -> tuple[Span, ...]:
        """Find chunks if all workers can fuse them: a request that waits for one that can't would wait forever."""
        return self._chunks(token_ids, salt) if self._problem is None and self._chunks is not None else ()

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Take what each worker says before the first request."""
        problems = [each.problem for each in metadata.values() if isinstance(each, Attached)]
        self._problem = next((problem for problem in problems if problem), None) if problems else self._problem

    def _block_size(self) -> int:
        """Return how many tokens a block has that vLLM gives a name to."""
        config = self._kv_cache_config
        return config.hash_block_size or config.kv_cache_groups[0].kv_cache_spec.block_size

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ReuseStats:
        return ReuseStats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, *arguments: Any) -> ReuseMetrics:
        return ReuseMetrics(*arguments)

    def get_kv_connector_stats(self) -> ReuseStats | None:
        totals = self._scheduler.take_totals()
        return ReuseStats(data=dict(totals)) if totals else None

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Attach to the model, which vLLM doesn't hand over: its runner, which calls this, has it."""
        if not self._extra:
            return
        runner = _caller_with("get_model")
        why = "vLLM's runner has no model" if runner is None else self.attach(runner.get_model(), runner.device)
        self._problem = why
        if why:
            logger.warning("no fusion for this model, vLLM serves as ever: %s", why)

    def get_handshake_metadata(self) -> Attached:
        return Attached(self._problem)


class StoredChunks:
    """Finds the chunks of a home's documents in prompts, as far as their KV is stored.

    extra: of the connector. heads: the range of KV heads in an entry. Raises RagKVError if the home can't be used.
    """

    def __init__(self, extra: dict[str, Any], heads: tuple[int, int]) -> None:
        home = Home(Path(extra["home"]))
        self._catalog = home.open_catalog(MAIN)
        self._index = TokenIndex(self._catalog)
        self._entries = EntryFolder(home.kv / f"v{FORMAT_VERSION}")
        self._anchor = PromptLayout(Path(extra["folder"])).anchor
        self._fingerprint, self._heads, self._joins = extra["fingerprint"], heads, bool(extra["joins"])
        self._index.sync()
        self._kv = self._chunk_kv()

    def __call__(self, token_ids: Sequence[int], salt: str | None) -> tuple[Span, ...]:
        if salt is not None:  # whose requests are told apart: the documents are everybody's
            return ()
        if self._index.sync():
            self._kv = self._chunk_kv()
        found = self._index.search(token_ids)
        return tuple(span for span in self._kv.found(token_ids, found) if self._kv.is_stored(span, self._entries))

    def _chunk_kv(self) -> ChunkKV:
        num_contexts = int(self._catalog.get_setting(NUM_CONTEXTS_SETTING) or 1)
        return ChunkKV(self._anchor, self._fingerprint, self._heads, num_contexts, joins=self._joins)


def _caller_with(attribute: str) -> Any:
    """Return the nearest object, among those whose methods have called us, that has an attribute."""
    frame = sys._getframe(1)
    while (frame := frame.f_back) is not None:  # type: ignore[assignment]
        caller = frame.f_locals.get("self")
        if caller is not None and hasattr(caller, attribute):
            return caller
    return None
