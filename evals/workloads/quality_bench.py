"""What `ragkv eval quality` does with one example on an engine: full prefill, then every arm over the same tokens."""

import asyncio
import random
import shutil
import tempfile
import time
import uuid
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from ragkv import background, models
from ragkv.chunk_kv import ChunkKV
from ragkv.config import Config
from ragkv.engine.engine import Engine
from ragkv.engine.task import ROOT_HASH, FuseTask, PrecomputeTask, Report, Span
from ragkv.errors import ModelError
from ragkv.evals import scores
from ragkv.evals.arms import Arm
from ragkv.evals.datasets import Dataset, Example
from ragkv.evals.experiment import Row
from ragkv.evals.workloads.quality_codecs import encoded
from ragkv.policies import FULL
from ragkv.prompt import Prompt, PromptLayout
from ragkv.quality_target import NUM_TOKENS
from ragkv.retriever.encoders import Embedder
from ragkv.retriever.hashing import chunk_hash
from ragkv.retriever.index import contexts_of
from ragkv.retriever.tokens import FoundChunk
from ragkv.store.disk_store import DiskStore
from ragkv.stored_chunks import first_chunk

MAX_CHUNKS, POOL_SIZE = 10, 24
CORPUS_EXAMPLES = 300  # of which the nearest chunks are taken; more, where more are run
KEPT_BYTES = 24 << 30  # KV that coming examples need is kept up to this size, or half of the free disk
GREEDY_TOKENS, GOLD_TOKENS = 16, 48

LogProbs = npt.NDArray[np.float32]  # [tokens, vocabulary]


@dataclass(frozen=True)
class Settings:
    """examples: how many are run, from the first on. num_contexts: over how many a chunk's KV is averaged.
    ttft_examples: on how many examples times are taken, one request at a time. estimate: whether each fused answer's
    drift is estimated too (`ragkv.quality_target`). beginning: the prompts' instruction, None: the one after which
    chunks are precomputed."""

    examples: int = 50
    num_contexts: int = 4
    ttft_examples: int = 10
    chunk_tokens: int = 512
    estimate: bool = False
    beginning: str | None = None


@dataclass(frozen=True)
class Baseline:
    """What full prefill makes of an example. greedy and gold: the tokens along which drift is measured."""

    greedy: list[int]
    gold: list[int]
    greedy_probs: LogProbs
    gold_probs: LogProbs
    answer: str
    ttft_ms: float


@dataclass(frozen=True)
class Fused:
    """What an arm makes of an example. ttft_ms: None where no times are taken. drift_estimate: None where there is
    none."""

    greedy_probs: LogProbs
    gold_probs: LogProbs
    report: Report
    answer: str
    ttft_ms: float | None
    drift_estimate: float | None


class QualityBench:
    """An engine and a store on which one data set is evaluated."""

    def __init__(self, engine: Engine, config: Config, dataset: Dataset, settings: Settings, store: DiskStore) -> None:
        self._engine, self._config, self.dataset, self._settings = engine, config, dataset, settings
        self._store = store
        self._kept_bytes = min(KEPT_BYTES, shutil.disk_usage(store.path).free // 2)
        folder = models.resolve(config.model.name, config.home)
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._layout = PromptLayout(folder, dataset.instruction, dataset.asking, dataset.cue)
        instruction = dataset.instruction if settings.beginning is None else settings.beginning
        self._asked = PromptLayout(folder, instruction, dataset.asking, dataset.cue)
        self._kv: dict[str, ChunkKV] = {}
        self._pool: dict[str, list[int]] = {}  # random others
        self._nearest: dict[str, list[str]] = {}
        self._corpus: dict[str, list[int]] = {}

    async def prepare(self, arms: Sequence[Arm], vectors: Path) -> None:
        """Warm up, and get ready the chunks that averages see. vectors: the file that keeps the corpus' embeddings."""
        kinds, anchor = {arm.kv for arm in arms}, self._layout.anchor
        # Kinds that share the KV after the anchor alone each need it in an entry of its own.
        joins = self._config.store.joins and kinds <= {"mixed", "alone"}
        for kind in ("anchor", "random", "near", "mixed"):
            num_contexts = 1 if kind == "anchor" else self._settings.num_contexts
            heads = self._engine.kv_heads
            self._kv[kind] = ChunkKV(anchor, "0" * 32, heads, num_contexts, kind, joins=joins and kind == "mixed")
        for codec in {arm.codec for arm in arms if arm.codec}:
            kv = ChunkKV(anchor, "0" * 32, self._engine.kv_heads, self._settings.num_contexts, codec, joins=True)
            self._kv[f"mixed/{codec}"] = kv
        await self._kv["anchor"].precompute_anchor(self._engine, self._store)
        if kinds & {"random", "mixed"}:
            examples = random.Random(0).sample(self.dataset.examples, min(POOL_SIZE, len(self.dataset.examples)))
            self._pool = _by_hash(self._chunks(example)[0] for example in examples)
            await self._kv["anchor"].precompute(self._engine, self._store, self._pool, {})
        if kinds & {"near", "mixed"}:
            corpus = self.dataset.examples[: max(CORPUS_EXAMPLES, self._settings.examples)]
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
        hashes, count = list(self._corpus), self._settings.num_contexts - 1
        best = [np.argsort(-row)[: count + 1] for row in vectors @ vectors.T]
        return {h: [hashes[j] for j in best[i] if j != i][:count] for i, h in enumerate(hashes)}

    async def evaluate(self, example: Example, arms: Sequence[Arm], *, timed: bool) -> list[Row]:
        """Return a row for each arm."""
        chunks, prompt = self._fitted(example)
        salt = uuid.uuid4().hex
        baseline = await self._full_prefill(example, prompt, salt)
        await self._precompute(_by_hash(chunks), {arm.kv for arm in arms})
        rows = []
        for codec in dict.fromkeys(arm.codec for arm in arms):
            own = [arm for arm in arms if arm.codec == codec]
            async with self._in_codec(chunks, codec) if codec else nullcontext():
                tasks = [self._task(prompt, chunks, arm) for arm in own]
                fused = await self._fused(prompt, tasks, baseline, timed=timed)
            rows += [self._row(example, prompt, arm, baseline, each) for arm, each in zip(own, fused, strict=True)]
        return rows

    def _in_codec(self, chunks: Sequence[Sequence[int]], codec: str) -> AbstractAsyncContextManager[None]:
        mixed, joined = self._kv["mixed"], self._kv[f"mixed/{codec}"]
        spans = [mixed.span(chunk_hash(chunk), len(chunk)) for chunk in dict.fromkeys(map(tuple, chunks))]
        return encoded(self._store, mixed, joined, spans, codec)

    def _fitted(self, example: Example) -> tuple[list[list[int]], Prompt]:
        """Return the chunks that fit the model's context, and the prompt."""
        chunks = self._chunks(example)
        question = self._asked.question_tokens(example.question)
        other_tokens = len(self._asked.anchor) + len(question) + self.dataset.max_tokens + GOLD_TOKENS
        while sum(map(len, chunks)) > self._engine.max_model_len - other_tokens:
            chunks.pop()
        return chunks, self._asked.assemble(chunks, question)

    async def _full_prefill(self, example: Example, prompt: Prompt, salt: str) -> Baseline:
        max_tokens = self.dataset.max_tokens
        tokens, ttft_ms = await self._generate(
            prompt.token_ids, None, max_tokens=max(GREEDY_TOKENS, max_tokens), salt=salt, ignore_eos=True
        )
        greedy = tokens[:GREEDY_TOKENS]
        gold = self._encode(f"{' ' if self.dataset.cue else ''}{example.answers[0]}")[:GOLD_TOKENS]
        full = FuseTask((), FULL)
        (greedy_probs, gold_probs), _ = await self._engine.score(prompt.token_ids, full, (greedy, gold), salt)
        return Baseline(greedy, gold, greedy_probs, gold_probs, self._text(tokens[:max_tokens]), ttft_ms)

    async def _fused(
        self, prompt: Prompt, tasks: Sequence[FuseTask], baseline: Baseline, *, timed: bool
    ) -> list[Fused]:
        salts = [uuid.uuid4().hex for _ in tasks]
        drifts = [
            await self._engine.score(prompt.token_ids, task, (baseline.greedy, baseline.gold), salt)
            for task, salt in zip(tasks, salts, strict=True)
        ]
        answers = await asyncio.gather(  # after the blocks that were fused for the log-probabilities
            *(
                self._generate(prompt.token_ids, task, max_tokens=self.dataset.max_tokens, salt=salt)
                for task, salt in zip(tasks, salts, strict=True)
            )
        )
        fused = []
        for task, salt, (tokens, _), ((greedy_probs, gold_probs), report) in zip(
            tasks, salts, answers, drifts, strict=True
        ):
            ttft_ms = (await self._generate(prompt.token_ids, task, max_tokens=1))[1] if timed else None
            estimate = await self._estimate(prompt, task, tokens, salt) if self._settings.estimate else None
            fused.append(Fused(greedy_probs, gold_probs, report, self._text(tokens), ttft_ms, estimate))
        return fused

    async def _estimate(self, prompt: Prompt, task: FuseTask, answer: list[int], salt: str) -> float | None:
        other = next(filter(None, (kv.over_other_kv(task) for kv in self._kv.values())), None)
        if other is None:
            return None
        tokens = answer[:NUM_TOKENS]
        (fused,), _ = await self._engine.score(prompt.token_ids, task, [tokens], salt)
        (rows,), _ = await self._engine.score(prompt.token_ids, other, [tokens])
        return float(background.kl(fused, rows).mean())

    def _row(self, example: Example, prompt: Prompt, arm: Arm, full: Baseline, fused: Fused) -> Row:
        greedy_kl = background.kl(full.greedy_probs, fused.greedy_probs)
        gold_kl = background.kl(full.gold_probs, fused.gold_probs)
        recomputed = sum(end - start for start, end in fused.report.tokens.recomputed_runs)
        row = {
            "example": example.id,
            "arm": arm.label,
            "policy": arm.policy.name,
            "budget": {"none": 0.0, "full": 1.0}.get(arm.policy.name, arm.policy.budget),
            "kv": arm.kv,
            "kl": float(np.concatenate([greedy_kl, gold_kl]).mean()),
            "kl_greedy": float(greedy_kl.mean()),
            "kl_gold": float(gold_kl.mean()),
            "agreement": float((fused.greedy_probs.argmax(1) == np.array(full.greedy)).mean()),
            "gold_nll": _nll(fused.gold_probs, full.gold),
            "gold_nll_full": _nll(full.gold_probs, full.gold),
            "score": self._score(fused.answer, example),
            "score_full": self._score(full.answer, example),
            "word_f1": scores.word_f1(fused.answer, example.answers),
            "word_f1_full": scores.word_f1(full.answer, example.answers),
            "tokens": len(prompt.token_ids),
            "recomputed_share": recomputed / prompt.chunk_ranges[-1][1],
            "covered": fused.report.votes.covered,
            "evenness": fused.report.votes.evenness,
            "ttft_ms": fused.ttft_ms,
            "drift_estimate": fused.drift_estimate,
            "baseline_ttft_ms": full.ttft_ms,
        }
        if example is self.dataset.examples[0]:  # for the report's picture of a prompt
            row |= {
                "pieces": [self._tokenizer.decode([token], skip_special_tokens=False) for token in prompt.token_ids],
                "chunk_ranges": prompt.chunk_ranges,
                "recomputed_runs": fused.report.tokens.recomputed_runs,
                "answer": fused.answer,
                "answer_full": full.answer,
            }
        return row

    def chunk_hashes(self, example: Example) -> set[str]:
        return set(map(chunk_hash, self._chunks(example)))

    def forget(self, coming: Iterable[set[str]]) -> None:
        """Delete the KV that no coming example needs; if the rest is too large, all of it but the pool's and the
        anchor's.

        coming: the hashes of the chunks of each.
        """
        anchor_hash = self._kv["anchor"].anchor_hash
        always = {*self._pool, anchor_hash}
        own = always.union(*coming)
        seen = {other for chunk in own for other in self._nearest.get(chunk, ())}  # by averages, in one context
        keys = self._store.keys()
        needed = {k for k in keys if k.chunk_hash in own or (k.chunk_hash in seen and k.anchor_hash == anchor_hash)}
        self._store.delete_keys(set(keys) - needed)
        if self._store.admin.stats().size_bytes >= self._kept_bytes:
            self._store.delete(set(self._store.chunk_hashes()) - always)

    def _chunks(self, example: Example) -> list[list[int]]:
        """Return the token ids of each; long chunks are cut in pieces, as the indexer would."""
        size, pieces = self._settings.chunk_tokens, []
        for text in example.chunks:
            tokens = self._encode(text)
            if len(tokens) > 1.3 * size:
                pieces += [tokens[i : i + size] for i in range(0, len(tokens), size)]
            else:
                pieces.append(tokens)
        return pieces[:MAX_CHUNKS]

    async def _precompute(self, chunks: dict[str, list[int]], kinds: set[str]) -> None:
        """Precompute the example's KV of all kinds, and that of the chunks that its averages see."""
        engine, store, once = self._engine, self._store, self._kv["anchor"]
        if "alone" in kinds:
            spans = [Span(0, len(chunk), h, ROOT_HASH) for h, chunk in chunks.items()]
            missing = [span for span in spans if not store.contains(once.key(span))]
            await asyncio.gather(*(engine.precompute(chunks[s.chunk_hash], PrecomputeTask(s)) for s in missing))
        if "anchor" in kinds:
            await once.precompute(engine, store, chunks, {})
        if kinds & {"random", "mixed"}:
            pool = {h: self._kv["mixed"].span(h, len(chunk)) for h, chunk in self._pool.items()}
        if "random" in kinds:
            drawn = {h: random.Random(h).sample([*pool.values()], len(pool)) for h in chunks}
            contexts = {h: [[other] for other in found if other.chunk_hash != h] for h, found in drawn.items()}
            await self._kv["random"].precompute(engine, store, chunks, contexts)
        if kinds & {"near", "mixed"}:
            seen = {other: self._corpus[other] for h in chunks for other in self._nearest[h]}
            await self._kv["mixed"].precompute_alone(engine, store, seen)
            near = {other: self._kv["mixed"].span(other, len(tokens)) for other, tokens in seen.items()}
        if "near" in kinds:
            contexts = {h: [[near[other]] for other in self._nearest[h]] for h in chunks}
            await self._kv["near"].precompute(engine, store, chunks, contexts)
        if "mixed" in kinds:
            placed, names = {**pool, **near}, [*pool]
            named = {h: contexts_of(h, self._nearest[h], names) for h in chunks}
            contexts = {h: [[placed[other] for other in context] for context in of] for h, of in named.items()}
            await self._kv["mixed"].precompute(engine, store, chunks, contexts)

    def _task(self, prompt: Prompt, chunks: Sequence[Sequence[int]], arm: Arm) -> FuseTask:
        hashes, is_own = list(map(chunk_hash, chunks)), self._asked.anchor == self._layout.anchor
        ranges = [(h, start, end) for h, (start, end) in zip(hashes, prompt.chunk_ranges, strict=True)]
        if arm.kv == "alone":
            spans = [Span(start, end, h, ROOT_HASH) for h, start, end in ranges]
            return FuseTask((*[self._kv["anchor"].anchor_span] * is_own, *spans), arm.policy)
        kv = self._kv[f"{arm.kv}/{arm.codec}" if arm.codec else arm.kv]
        if is_own:
            return kv.task(prompt, hashes, arm.policy, self._store)
        found = [FoundChunk(start, end, h, 0, end - start) for h, start, end in ranges]
        spans = kv.found(prompt.token_ids, found)
        if (first := first_chunk(spans)) is not None:  # nobody has learnt its KV behind this beginning
            del spans[first]
        return FuseTask(tuple(spans), arm.policy)

    async def _generate(
        self, token_ids: list[int], task: FuseTask | None, *, max_tokens: int, salt: str | None = None, **sampling: Any
    ) -> tuple[list[int], float]:
        """Return the tokens and the TTFT in milliseconds."""
        begin, ttft_ms, tokens = time.perf_counter(), 0.0, []
        outputs = self._engine.generate(
            token_ids, task, max_tokens=max_tokens, salt=salt or uuid.uuid4().hex, **sampling
        )
        async for output in outputs:
            ttft_ms = ttft_ms or 1e3 * (time.perf_counter() - begin)
            tokens += output.token_ids
        return tokens, ttft_ms

    def _score(self, answer: str, example: Example) -> float:
        match self.dataset.score:
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
        """Decode up to the end that the model gave it: in the baseline, decoding continues after it."""
        eos = self._layout.eos_token_id
        end = list(tokens).index(eos) if eos is not None and eos in tokens else len(tokens)
        text: str = self._tokenizer.decode(list(tokens[:end]))
        return text


def _by_hash(chunks: Iterable[list[int]]) -> dict[str, list[int]]:
    return {chunk_hash(chunk): chunk for chunk in chunks}


def _nll(rows: npt.NDArray[np.float32], tokens: Sequence[int]) -> float:
    return -float(rows[np.arange(len(tokens)), list(tokens)].mean())


@asynccontextmanager
async def running(
    config: Config, dataset: Dataset, settings: Settings, folder: Path
) -> AsyncGenerator[QualityBench, None]:
    """Start the configured model on a store in a temporary folder in `folder`; both are deleted afterwards.

    Raises ModelError for a model that can't be loaded or fused.
    """
    model = models.resolve(config.model.name, config.home)
    with tempfile.TemporaryDirectory(prefix="ragkv-quality-", dir=folder) as store:
        engine = await Engine.start(model, config.model, Path(store), "0" * 32, config.store.options())
        try:
            if engine.unsupported:
                raise ModelError(f"nothing to measure, {config.model.name} can't be fused: {engine.unsupported}")
            yield QualityBench(engine, config, dataset, settings, DiskStore(Path(store)))
        finally:
            await engine.close()
