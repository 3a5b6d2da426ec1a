"""Learns passages from prompts: what recurs in several contexts is precomputed in idle time, and found from then on.

In anybody's `vllm serve`, in the scheduler's process. What lies in vLLM's cache of such a passage has seen the request
that it stood in; so its KV is computed by requests of our own, after the anchor and after other passages, as that of an
index's chunks is. Never across `cache_salt`s.
"""

import logging
import random
import time
from collections import OrderedDict
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

from ragkv.config import LearningConfig
from ragkv.engine.prefixes import WriteBudget
from ragkv.engine.task import MeanTask, PrecomputeTask, Report, Span
from ragkv.errors import RagKVError
from ragkv.retriever.hashing import chunk_hash
from ragkv.retriever.recurring import Recurring
from ragkv.retriever.tokens import SEAM, WINDOW
from ragkv.stored_chunks import Chunks, Lacking, StoredChunks

logger = logging.getLogger(__name__)

_MOST_SALTS = 64  # whose prompts are remembered
_MOST_WAITING = 1024  # passages that are to be learnt
_PAUSE_S = 60.0  # after KV couldn't be stored: the disk may be full
_MOST_BEGINNINGS = 1024  # of prompts, that are remembered
_BEFORE = (1, 2, 3)  # passages that stand before one in a context

Work = Generator[tuple[list[int], PrecomputeTask | MeanTask], bool, None]


class Submit(Protocol):
    """Has vLLM compute tokens with a task, as a request of our own. Returns whether it takes it."""

    def __call__(self, token_ids: list[int], task: PrecomputeTask | MeanTask) -> bool: ...


@dataclass(frozen=True)
class _Passage:
    salt: str | None
    token_ids: tuple[int, ...]


class Learner:
    """Passages that recur in clients' requests, and what is done for each: its KV after the anchor alone, then, when no
    passage waits for that, its mean. At last, for chunks of prompts whose beginning recurs, their KV behind that.

    One task is in work at a time, begun when no client's request is. max_model_len: of the engine.
    """

    def __init__(self, config: LearningConfig, stored: StoredChunks, submit: Submit, max_model_len: int) -> None:
        self._config, self._stored, self._submit, self._max_model_len = config, stored, submit, max_model_len
        self._budget = WriteBudget(config.tokens_per_hour)
        self._prompts: OrderedDict[str | None, Recurring] = OrderedDict()  # by salt
        self._new: OrderedDict[_Passage, None] = OrderedDict()
        self._alone: OrderedDict[_Passage, None] = OrderedDict()  # that lack their mean
        self._beginnings: OrderedDict[tuple[str | None, tuple[int, ...]], None] = OrderedDict()  # of prompts, by salt
        self._lacking: OrderedDict[Lacking, None] = OrderedDict()
        self._serving: dict[str, tuple[Sequence[int], str | None]] = {}  # by request: its prompt and salt
        self._work: Work | None = None
        self._paused_until = 0.0
        self._num_learnt = 0
        self._random = random.Random(0)

    def arrived(self, request_id: str, token_ids: Sequence[int], salt: str | None) -> None:
        """A client's request is in work from now on. token_ids: of its prompt `[n]`, if the tokens are all of it."""
        self._serving[request_id] = (token_ids, salt)

    def finished(self, request_id: str) -> None:
        """A client's request has ended. Now its prompt is looked at: nobody waits."""
        token_ids, salt = self._serving.pop(request_id, ((), None))
        if time.monotonic() >= self._paused_until:
            self._note(token_ids, salt)
        self._begin()

    def computed(self, report: Report | None) -> None:
        """The task in work has ended."""
        if self._work is not None:
            self._go_on(report is not None and not report.failed)

    def take_num_learnt(self) -> int:
        """Return how many passages were learnt since the last call."""
        num_learnt, self._num_learnt = self._num_learnt, 0
        return num_learnt

    def _note(self, token_ids: Sequence[int], salt: str | None) -> None:
        recurring = self._prompts.pop(salt, None) or Recurring(self._config.min_tokens, self._config.max_tokens)
        self._prompts[salt] = recurring
        while len(self._prompts) > _MOST_SALTS:
            self._prompts.popitem(last=False)
        # A part that a chunk has in its middle is known with what stood before it there; by itself it's better.
        known = [(span.start, span.end) for span in self._stored.standing(token_ids, salt) if span.offset <= SEAM]
        for passage in recurring.add(token_ids, known):
            each = _Passage(salt, tuple(passage))
            if each not in self._alone:
                self._new[each] = None
        while len(self._new) > _MOST_WAITING:
            self._new.popitem(last=False)
        self._note_beginning(token_ids, salt)

    def _note_beginning(self, token_ids: Sequence[int], salt: str | None) -> None:
        beginning, lacking = self._stored.lacking(token_ids, salt)
        if not lacking:
            return
        seen = (salt, beginning)
        if seen in self._beginnings:
            self._lacking.update(dict.fromkeys(lacking))
        self._beginnings[seen] = self._beginnings.pop(seen, None)
        for noted, most in ((self._beginnings, _MOST_BEGINNINGS), (self._lacking, _MOST_WAITING)):
            while len(noted) > most:
                noted.popitem(last=False)

    def _begin(self) -> None:
        """Begin with the next passage, if no client's request is in work."""
        while self._work is None and not self._serving and (self._new or self._alone or self._lacking):
            if not self._new and not self._alone:
                lacking, _ = self._lacking.popitem(last=False)
                self._begin_behind(lacking)
                continue
            is_new = bool(self._new)
            passage, _ = (self._new or self._alone).popitem(last=False)
            try:
                if self._is_known(passage):
                    continue
                learnt = self._stored.learnt_by(passage.salt, make=True)
            except RagKVError as error:
                self._pause(error)
                return
            assert learnt is not None
            if is_new and not self._budget.take(len(passage.token_ids)):
                self._new.clear()
                continue
            self._work = self._precomputed(passage, learnt) if is_new else self._averaged(passage, learnt)
            self._go_on(None)

    def _begin_behind(self, lacking: Lacking) -> None:
        num_tokens = len(lacking.beginning) + len(lacking.chunk)
        if num_tokens + 2 <= self._max_model_len and self._budget.take(num_tokens):
            self._work = self._behind(lacking)
            self._go_on(None)

    def _go_on(self, is_done: bool | None) -> None:
        """Go on with the work: is_done: whether its task was done, None: it begins."""
        assert self._work is not None
        try:
            token_ids, task = next(self._work) if is_done is None else self._work.send(is_done)
            if not self._submit(token_ids, task):
                self._work = None
            return
        except StopIteration:
            self._work = None
        except RagKVError as error:
            self._work = None
            self._pause(error)
            return
        if is_done is not None:
            self._begin()

    def _is_known(self, passage: _Passage) -> bool:
        """Return whether chunks have nearly all of a passage by now: another one that ends a few tokens later, say."""
        spans = self._stored.standing(passage.token_ids, passage.salt)
        found = sum(span.end - span.start for span in spans if span.offset <= SEAM)
        return found >= len(passage.token_ids) - 2 * WINDOW

    def _pause(self, error: Exception | str) -> None:
        logger.warning("no passages are learnt for %d s: %s", _PAUSE_S, error)
        self._new.clear()
        self._alone.clear()
        self._lacking.clear()
        self._paused_until = time.monotonic() + _PAUSE_S

    def _precomputed(self, passage: _Passage, learnt: Chunks) -> Work:
        """Precompute the passage after the anchor alone, and the anchor if it isn't stored."""
        kv, entries, anchor = learnt.kv, self._stored.entries, self._stored.layout.anchor
        if not entries.contains(kv.key(kv.anchor_span)) and not (yield anchor, PrecomputeTask(kv.anchor_span)):
            return self._pause("the KV of the prompt's beginning can't be stored")
        alone = self._span(passage, learnt)
        is_stored = kv.is_stored(alone, entries)
        if not is_stored and not (yield [*anchor, *passage.token_ids], PrecomputeTask(alone)):
            return self._pause("the KV of a passage can't be stored")
        if kv.num_contexts > 1:
            self._alone[passage] = None
        else:
            self._put(passage, learnt)

    def _averaged(self, passage: _Passage, learnt: Chunks) -> Work:
        """Precompute the passage's mean over contexts, and have it found."""
        kv, entries = learnt.kv, self._stored.entries
        alone = self._span(passage, learnt)
        if not entries.contains(kv.key(kv.averaged(alone))):
            others = [self._span(each, learnt) for each in self._alone if each.salt == passage.salt]
            others += learnt.some(self._random)
            stored = [span for span in others if span != alone and kv.is_stored(span, entries)]
            contexts = [
                self._random.sample(stored, min(len(stored), self._random.choice(_BEFORE)))
                for _ in range(kv.num_contexts - 1)
            ]
            task = kv.mean_task(alone, contexts, self._max_model_len)
            if not (yield [*self._stored.layout.anchor, *passage.token_ids], task):
                return self._pause("the KV of a passage can't be stored")
        self._put(passage, learnt)

    def _put(self, passage: _Passage, learnt: Chunks) -> None:
        self._stored.put(learnt, passage.token_ids)
        self._num_learnt += 1

    def _behind(self, lacking: Lacking) -> Work:
        """Precompute a chunk behind a beginning of prompts."""
        if not self._stored.is_stored(lacking.span):
            if not (yield [*lacking.beginning, *lacking.chunk], PrecomputeTask(lacking.span)):
                return self._pause("the KV of a passage can't be stored")
            self._stored.drop_if_deleted(lacking.span)

    def _span(self, passage: _Passage, learnt: Chunks) -> Span:
        return learnt.kv.span(chunk_hash(passage.token_ids, learnt.catalog.scope), len(passage.token_ids))
