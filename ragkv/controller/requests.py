"""Requests for measuring: prompts of known parts, precomputed and timed on a running engine."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

from tokenizers import Tokenizer

from ragkv.chunk_kv import ChunkKV
from ragkv.engine.engine import Engine
from ragkv.engine.task import FuseTask, Report
from ragkv.errors import ConfigError
from ragkv.prompt import Prompt, PromptLayout
from ragkv.retriever.hashing import chunk_hash
from ragkv.store.base import KVStore

QUESTION = "Which statement is used to handle an exception, and what does its else clause do?"


@dataclass(frozen=True)
class Timed:
    """One timed request: its time to first token, and the worker's report."""

    ttft_ms: float
    report: Report


class Bench:
    """A maker of prompts from English text (the Python manual), in chunks of `chunk_tokens` precomputed by `kv`."""

    def __init__(
        self, engine: Engine, layout: PromptLayout, model: Path, kv: ChunkKV, store: KVStore, chunk_tokens: int
    ) -> None:
        self._engine, self._layout, self._kv, self._store = engine, layout, kv, store
        self._chunk_tokens = chunk_tokens
        self._text = text_tokens(model, engine.max_model_len)
        self._question = layout.question_tokens(QUESTION)
        self.precomputed: set[str] = set()  # hashes
        self.shortest = len(layout.anchor) + len(self._question) + 1

    async def prepare(self, num_tokens: int) -> tuple[Prompt, list[str]]:
        """Cut chunks for a prompt of `num_tokens` and precompute them. Returns the prompt and their hashes.

        In the prompt, the last one that was cut comes first. Raises ConfigError for a length that the model's context
        can't hold.
        """
        room = num_tokens - self.shortest + 1
        if room < 1 or num_tokens >= self._engine.max_model_len:
            raise ConfigError(
                f"{num_tokens} tokens can't be measured: the model's context holds {self._engine.max_model_len}, "
                f"and anchor and question alone take {self.shortest - 1}"
            )
        chunks = [self._text[i : min(i + self._chunk_tokens, room)] for i in range(0, room, self._chunk_tokens)][::-1]
        by_hash = {chunk_hash(chunk): chunk for chunk in chunks}
        spans = {hash: self._kv.span(hash, len(chunk)) for hash, chunk in by_hash.items()}
        self.precomputed |= by_hash.keys()
        others = {hash: [span for other, span in spans.items() if other != hash] for hash in by_hash}
        await self._kv.precompute_anchor(self._engine, self._store)
        await self._kv.precompute(self._engine, self._store, by_hash, others)
        return self._layout.assemble(chunks, self._question), list(map(chunk_hash, chunks))

    async def ask(self, prompt: Prompt, task: FuseTask | None) -> Timed:
        """Time one request, without hits in vLLM's prefix cache. task: None for vLLM's own prefill."""
        begin = time.perf_counter()
        ttft_ms, report = 0.0, Report()
        async for output in self._engine.generate(prompt.token_ids, task, max_tokens=1, salt=uuid.uuid4().hex):
            ttft_ms = ttft_ms or 1e3 * (time.perf_counter() - begin)
            report = output.report or report
        return Timed(ttft_ms, report)


def text_tokens(model: Path, num_tokens: int) -> list[int]:
    """Return English prose that comes with every Python: its manual."""
    text = "\n\n".join(topics[name] for name in sorted(topics))[: 20 * num_tokens + 10_000]
    tokens: list[int] = Tokenizer.from_file(str(model / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    return tokens


def without(task: FuseTask, missing: Sequence[int]) -> FuseTask:
    """Return the task without these of its spans, so that they are computed, not loaded; index 0 is the anchor."""
    return FuseTask(tuple(span for i, span in enumerate(task.spans) if i not in missing), task.policy)
