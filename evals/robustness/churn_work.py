"""The work of `ragkv eval churn`, in a process of its own: `python -m ragkv.evals.robustness.churn_work SECONDS SEED`.

Its configuration comes from the environment. Every step is a line of JSON on stdout.
"""

import asyncio
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ragkv.answer import Answer, AnswerOptions
from ragkv.cli.session import log_file, prepare
from ragkv.config import Config
from ragkv.errors import RagKVError
from ragkv.evals.manual import TITLES, excerpt
from ragkv.pipeline import Pipeline
from ragkv.policies import Policy
from ragkv.settings import load_config

Emit = Callable[[dict[str, Any]], None]
_ANSWER_TOKENS = 12


async def work(config: Config, seconds: float, seed: int, emit: Emit) -> None:
    """Index, change and remove documents of `config.home / "documents"`, and ask, for so long; `emit` each step."""
    rng, folder = random.Random(seed), config.home / "documents"
    pipeline = await Pipeline.open(config)
    try:
        for title in TITLES[:3]:
            await _index(pipeline, folder, title, rng, emit)
        await _compare(pipeline, rng, emit)
        emit({"event": "ready"})
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            step = rng.random()
            present = sorted(file.stem for file in folder.iterdir())
            if step < 0.3:
                await _index(pipeline, folder, rng.choice(TITLES[:24]), rng, emit)
            elif step < 0.4 and len(present) > 3:
                await _remove(pipeline, folder, rng.choice(present), emit)
            elif step < 0.6:
                await _compare(pipeline, rng, emit)
            else:
                await _ask(pipeline, _question(rng), Policy.of(config.answer.policy, config.answer.budget), 6)
                emit({"event": "answered"})
        emit({"event": "done"})
    except RagKVError as error:
        emit({"event": "problem", "problem": f"{type(error).__name__}: {error}"})
    finally:
        await pipeline.close()


async def _index(pipeline: Pipeline, folder: Path, title: str, rng: random.Random, emit: Emit) -> None:
    file = folder / f"{title}.txt"
    emit({"event": "begin", "document": file.name})
    file.write_text(excerpt(title, rng))
    await pipeline.ingest([folder])
    emit({"event": "indexed", "document": file.name})


async def _remove(pipeline: Pipeline, folder: Path, title: str, emit: Emit) -> None:
    file = folder / f"{title}.txt"
    emit({"event": "begin", "document": file.name})
    file.unlink()
    await pipeline.ingest([folder])
    emit({"event": "removed", "document": file.name})


async def _compare(pipeline: Pipeline, rng: random.Random, emit: Emit) -> None:
    question = _question(rng)
    fused, full = [await _ask(pipeline, question, Policy.parse(policy), 1) for policy in ("none", "full")]
    emit({"event": "compared", "question": question, "fused": fused.text, "full": full.text})


async def _ask(pipeline: Pipeline, question: str, policy: Policy, top_k: int) -> Answer:
    *_, answer = [
        event async for event in pipeline.answer(question, AnswerOptions(policy, top_k, _ANSWER_TOKENS, True))
    ]
    assert isinstance(answer, Answer)
    return answer


def _question(rng: random.Random) -> str:
    return f"What does the manual say about {rng.choice(TITLES[:24]).lower()}?"


def main() -> None:
    config = load_config()
    prepare(log_file(config), verbose=False)

    def emit(event: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(event) + "\n")
        sys.stdout.flush()

    asyncio.run(work(config, float(sys.argv[1]), int(sys.argv[2]), emit))


if __name__ == "__main__":
    main()
