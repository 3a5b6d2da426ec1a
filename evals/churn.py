"""`ragkv eval churn`: documents come, change and go while questions are asked, within small budgets; it may be killed.

The work runs in a process of its own, which tells what it does line by line. It is watched from outside: its memory
against what it is entitled to, and after each kill the home that it leaves. Answers from stored KV alone are compared
to full prefill's where the two must be the same: for one chunk directly behind the anchor, in float32.
"""

import asyncio
import json
import os
import random
import select
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import psutil

from ragkv.answer import Answer, AnswerOptions
from ragkv.config import Config
from ragkv.errors import RagKVError
from ragkv.evals.watched import as_environment, resources, watched
from ragkv.home import Home
from ragkv.pipeline import Pipeline
from ragkv.policies import Policy

TITLES = sorted(name for name in topics if len(topics[name]) > 2000)
CHARACTERS = 2500  # of a document: some 600 tokens
_ANSWER_TOKENS = 12
_EVERY_S = 0.5
_LATEST_KILL_S = 20.0  # after the process is ready
_GIB = 1 << 30


@dataclass
class Seen:
    """What the processes did and what became of it. Sizes in bytes; of all processes together."""

    steps: Counter[str] = field(default_factory=Counter)
    compared: int = 0
    problems: list[str] = field(default_factory=list)
    indexed: dict[str, bool] = field(default_factory=dict)  # document to whether it is to be there
    at_work: str | None = None  # on which document
    start_bytes: int = 0
    peak_bytes: int = 0
    end_bytes: int = 0
    handles: list[int] = field(default_factory=list)  # at the start, at the end
    peak_disk_bytes: int = 0
    kills: int = 0

    def note(self, event: dict[str, Any]) -> None:
        kind, name = event["event"], event.get("document")
        match kind:
            case "begin":
                self.at_work = name
            case "indexed" | "removed":
                self.indexed[str(name)] = kind == "indexed"
                self.at_work = None
            case "compared":
                self.compared += 1
                if event["fused"] != event["full"]:
                    self.problems.append(f"{event['question']}: {event['fused']!r} and not {event['full']!r}")
            case "problem":
                self.problems.append(event["problem"])
        self.steps[kind] += 1


def run(
    config: Config, seconds: float, num_kills: int, seed: int, progress: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """One row. `seconds` of work after as many rounds that end in a kill; all in a temporary home."""
    rng, seen = random.Random(seed), Seen()
    with tempfile.TemporaryDirectory(prefix="ragkv-churn-") as name:
        home = Path(name)
        (home / "models").symlink_to((config.home / "models").resolve())
        (home / "documents").mkdir()
        begin = time.monotonic()
        for round_ in range(num_kills + 1):
            is_last = round_ == num_kills
            _round(home, config, seconds if is_last else None, rng, seen, progress)
            seen.problems += _left_behind(config, home, seen)
        allowed = 1.1 * (seen.start_bytes + config.model.kv_cache_gib * _GIB)
        if seen.peak_bytes > allowed:
            seen.problems.append(f"{seen.peak_bytes >> 20} MiB of memory where {int(allowed) >> 20} were allowed")
        disk = config.store.disk_gib
        if disk is not None and seen.peak_disk_bytes > disk * _GIB:
            seen.problems.append(f"{seen.peak_disk_bytes} bytes of records where {disk:g} GiB were allowed")
        yield {
            "seconds": round(time.monotonic() - begin, 1),
            "kills": seen.kills,
            "steps": dict(sorted(seen.steps.items())),
            "compared": seen.compared,
            "memory_mib": {
                "start": seen.start_bytes >> 20,
                "peak": seen.peak_bytes >> 20,
                "end": seen.end_bytes >> 20,
                "allowed": int(allowed) >> 20,
            },
            "disk_mib": {"peak": seen.peak_disk_bytes >> 20, "allowed": None if disk is None else round(disk * 1024)},
            "handles": seen.handles,
            "problems": seen.problems,
        }


def _round(
    home: Path,
    config: Config,
    seconds: float | None,
    rng: random.Random,
    seen: Seen,
    progress: Callable[[str], None],
) -> None:
    """Let a process work for `seconds`, or kill it at a random moment."""
    command = [sys.executable, "-m", "ragkv", "eval", "churn", "--at", str(home)]
    command += ["--seconds", str(seconds or 3600), "--seed", str(rng.getrandbits(32))]
    until: float | None = None
    with watched(command, {**os.environ, **as_environment(config, home)}) as process:
        assert process.stdout is not None
        tree, looked_at, said = psutil.Process(process.pid), 0.0, b""
        is_over = is_done = False
        while not is_over:
            readable, _, _ = select.select([process.stdout], [], [], 0.05)
            if readable:
                new = os.read(process.stdout.fileno(), 1 << 16)
                said, is_over = said + new, not new
            *lines, said = said.split(b"\n")
            for event in map(json.loads, lines):
                seen.note(event)
                progress(f"{sum(seen.steps.values())} steps, {seen.kills} kills, {len(seen.problems)} problems")
                is_done = is_done or event["event"] == "done"
                if event["event"] == "ready":
                    until = time.monotonic() + rng.uniform(0, _LATEST_KILL_S) if seconds is None else None
                    size, handles = resources(tree)
                    seen.start_bytes, seen.handles = max(seen.start_bytes, size), [handles]
            if until is not None and time.monotonic() > until:
                os.killpg(process.pid, signal.SIGKILL)
                seen.kills += 1
                return
            if time.monotonic() - looked_at > _EVERY_S and not is_done:
                looked_at = time.monotonic()
                size, handles = resources(tree)
                if size:
                    seen.peak_bytes, seen.end_bytes = max(seen.peak_bytes, size), size
                    seen.handles = [*seen.handles[:1], handles]
                seen.peak_disk_bytes = max(seen.peak_disk_bytes, _records_bytes(home))
        if process.wait():
            seen.problems.append(f"the process ended with {process.returncode}; {home / 'vllm.log'}")


def _records_bytes(home: Path) -> int:
    return sum(file.stat().st_blocks * 512 for file in (home / "kv" / "segments").glob("*.seg"))


def _left_behind(config: Config, home: Path, seen: Seen) -> list[str]:
    """What doesn't hold of a home that nobody uses any more."""
    place = Home(home)
    with place.open_catalog() as catalog, closing(place.open_store()) as store:
        problems = [f"after {seen.kills} kills: {problem}" for problem in store.admin.verify().problems]
        stored = set(store.chunk_hashes(evicted=config.store.disk_gib is not None))
        for name, is_there in seen.indexed.items():
            document = str((home / "documents" / name).resolve())
            if name == seen.at_work:
                continue
            if is_there != (catalog.document_digest(document) is not None):
                problems.append(f"{name} is {'lost' if is_there else 'there still'}")
            if lost := {chunk.chunk_hash for chunk in catalog.document_chunks(document)} - stored:
                problems.append(f"{name} lacks the KV of {len(lost)} chunks")
        return problems


# In the process that works


async def work(config: Config, seconds: float, seed: int, emit: Callable[[dict[str, Any]], None]) -> None:
    """Index, change and remove documents of `config.home / "documents"`, and ask, for so long. Emits what it does."""
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
            there = sorted(file.stem for file in folder.iterdir())
            if step < 0.3:
                await _index(pipeline, folder, rng.choice(TITLES[:24]), rng, emit)
            elif step < 0.4 and len(there) > 3:
                await _remove(pipeline, folder, rng.choice(there), emit)
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


async def _index(
    pipeline: Pipeline, folder: Path, title: str, rng: random.Random, emit: Callable[[dict[str, Any]], None]
) -> None:
    file, text = folder / f"{title}.txt", topics[title]
    start = rng.randrange(max(1, len(text) - CHARACTERS))
    emit({"event": "begin", "document": file.name})
    file.write_text(text[start : start + CHARACTERS])
    await pipeline.ingest([folder])
    emit({"event": "indexed", "document": file.name})


async def _remove(pipeline: Pipeline, folder: Path, title: str, emit: Callable[[dict[str, Any]], None]) -> None:
    file = folder / f"{title}.txt"
    emit({"event": "begin", "document": file.name})
    file.unlink()
    await pipeline.ingest([folder])
    emit({"event": "removed", "document": file.name})


async def _compare(pipeline: Pipeline, rng: random.Random, emit: Callable[[dict[str, Any]], None]) -> None:
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


def work_here(config: Config, seconds: float, seed: int) -> None:
    """`work`, told on the standard output."""

    def emit(event: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(event) + "\n")
        sys.stdout.flush()

    asyncio.run(work(config, seconds, seed, emit))
