"""`ragkv eval quality`: how far fused answers drift from full prefill, and what they score.

Every example is run on one engine by vLLM's own full prefill and by each policy over the same tokens. Drift is measured
with teacher forcing, over the whole vocabulary. What is known of an example and a policy goes to a file at once, so a
long run can be interrupted and goes on where it stopped.
"""

import asyncio
import json
import random
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from ragkv import models
from ragkv.background import canary
from ragkv.chunk_kv import ChunkKV
from ragkv.config import Config
from ragkv.engine.engine import Engine
from ragkv.engine.task import ROOT_HASH, FuseTask, PrecomputeTask, Span
from ragkv.errors import ConfigError, ModelError
from ragkv.evals import rows as result_rows
from ragkv.evals import scores
from ragkv.evals.datasets import Dataset, Example
from ragkv.policies import FULL, Policy
from ragkv.prompt import Prompt, PromptLayout
from ragkv.retriever.embedder import Embedder
from ragkv.retriever.hashing import chunk_hash
from ragkv.store.segment_store import SegmentStore

KV_KINDS = {
    "alone": "each chunk captured by itself, without the anchor",
    "anchor": "each chunk captured once, behind the anchor",
    "random": "averaged behind the anchor and each of some random other chunks; the first chunk exact",
    "near": "averaged behind the anchor and each of its nearest other chunks; the first chunk exact",
}
DEFAULT_KV = "near"  # as the product does
MAX_CHUNKS, POOL_SIZE = 10, 24
CORPUS_EXAMPLES = 300  # of which the nearest chunks are taken; more, where more are run
KEPT_BYTES = 24 << 30  # KV that coming examples need is kept up to this size, or half of the free disk
GREEDY_TOKENS, GOLD_TOKENS = 16, 48


@dataclass(frozen=True)
class Arm:
    """One way of answering to be measured: a policy over chunk KV of one kind."""

    policy: Policy
    kv: str

    @classmethod
    def parse(cls, text: str) -> "Arm":
        """Read `query:0.05@anchor`; the kind is `near` where none is given. Raises ConfigError."""
        policy, _, kv = text.partition("@")
        if (kv or DEFAULT_KV) not in KV_KINDS:
            raise ConfigError(f"unknown kind of KV {kv!r} in {text!r}; choose one of {', '.join(KV_KINDS)}")
        return cls(Policy.parse(policy), kv or DEFAULT_KV)

    @property
    def label(self) -> str:
        return f"{self.policy.label}@{self.kv}"


@dataclass(frozen=True)
class Settings:
    """examples: how many are run, from the first on; captures: how many are averaged; ttft_examples: on how many
    examples times are taken, one request at a time."""

    examples: int = 50
    captures: int = 4
    ttft_examples: int = 10
    chunk_tokens: int = 512


async def run(
    config: Config,
    dataset: Dataset,
    arms: Sequence[Arm],
    settings: Settings,
    out: Path,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[dict[str, Any]]:
    """Evaluate what `out`, a JSONL file, hasn't got yet, append it there, and return a summary row for each arm.

    progress gets the number of examples done and their total. KV lives in a temporary folder beside `out`. Raises
    ConfigError if `out` is of a run with other settings.
    """
    identity = {
        "dataset": dataset.name,
        "score_name": dataset.score,
        "score_ceiling": round(dataset.ceiling, 4),
        "model": config.model.name,
        "dtype": config.model.dtype,
        "captures": settings.captures,
        "codec": config.store.codec,
        "chunk_tokens": settings.chunk_tokens,
    }
    done = result_rows.read(out, identity)
    examples = dataset.examples[: settings.examples]
    todo = [e for e in examples if any((e.id, arm.label) not in done for arm in arms)]
    progress(len(examples) - len(todo), len(examples))
    if todo:
        folder = models.resolve(config.model.name, config.home)
        with tempfile.TemporaryDirectory(prefix="ragkv-quality-", dir=out.parent) as store:
            engine = await Engine.start(folder, config.model, Path(store), "0" * 32, config.store.options())
            try:
                if engine.unsupported:
                    raise ModelError(f"nothing to measure, {config.model.name} can't be fused: {engine.unsupported}")
                bench = _Bench(engine, config, dataset, settings, SegmentStore(Path(store)))
                await bench.prepare(arms, out.with_suffix(".npy"))
                needs = [bench.chunk_hashes(example) for example in todo]
                with out.open("a") as file:
                    for i, example in enumerate(todo):
                        missing = [arm for arm in arms if (example.id, arm.label) not in done]
                        timed = examples.index(example) < settings.ttft_examples
                        for row in await bench.evaluate(example, missing, timed=timed):
                            done[example.id, row["arm"]] = row
                            file.write(json.dumps({**identity, **row}) + "\n")
                        file.flush()
                        await asyncio.to_thread(bench.forget, needs[i + 1 :])
                        progress(len(examples) - len(todo) + i + 1, len(examples))
            finally:
                await engine.close()
    ids = [example.id for example in examples]
    return [result_rows.summary([{**identity, **done[id, arm.label]} for id in ids]) for arm in arms]


class _Bench:
    def __init__(
        self, engine: Engine, config: Config, dataset: Dataset, settings: Settings, store: SegmentStore
    ) -> None:
        self._engine, self._config, self._dataset, self._settings = engine, config, dataset, settings
        self._store = store
        self._kept_bytes = min(KEPT_BYTES, shutil.disk_usage(store.disk.path).free // 2)
        folder = models.resolve(config.model.name, config.home)
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._layout = PromptLayout(folder, dataset.instruction, dataset.asking, dataset.cue)
        self._kv = {
            kind: ChunkKV(self._layout.anchor, "0" * 32, engine.kv_heads, captures, kind)
            for kind, captures in (("anchor", 1), ("random", settings.captures), ("near", settings.captures))
        }
        self._pool: dict[str, list[int]] = {}  # random others
        self._nearest: dict[str, list[str]] = {}
        self._corpus: dict[str, list[int]] = {}

    async def prepare(self, arms: Sequence[Arm], vectors: Path) -> None:
        """Warm up, and get ready what averages see. vectors: a file that keeps those of the corpus between runs."""
        kinds, anchor = {arm.kv for arm in arms}, self._layout.anchor
        await self._kv["anchor"].precompute_anchor(self._engine, self._store)
        if "random" in kinds:
            examples = random.Random(0).sample(self._dataset.examples, min(POOL_SIZE, len(self._dataset.examples)))
            self._pool = _by_hash(self._chunks(example)[0] for example in examples)
            await self._kv["anchor"].precompute(self._engine, self._store, self._pool, {})
        if "near" in kinds:
            corpus = self._dataset.examples[: max(CORPUS_EXAMPLES, self._settings.examples)]
            self._corpus = _by_hash(chunk for example in corpus for chunk in self._chunks(example))
            self._nearest = await asyncio.to_thread(self._find_nearest, vectors)
        await self._generate([*anchor, *anchor], None, max_tokens=2)

    def _find_nearest(self, file: Path) -> dict[str, list[str]]:
        if file.exists() and len(kept := np.load(file)) == len(self._corpus):
            vectors = kept
        else:
            embedder = Embedder(models.resolve(self._config.index.embedder, self._config.home))
            vectors = embedder.embed([self._tokenizer.decode(chunk) for chunk in self._corpus.values()])
            np.save(file, vectors)
        digests, count = list(self._corpus), self._settings.captures - 1
        best = [np.argsort(-row)[: count + 1] for row in vectors @ vectors.T]
        return {h: [digests[j] for j in best[i] if j != i][:count] for i, h in enumerate(digests)}

    async def evaluate(self, example: Example, arms: Sequence[Arm], *, timed: bool) -> list[dict[str, Any]]:
        """A row for each arm."""
        chunks = self._chunks(example)
        question = self._layout.question_tokens(example.question)
        other_tokens = len(self._layout.anchor) + len(question) + self._dataset.max_tokens + GOLD_TOKENS
        room = self._engine.max_model_len - other_tokens
        while sum(map(len, chunks)) > room:
            chunks.pop()
        prompt = self._layout.assemble(chunks, question)
        salt = uuid.uuid4().hex
        full_tokens, baseline_ms = await self._generate(
            prompt.token_ids, None, max_tokens=max(GREEDY_TOKENS, self._dataset.max_tokens), salt=salt, ignore_eos=True
        )
        greedy = full_tokens[:GREEDY_TOKENS]
        gold = self._encode(f"{' ' if self._dataset.cue else ''}{example.answers[0]}")[:GOLD_TOKENS]
        full_task = FuseTask((), FULL)
        (of_greedy, of_gold), _ = await self._engine.score(prompt.token_ids, full_task, (greedy, gold), salt)
        await self._capture(_by_hash(chunks), {arm.kv for arm in arms})
        tasks = [self._task(prompt, chunks, arm) for arm in arms]
        salts = [uuid.uuid4().hex for _ in arms]
        drifts = [
            await self._engine.score(prompt.token_ids, task, (greedy, gold), of_arm)
            for task, of_arm in zip(tasks, salts, strict=True)
        ]
        answers = await asyncio.gather(  # behind the blocks that were fused for the log-probabilities
            *(
                self._generate(prompt.token_ids, task, max_tokens=self._dataset.max_tokens, salt=of_arm)
                for task, of_arm in zip(tasks, salts, strict=True)
            )
        )
        full_answer = self._text(full_tokens[: self._dataset.max_tokens])
        rows = []
        for arm, task, (tokens, _), drift in zip(arms, tasks, answers, drifts, strict=True):
            (greedy_rows, gold_rows), report = drift
            kl = np.concatenate([canary.kl(of_greedy, greedy_rows), canary.kl(of_gold, gold_rows)])
            ttft_ms = (await self._generate(prompt.token_ids, task, max_tokens=1))[1] if timed else None
            answer = self._text(tokens)
            shown = {}
            if example is self._dataset.examples[0]:  # for the report's picture of a prompt
                pieces = [self._tokenizer.decode([token], skip_special_tokens=False) for token in prompt.token_ids]
                shown = {
                    "pieces": pieces,
                    "chunk_ranges": prompt.chunk_ranges,
                    "recomputed_runs": report.tokens.recomputed_runs,
                    "answer": answer,
                    "answer_full": full_answer,
                }
            rows.append(
                {
                    "example": example.id,
                    "arm": arm.label,
                    "policy": arm.policy.name,
                    "budget": {"none": 0.0, "full": 1.0}.get(arm.policy.name, arm.policy.budget),
                    "kv": arm.kv,
                    "kl": float(kl.mean()),
                    "agreement": float((greedy_rows.argmax(1) == np.array(greedy)).mean()),
                    "gold_nll": _nll(gold_rows, gold),
                    "gold_nll_full": _nll(of_gold, gold),
                    "score": self._score(answer, example),
                    "score_full": self._score(full_answer, example),
                    "word_f1": scores.word_f1(answer, example.answers),
                    "word_f1_full": scores.word_f1(full_answer, example.answers),
                    "tokens": len(prompt.token_ids),
                    "recomputed_share": sum(end - start for start, end in report.tokens.recomputed_runs)
                    / prompt.chunk_ranges[-1][1],
                    "covered": report.votes.covered,
                    "evenness": report.votes.evenness,
                    "ttft_ms": ttft_ms,
                    "baseline_ttft_ms": baseline_ms,
                    **shown,
                }
            )
        return rows

    def chunk_hashes(self, example: Example) -> set[str]:
        return set(map(chunk_hash, self._chunks(example)))

    def forget(self, coming: Iterable[set[str]]) -> None:
        """Delete the KV that no coming example needs; if the rest is too large, all of it but the pool's and the
        anchor's. coming: the hashes of their chunks."""
        anchor_hash = self._kv["anchor"].anchor_hash
        always = {*self._pool, anchor_hash}
        own = always.union(*coming)
        seen = {other for digest in own for other in self._nearest.get(digest, ())}  # by averages, once captured
        keys = self._store.keys()
        needed = {k for k in keys if k.chunk_hash in own or (k.chunk_hash in seen and k.anchor_hash == anchor_hash)}
        self._store.delete_keys(set(keys) - needed)
        if self._store.admin.stats().size_bytes >= self._kept_bytes:
            self._store.delete(set(self._store.chunk_hashes()) - always)

    def _chunks(self, example: Example) -> list[list[int]]:
        """Token ids; long chunks are cut in pieces, as the indexer would."""
        size, pieces = self._settings.chunk_tokens, []
        for text in example.chunks:
            tokens = self._encode(text)
            if len(tokens) > 1.3 * size:
                pieces += [tokens[i : i + size] for i in range(0, len(tokens), size)]
            else:
                pieces.append(tokens)
        return pieces[:MAX_CHUNKS]

    async def _capture(self, chunks: dict[str, list[int]], kinds: set[str]) -> None:
        """Make the example's KV of all kinds, and that of the chunks that its averages see."""
        engine, store, once = self._engine, self._store, self._kv["anchor"]
        if "alone" in kinds:
            spans = [Span(0, len(chunk), digest, ROOT_HASH) for digest, chunk in chunks.items()]
            missing = [span for span in spans if not store.contains(once.key(span))]
            await asyncio.gather(*(engine.precompute(chunks[s.chunk_hash], PrecomputeTask(s)) for s in missing))
        if "anchor" in kinds:
            await once.precompute(engine, store, chunks, {})
        if "random" in kinds:
            pool = {h: once.span(h, len(chunk)) for h, chunk in self._pool.items()}
            others = {h: random.Random(h).sample([*pool.values()], len(pool)) for h in chunks}
            others = {h: [other for other in found if other.chunk_hash != h] for h, found in others.items()}
            await self._kv["random"].precompute(engine, store, chunks, others)
        if "near" in kinds:
            seen = {other: self._corpus[other] for digest in chunks for other in self._nearest[digest]}
            await once.precompute(engine, store, seen, {})
            others = {h: [once.span(o, len(self._corpus[o])) for o in self._nearest[h]] for h in chunks}
            await self._kv["near"].precompute(engine, store, chunks, others)

    def _task(self, prompt: Prompt, chunks: Sequence[Sequence[int]], arm: Arm) -> FuseTask:
        digests = list(map(chunk_hash, chunks))
        if arm.kv != "alone":
            return self._kv[arm.kv].task(prompt, digests, arm.policy, self._store)
        ranges = zip(digests, prompt.chunk_ranges, strict=True)
        spans = [Span(start, end, digest, ROOT_HASH) for digest, (start, end) in ranges]
        return FuseTask((self._kv["anchor"].anchor_span, *spans), arm.policy)

    async def _generate(
        self, token_ids: list[int], task: FuseTask | None, *, max_tokens: int, salt: str | None = None, **sampling: Any
    ) -> tuple[list[int], float]:
        """The tokens and the TTFT in milliseconds."""
        begin, ttft_ms, tokens = time.perf_counter(), 0.0, []
        outputs = self._engine.generate(
            token_ids, task, max_tokens=max_tokens, salt=salt or uuid.uuid4().hex, **sampling
        )
        async for output in outputs:
            ttft_ms = ttft_ms or 1e3 * (time.perf_counter() - begin)
            tokens += output.token_ids
        return tokens, ttft_ms

    def _score(self, answer: str, example: Example) -> float:
        match self._dataset.score:
            case "rouge-l":
                return scores.rouge_l(answer, example.answers)
            case "rouge-l-line":
                return scores.rouge_l(scores.first_line(answer), example.answers)
            case "token-f1":
                return scores.token_f1(answer, example.answers, self._encode)
            case _:
                return scores.contains(answer, example.answers)

    def _encode(self, text: str) -> list[int]:
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return tokens

    def _text(self, tokens: Sequence[int]) -> str:
        """Up to the end that the model gave it: in the baseline, decoding goes on behind it."""
        eos = self._layout.eos_token_id
        end = list(tokens).index(eos) if eos is not None and eos in tokens else len(tokens)
        text: str = self._tokenizer.decode(list(tokens[:end]))
        return text


def _by_hash(chunks: Iterable[list[int]]) -> dict[str, list[int]]:
    return {chunk_hash(chunk): chunk for chunk in chunks}


def _nll(rows: npt.NDArray[np.float32], tokens: Sequence[int]) -> float:
    return -float(rows[np.arange(len(tokens)), list(tokens)].mean())
