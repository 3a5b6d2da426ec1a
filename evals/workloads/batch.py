"""`ragkv eval batch`: requests in the order of `ragkv batch`, next to the order in which they came.

Both run on the same engine with vLLM's prefix caching on, and memory for a part of what the requests take. In arrival
order all are sent at once and vLLM queues them, first come, first served. Mixes are of prompts that share a beginning
with seven others, of tweets behind instructions, and of questions about the same documents, whose chunks are fused.
"""

import asyncio
import random
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from tokenizers import Tokenizer

from ragkv.batch.admission import Admission
from ragkv.batch.run import answered
from ragkv.batch.sharing import Item, by_popularity, in_order, shared_tokens
from ragkv.batch.work import Outcome, Work
from ragkv.config import Config
from ragkv.controller.profile import text_tokens
from ragkv.engine.engine import Engine
from ragkv.engine.task import FuseTask, PrefixUse
from ragkv.evals import datasets
from ragkv.evals.beside_vllm import in_turn, kv_account, memory_for
from ragkv.evals.experiment import Progress, Row
from ragkv.evals.parameters import Batch
from ragkv.evals.rig import Rig, rig
from ragkv.policies import Policy
from ragkv.retriever.hashing import chunk_hash

ORDERED, ARRIVAL = "ragkv batch", "first come"
_GROUP = 8  # prompts with the same beginning
_INSTRUCTIONS, _INSTRUCTION_TOKENS, _TWEET_TOKENS = 6, 480, 2
_ARTICLES, _DOCUMENT_TOKENS = 6, 16
_NUM_CONTEXTS = 2
_SAMPLED_S = 0.2
_POINTS = 120  # of a curve in a row
_COLORS = {"ordered": "tab:blue", "arrival": "tab:gray"}


@dataclass(frozen=True)
class _Mix:
    """ordered: the requests as `ragkv batch` would have them; arrival: the same, as they came."""

    name: str
    ordered: Sequence[Work]
    arrival: Sequence[Work]
    is_exact: bool = True


async def run(config: Config, wanted: Batch, progress: Progress) -> AsyncIterator[Row]:
    """Yield a row for each mix."""
    memory = memory_for(config, wanted.kv_tokens)
    async with rig(config, _NUM_CONTEXTS, {}, disable_log_stats=False, **memory) as found:
        mixes = [*_synthetic(found, wanted), _tweets(found, wanted)]
        progress.update("precomputing the documents' chunks")
        mixes.append(await _documents(found, wanted, Policy.of(config.answer.policy, config.answer.budget)))
        progress.update("warming up")
        await _course(found.engine, mixes[0].arrival[:_GROUP], is_limited=False)
        for mix in mixes:
            yield await _compare(found.engine, mix, wanted.repeats, progress)


async def _compare(engine: Engine, mix: _Mix, repeats: int, progress: Progress) -> Row:
    works = {ORDERED: mix.ordered, ARRIVAL: mix.arrival}
    rates: dict[str, list[float]] = {name: [] for name in works}
    seen: dict[str, _Course] = {}
    for i in range(repeats):
        for name in in_turn(works, i):
            progress.update(f"{mix.name}: {name}")
            await engine.forget_prefixes()
            seen[name] = course = await _course(engine, works[name], is_limited=name == ORDERED)
            rates[name].append(len(course.answers) / course.seconds)
    ratios = sorted(a / b for a, b in zip(rates[ORDERED], rates[ARRIVAL], strict=True))
    items = [work.item for work in mix.ordered]
    differing = sum(seen[ORDERED].answers[id] != seen[ARRIVAL].answers[id] for id in seen[ORDERED].answers)
    return {
        "mix": mix.name,
        "requests": len(items),
        "prompt_tokens": sum(item.num_tokens for item in items),
        "shared_tokens": shared_tokens(items) if mix.is_exact else None,
        "ratio": round(median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        **{f"{_short(name)}_per_s": round(median(rates[name]), 3) for name in works},
        **{f"{_short(name)}_computed": seen[name].num_computed for name in works},
        **{f"{_short(name)}_kv_use": round(float(np.mean(seen[name].kv_use)), 3) for name in works},
        **{f"{_short(name)}_kv_peak": round(max(seen[name].kv_use), 3) for name in works},
        **{f"{_short(name)}_preemptions": seen[name].preemptions for name in works},
        **{f"{_short(name)}_course": seen[name].curve() for name in works},
        "answers_that_differ": differing if mix.is_exact else None,
    }


def _short(name: str) -> str:
    return "ordered" if name == ORDERED else "arrival"


@dataclass
class _Course:
    """One turn of a mix. sampled_s: when `kv_use` was seen, the share of vLLM's memory for KV that was in use."""

    seconds: float
    num_computed: int
    sampled_s: list[float]
    kv_use: list[float]
    preemptions: int
    answers: dict[str, list[int]]

    def curve(self) -> dict[str, list[float]]:
        kept = np.unique(np.linspace(0, len(self.kv_use) - 1, _POINTS).astype(int))
        curves = {"seconds": self.sampled_s, "kv_use": self.kv_use}
        return {name: [round(values[i], 3) for i in kept] for name, values in curves.items()}


async def _course(engine: Engine, works: Sequence[Work], *, is_limited: bool) -> _Course:
    """Answer all requests, and watch vLLM's memory for KV meanwhile. is_limited: as many at a time as fit into it."""
    (_, before), begin, sampled_s, kv_use = kv_account(), time.perf_counter(), [0.0], [0.0]

    async def watch() -> None:
        while True:
            await asyncio.sleep(_SAMPLED_S)
            sampled_s.append(time.perf_counter() - begin)
            kv_use.append(kv_account()[0])

    watching = asyncio.create_task(watch())
    num_computed, answers = 0, {}
    try:
        capacity = engine.kv_tokens if is_limited else 1 << 62
        async with aclosing(answered(works, Admission(capacity))) as outcomes:
            async for work, outcome in outcomes:
                if not isinstance(outcome, Outcome):
                    raise outcome
                num_computed += outcome.num_prompt - outcome.num_reused
                answers[work.custom_id] = outcome.body["tokens"]
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
    seconds, preemptions = time.perf_counter() - begin, kv_account()[1] - before
    return _Course(seconds, num_computed, sampled_s, kv_use, preemptions, answers)


def _synthetic(found: Rig, wanted: Batch) -> list[_Mix]:
    """Return mixes of prompts of which eight each share a beginning, by its share and by the length of answers."""
    text = text_tokens(found.model, (wanted.requests + 1) * wanted.tokens_in)
    mixes = []
    for sharing in wanted.sharing:
        for ratio in wanted.ratios:
            num_shared, prompts = round(sharing * wanted.tokens_in), []
            for i in range(wanted.requests):
                beginning = text[i // _GROUP * _GROUP * wanted.tokens_in :][:num_shared]
                prompts.append(beginning + text[i * wanted.tokens_in + num_shared :][: wanted.tokens_in - num_shared])
            num_tokens = max(1, round(wanted.tokens_in / ratio))
            name = f"{sharing:.0%} shared, {wanted.tokens_in} in, {num_tokens} out"
            mixes.append(_of_prompts(found.engine, name, prompts, num_tokens))
    return mixes


def _tweets(found: Rig, wanted: Batch) -> _Mix:
    """Return tweets behind six instructions, which are tweets with their labels."""
    texts = (wanted.data / "tweeteval" / "test_text.txt").read_text().splitlines()
    tokenizer = Tokenizer.from_file(str(found.model / "tokenizer.json"))

    def tokens(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    shown = [texts[1000 + i * 60 :][:60] for i in range(_INSTRUCTIONS)]
    instructions = [
        tokens(f"Instruction {i}.\n" + "\n".join(each))[:_INSTRUCTION_TOKENS] for i, each in enumerate(shown)
    ]
    asked = [tokens(f"\nTweet: {text}\nSentiment:") for text in texts[: wanted.requests]]
    prompts = [instructions[i % _INSTRUCTIONS] + tweet for i, tweet in enumerate(asked)]
    return _of_prompts(found.engine, f"tweets behind {_INSTRUCTIONS} instructions", prompts, _TWEET_TOKENS)


def _of_prompts(engine: Engine, name: str, prompts: list[list[int]], num_tokens: int) -> _Mix:
    works = [_prompt(engine, str(i), prompt, num_tokens) for i, prompt in enumerate(prompts)]
    random.Random(0).shuffle(works)
    return _Mix(name, [works[number] for number in in_order([work.item for work in works])], works)


def _prompt(engine: Engine, custom_id: str, prompt: list[int], num_tokens: int) -> Work:
    parts = tuple((name, engine.block_size) for name in engine.block_hashes(prompt, None))
    return Work(custom_id, Item(parts, len(prompt), num_tokens), run=_asking(engine, prompt, num_tokens))


def _asking(
    engine: Engine, prompt: list[int], num_tokens: int, task: FuseTask | None = None
) -> Callable[[], Awaitable[Outcome]]:
    async def ask() -> Outcome:
        tokens, num_reused = list[int](), 0
        salt = uuid.uuid4().hex if task else None
        outputs = engine.generate(
            prompt, task, max_tokens=num_tokens, salt=salt, prefix=PrefixUse("once"), ignore_eos=True
        )
        async for output in outputs:
            tokens += output.token_ids
            num_reused = output.num_cached_tokens or num_reused
            if output.report is not None:
                num_reused = output.report.tokens.reused + output.report.tokens.prefix
        return Outcome({"tokens": tokens}, len(prompt), num_reused, len(tokens))

    return ask


async def _documents(found: Rig, wanted: Batch, policy: Policy) -> _Mix:
    """Return questions about six articles, each with the article's paragraphs and one other before it."""
    examples = datasets.load("xquad", wanted.data).examples
    articles = [set(example.chunks) for example in examples[:_ARTICLES]]
    chosen = [e for e in examples if any(len(a & set(e.chunks)) == len(a) - 1 or a == set(e.chunks) for a in articles)]
    tokenizer = Tokenizer.from_file(str(found.model / "tokenizer.json"))
    cut: dict[str, list[int]] = {}
    for text in dict.fromkeys(chunk for example in chosen[: wanted.requests] for chunk in example.chunks):
        cut[text] = tokenizer.encode(text, add_special_tokens=False).ids
    by_hash = {chunk_hash(tokens): tokens for tokens in cut.values()}
    spans = {hash: found.kv.span(hash, len(tokens)) for hash, tokens in by_hash.items()}
    hashes = list(spans)
    contexts = {hash: [[spans[hashes[i - 1]]], [spans[hashes[i - 2]]]] for i, hash in enumerate(hashes)}
    await found.kv.precompute_anchor(found.engine, found.store)
    await found.kv.precompute(found.engine, found.store, by_hash, contexts)
    fused, exact = [], []
    for example in chosen[: wanted.requests]:
        chunks = [cut[text] for text in example.chunks]
        prompt = found.layout.assemble(chunks, found.layout.question_tokens(example.question))
        names = list(map(chunk_hash, chunks))
        parts = tuple((name, len(tokens)) for name, tokens in zip(names, chunks, strict=True))
        task = found.kv.task(prompt, names, policy, found.store)
        asking = partial(_asking, found.engine, prompt.token_ids, _DOCUMENT_TOKENS)
        item = Item(parts, len(prompt.token_ids), _DOCUMENT_TOKENS)
        fused.append(Work(example.id, item, is_exact=False, run=asking(task)))
        exact.append(Work(example.id, item, run=asking()))
    random.Random(0).shuffle(pairs := list(zip(fused, exact, strict=True)))
    fused, exact = ([pair[side] for pair in pairs] for side in (0, 1))
    ranked = by_popularity([work.item.parts for work in fused])
    items = [Item(parts, w.item.num_tokens, w.item.max_tokens) for parts, w in zip(ranked, fused, strict=True)]
    name = f"questions about {_ARTICLES} articles, fused"
    return _Mix(name, [fused[number] for number in in_order(items)], exact, is_exact=False)


def draw(rows: Sequence[Row], out: Path) -> None:
    """Draw how much of vLLM's memory for KV is in use over time, of each mix: the last turn in each order."""
    num_columns = min(3, len(rows))
    num_lines = -(-len(rows) // num_columns)
    size = (4.5 * num_columns, 3 * num_lines)
    figure, axes = plt.subplots(num_lines, num_columns, figsize=size, squeeze=False, layout="constrained")
    for ax, row in zip(axes.flat, rows, strict=False):
        for arm, name in (("ordered", ORDERED), ("arrival", ARRIVAL)):
            course, label = row[f"{arm}_course"], f"{name}, {row[f'{arm}_computed']:,} tokens computed"
            ax.plot(course["seconds"], 100 * np.array(course["kv_use"]), color=_COLORS[arm], label=label)
        ax.set_title(f"{row['mix']}: {row['ratio']:.2f}×", fontsize=10)
        ax.set_ylim(0, 100)
        ax.grid(alpha=0.3)
        ax.legend(fontsize=8)
    for ax in axes.flat[len(rows) :]:
        ax.set_axis_off()
    for ax in axes[:, 0]:
        ax.set_ylabel("KV in use, %")
    for ax in axes[-1]:
        ax.set_xlabel("seconds")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)
    plt.close(figure)
