"""ragkv in anybody's `vllm serve`: the connector that vLLM loads by its configuration (`ragkv.vllm_config`).

Nothing else of ragkv runs there: what clients send goes to vLLM's own server, with prompts of their own. The connector
finds the home's chunks in them, and, if it is to, learns what recurs.
"""

import itertools
import logging
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ragkv import models
from ragkv.config import LearningConfig
from ragkv.controller.cost_model import Profile
from ragkv.controller.profile_file import ProfileFile
from ragkv.engine.attached import Attached
from ragkv.engine.callers import caller_with
from ragkv.engine.connector import RagKVConnector
from ragkv.engine.finding import Finding, may_be_fused
from ragkv.engine.own_requests import OwnRequests
from ragkv.engine.reuse_metrics import ReuseMetrics, ReuseStats
from ragkv.engine.task import Report, Span
from ragkv.errors import RagKVError
from ragkv.home import Home
from ragkv.learning import Learner
from ragkv.policies import Policy
from ragkv.stored_chunks import StoredChunks

logger = logging.getLogger(__name__)


class RagKV(RagKVConnector):
    """The connector for plain vLLM. Where it can't work with the home, vLLM serves as ever; the log says why, once."""

    _problem: str | None = "no worker has attached to its model"
    _chunks: StoredChunks | None = None  # on the scheduler's side, as the next two
    _learner: Learner | None = None
    _own: OwnRequests | None = None

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
        return {**extra, "folder": str(folder), "fingerprint": fingerprint, "key": secrets.token_hex(16)}

    def _finding(self) -> Finding | None:
        if not self._extra:
            return None
        try:
            self._chunks = self._open_chunks()
        except RagKVError as error:
            logger.warning("no chunk will be found in prompts: %s", error)
            return None
        policy = Policy.parse(self._extra["policy"])
        return Finding(self._find, policy, self._block_size(), self._profile(policy), self._num_cached)

    def _profile(self, policy: Policy) -> Profile | None:
        """Return what requests take on this machine, if that was measured, and the controller is wanted."""
        extra = self._extra
        if not extra.get("controller"):  # a configuration that was written before has none
            return None
        profile = ProfileFile(Home(Path(extra["home"])).profiles, extra["fingerprint"], extra["codec"], policy).load()
        if profile is None:
            logger.warning(
                "what fusing saves here isn't known; `ragkv profile` measures it: all that is found is fused"
            )
        return profile

    def _num_cached(self, names: Sequence[Any]) -> int:
        """Return how many of these blocks, from the first on, vLLM's prefix cache has."""
        if self._kv_cache_manager is None:
            return 0
        pool, groups = self._kv_cache_manager.block_pool, [*range(len(self._kv_cache_config.kv_cache_groups))]
        return sum(1 for _ in itertools.takewhile(lambda name: pool.get_cached_block(name, groups), names))

    def _open_chunks(self) -> StoredChunks:
        """Open the home's chunks, and learn, if that is wanted. Raises RagKVError if the home can't be used."""
        extra, learning = self._extra, LearningConfig(**self._extra["learning"])
        chunks = StoredChunks(
            Home(Path(extra["home"])),
            Path(extra["folder"]),
            extra["fingerprint"],
            self._heads(),
            extra["num_contexts"],
            joins=bool(extra["joins"]),
            learns=learning.on,
        )
        if learning.on:
            self._own = OwnRequests(extra["key"])
            max_model_len = self._vllm_config.model_config.max_model_len
            self._learner = Learner(learning, chunks, self._own.submit, max_model_len)
        return chunks

    def _find(self, token_ids: Sequence[int], salt: str | None) -> tuple[Span, ...]:
        """Find chunks if all workers can fuse them: a request that waits for one that can't would wait forever."""
        return self._chunks.find(token_ids, salt) if self._problem is None and self._chunks is not None else ()

    def on_new_request(self, request: Any) -> None:
        self._learn(self._arrived, request)
        super().on_new_request(request)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        report = self._scheduler.reports.get(request.request_id)
        result = super().request_finished(request, block_ids)
        self._learn(self._finished, request, report)
        return result

    def _arrived(self, learner: Learner, own: OwnRequests, request: Any) -> None:
        if not own.is_own(request.request_id):
            own.note(request)
            counts = self._problem is None and may_be_fused(request)
            token_ids = request.prompt_token_ids or [] if counts else []
            learner.arrived(request.request_id, token_ids, request.cache_salt)

    def _finished(self, learner: Learner, own: OwnRequests, request: Any, report: Report | None) -> None:
        learner.computed(report) if own.is_own(request.request_id) else learner.finished(request.request_id)

    def _learn(self, step: Callable[..., None], *arguments: Any) -> None:
        """Do a step of learning, if there is any. A fault in it ends it, and no request."""
        if self._learner is not None and self._own is not None:
            try:
                step(self._learner, self._own, *arguments)
            except Exception:
                logger.exception("nothing is learnt any more until vLLM is started again")
                self._learner = None

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
        if self._learner is not None:
            totals["learnt_passages"] += self._learner.take_num_learnt()
        return ReuseStats(data=dict(totals)) if any(totals.values()) else None

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Attach to the model, which vLLM doesn't hand over: its runner, which calls this, has it."""
        if not self._extra:
            return
        runner = caller_with("get_model")
        why = "vLLM's runner has no model" if runner is None else self.attach(runner.get_model(), runner.device)
        self._problem = why
        if why:
            logger.warning("no fusion for this model, vLLM serves as ever: %s", why)

    def get_handshake_metadata(self) -> Attached:
        return Attached(self._problem)
