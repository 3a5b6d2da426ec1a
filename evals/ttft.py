"""`ragkv eval ttft`: time to first token by fused KV beside vLLM's own prefill of the same prompt.

Everything runs on one engine, interleaved: in each round the baseline, then every policy. The baseline is a plain vLLM
request; nothing is taken from vLLM's prefix cache by either side. Medians over the rounds.
"""

import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from statistics import median
from typing import Any

from tokenizers import Tokenizer

from ragkv import models
from ragkv.chunk_kv import ChunkKV
from ragkv.config import Config, IndexConfig
from ragkv.engine.engine import Engine
from ragkv.engine.job import FuseTask, Report
from ragkv.errors import ConfigError, ModelError
from ragkv.policies import Policy
from ragkv.prompt import Prompt, PromptLayout
from ragkv.retriever.hashing import chunk_hash
from ragkv.store.segment_store import SegmentStore

QUESTION = "Which statement is used to handle an exception, and what does its else clause do?"


@dataclass(frozen=True)
class _Sample:
    ttft_ms: float
    report: Report


async def run(
    config: Config,
    tokens: Sequence[int],
    policies: Sequence[Policy],
    repeats: int,
    emit: Callable[[dict[str, Any]], None],
) -> None:
    """Measure, and `emit` one row for each prompt length and policy as soon as it is known.

    tokens: prompt lengths, cut from English text (the Python manual) in chunks of `index.chunk_tokens`, captured as an
    index is: `index.captures` times, behind the text's other chunks. KV is stored in a temporary folder. Raises
    ConfigError for a length that the model's context can't hold.
    """
    folder = models.resolve(config.model.name, config.home)
    layout = PromptLayout(folder)
    with tempfile.TemporaryDirectory(prefix="ragkv-ttft-") as store:
        engine = await Engine.start(folder, config.model, Path(store), "0" * 32, config.store.options())
        try:
            if engine.unsupported:
                raise ModelError(f"nothing to measure, {config.model.name} can't be fused: {engine.unsupported}")
            bench = _Bench(engine, layout, _text_tokens(folder, max(tokens)), config.index, SegmentStore(Path(store)))
            for num_tokens in tokens:
                for row in await bench.measure(num_tokens, policies, repeats):
                    emit({**row, "repeats": repeats, "model": config.model.name, "dtype": config.model.dtype})
        finally:
            await engine.close()


class _Bench:
    def __init__(
        self, engine: Engine, layout: PromptLayout, text: list[int], index: IndexConfig, store: SegmentStore
    ) -> None:
        self._engine, self._layout, self._text, self._store = engine, layout, text, store
        self._chunk_tokens = index.chunk_tokens
        self._question = layout.question_tokens(QUESTION)
        self._kv = ChunkKV(layout.anchor, "0" * 32, engine.kv_heads, index.captures)

    async def measure(self, num_tokens: int, policies: Sequence[Policy], repeats: int) -> list[dict[str, Any]]:
        """Rows of one prompt length. The first round warms up and isn't counted."""
        prompt, digests = await self._prepare(num_tokens)
        samples: list[list[_Sample]] = [[] for _ in policies]
        baseline: list[_Sample] = []
        for _ in range(1 + repeats):
            baseline.append(await self._ask(prompt, None))
            for policy, collected in zip(policies, samples, strict=True):
                collected.append(await self._ask(prompt, self._kv.task(prompt, digests, policy, self._store)))
        baseline_ms = median(sample.ttft_ms for sample in baseline[1:])
        return [
            _row(prompt, policy, collected[1:], baseline_ms)
            for policy, collected in zip(policies, samples, strict=True)
        ]

    async def _prepare(self, num_tokens: int) -> tuple[Prompt, list[str]]:
        """Cut the chunks and capture them; in the prompt, the last one cut comes first. Returns their hashes too."""
        anchor = self._layout.anchor
        room = num_tokens - len(anchor) - len(self._question)
        if room < 1 or num_tokens >= self._engine.max_model_len:
            raise ConfigError(
                f"{num_tokens} tokens can't be measured: the model's context holds {self._engine.max_model_len}, "
                f"and anchor and question alone take {len(anchor) + len(self._question)}"
            )
        chunks = [self._text[i : min(i + self._chunk_tokens, room)] for i in range(0, room, self._chunk_tokens)][::-1]
        by_hash = {chunk_hash(chunk): chunk for chunk in chunks}
        spans = {digest: self._kv.span(digest, len(chunk)) for digest, chunk in by_hash.items()}
        others = {digest: [span for other, span in spans.items() if other != digest] for digest in by_hash}
        await self._kv.capture_anchor(self._engine, self._store)
        await self._kv.capture(self._engine, self._store, by_hash, others)
        return self._layout.assemble(chunks, self._question), list(map(chunk_hash, chunks))

    async def _ask(self, prompt: Prompt, task: FuseTask | None) -> _Sample:
        begin = time.perf_counter()
        ttft_ms, report = 0.0, Report()
        async for output in self._engine.generate(prompt.token_ids, task, max_tokens=1, salt=uuid.uuid4().hex):
            ttft_ms = ttft_ms or 1e3 * (time.perf_counter() - begin)
            report = output.report or report
        return _Sample(ttft_ms, report)


def _row(prompt: Prompt, policy: Policy, samples: Sequence[_Sample], baseline_ms: float) -> dict[str, Any]:
    ttft_ms = median(sample.ttft_ms for sample in samples)
    report = samples[-1].report
    stages = {
        name: round(median(getattr(sample.report, name) for sample in samples), 1)
        for name in ("load_ms", "probe_ms", "recompute_ms")
    }
    return {
        "tokens": len(prompt.token_ids),
        "policy": policy.title,
        "budget": {"none": 0.0, "full": 1.0}.get(policy.name, policy.budget),
        "ttft_ms": round(ttft_ms, 1),
        "baseline_ttft_ms": round(baseline_ms, 1),
        "speedup": round(baseline_ms / ttft_ms, 2),
        "reused_tokens": report.reused_tokens,
        "recomputed_tokens": report.recomputed_tokens + 1,  # vLLM computes the prompt's last token itself
        **stages,
    }


def _text_tokens(folder: Path, num_tokens: int) -> list[int]:
    """English prose that every Python carries: its manual."""
    text = "\n\n".join(topics[name] for name in sorted(topics))[: 20 * num_tokens + 10_000]
    tokens: list[int] = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    return tokens
