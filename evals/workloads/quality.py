"""`ragkv eval quality`: how far fused answers drift from full prefill, and what they score.

Every example is run on one engine by vLLM's own full prefill and by each policy over the same tokens. Drift is measured
with teacher forcing, over the whole vocabulary. What is known of an example and a policy goes to a file at once, so a
long run can be interrupted and continues where it stopped.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from ragkv.config import Config
from ragkv.errors import ConfigError
from ragkv.evals import datasets, quality_rows
from ragkv.evals.arms import Arm
from ragkv.evals.datasets import Dataset, Example
from ragkv.evals.experiment import Progress, Row
from ragkv.evals.parameters import Quality
from ragkv.evals.workloads.quality_bench import QualityBench, Settings, running
from ragkv.policies import Selection
from ragkv.retriever.hashing import chunk_hash
from ragkv.store.codecs import RAW


async def run(config: Config, wanted: Quality, progress: Progress) -> AsyncIterator[Row]:
    """Yield a summary row for each arm, once all examples are evaluated."""
    dataset = datasets.load(wanted.dataset, wanted.data)
    parts = (Path(wanted.dataset).stem, Path(config.model.name).name, config.model.dtype)
    apart = () if wanted.beginning is None else (chunk_hash(list(wanted.beginning.encode()))[:8],)
    file = "-".join(map(str, (*parts, wanted.captures, config.store.codec, *apart))) + ".jsonl"
    out = wanted.out or config.home / "evals" / file
    settings = Settings(
        wanted.examples,
        wanted.captures,
        wanted.ttft_examples,
        config.index.chunk_tokens,
        wanted.estimate,
        wanted.beginning,
    )
    for row in await evaluate(config, dataset, wanted.policies, settings, out, progress):
        yield row
    progress.note(f"by example: {out}")


async def evaluate(
    config: Config, dataset: Dataset, arms: Sequence[Arm], settings: Settings, out: Path, progress: Progress
) -> list[Row]:
    """Evaluate what is missing in `out`, a JSONL file, append it there, and return a summary row for each arm.

    KV is stored in a temporary folder next to `out`. Raises ConfigError if `out` is of a run with other settings.
    """
    identity = {
        "dataset": dataset.name,
        "score_name": dataset.score,
        "score_ceiling": round(dataset.ceiling, 4),
        "model": config.model.name,
        "dtype": config.model.dtype,
        "captures": settings.num_contexts,
        "codec": config.store.codec,
        "chunk_tokens": settings.chunk_tokens,
    }
    if settings.beginning is not None:
        identity["beginning"] = settings.beginning
    if any(arm.codec for arm in arms) and config.store.codec != RAW.name:
        raise ConfigError(f"KV in {config.store.codec} can't be encoded anew: give --codec raw, or leave out /CODEC")
    done = quality_rows.read(out, identity)
    examples = dataset.examples[: settings.examples]
    todo = {e.id: left for e in examples if (left := [arm for arm in arms if (e.id, arm.label) not in done])}
    progress.update(dataset.name, len(examples) - len(todo), len(examples))
    if todo:
        async with running(config, dataset, settings, out.parent) as bench:
            await bench.prepare(arms, out.with_suffix(".npy"))
            async for row in _missing(bench, examples, todo, settings.ttft_examples, progress):
                done[row["example"], row["arm"]] = row
                with out.open("a") as file:
                    file.write(json.dumps({**identity, **row}) + "\n")
    rows = {arm: [{**identity, **done[e.id, arm.label]} for e in examples] for arm in arms}
    unrepaired = {arm.kv: rows[arm] for arm in arms if arm.policy.selection == Selection.NONE}
    return [quality_rows.summary(rows[arm], unrepaired.get(arm.kv, ())) for arm in arms]


async def _missing(
    bench: QualityBench, examples: Sequence[Example], todo: dict[str, list[Arm]], timed: int, progress: Progress
) -> AsyncIterator[Row]:
    """Yield the rows of the arms to do of each example; the first `timed` examples are timed."""
    needs = {example.id: bench.chunk_hashes(example) for example in examples if example.id in todo}
    for i, example in enumerate(examples):
        if example.id not in todo:
            continue
        for row in await bench.evaluate(example, todo[example.id], timed=i < timed):
            yield row
        del needs[example.id]
        await asyncio.to_thread(bench.forget, list(needs.values()))
        progress.update(bench.dataset.name, len(examples) - len(needs), len(examples))
