"""`ragkv eval churn`: documents come, change and go while questions are asked, within small budgets; it may be killed.

The work runs in a process of its own, which reports what it does line by line. It is watched from outside: its memory
against what it is entitled to, and after each kill the home that it leaves. Answers from stored KV alone are compared
to full prefill's where the two must be the same: for one chunk directly after the anchor, in float32.
"""

import json
import os
import random
import select
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from ragkv.config import Config
from ragkv.evals.experiment import Progress, Row
from ragkv.evals.parameters import Churn
from ragkv.evals.watched import as_environment, resources, watched, with_models
from ragkv.home import Home

_EVERY_S = 0.5
_LATEST_KILL_S = 20.0  # after the process is ready
_GIB = 1 << 30


@dataclass
class Seen:
    """What the processes did and what became of it. Sizes in bytes; of all processes together."""

    steps: Counter[str] = field(default_factory=Counter)
    compared: int = 0
    problems: list[str] = field(default_factory=list)
    indexed: dict[str, bool] = field(default_factory=dict)  # document to whether it has to be present
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


def run(config: Config, wanted: Churn, progress: Progress) -> Iterator[Row]:
    """Yield one row, of `seconds` of work after as many rounds that end in a kill; all in a temporary home."""
    rng, seen = random.Random(wanted.seed), Seen()
    with tempfile.TemporaryDirectory(prefix="ragkv-churn-") as name:
        home = with_models(Path(name), config.home)
        (home / "documents").mkdir()
        begin = time.monotonic()
        for round_ in range(wanted.kills + 1):
            is_last = round_ == wanted.kills
            _round(home, config, wanted.seconds if is_last else None, rng, seen, progress)
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
    progress: Progress,
) -> None:
    """Let a process work for `seconds`, or kill it at a random moment."""
    command = [sys.executable, "-m", "ragkv.evals.robustness.churn_work"]
    command += [str(seconds or 3600), str(rng.getrandbits(32))]
    until: float | None = None
    environment = {**os.environ, **as_environment(config, home), "RAGKV_STORE__CODEC": "raw"}  # whose answers are exact
    with watched(command, environment) as process:
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
                progress.update(f"{sum(seen.steps.values())} steps, {seen.kills} kills, {len(seen.problems)} problems")
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
    return sum(file.stat().st_blocks * 512 for file in (home / "kv").glob("v*/*/*.kv"))


def _left_behind(config: Config, home: Path, seen: Seen) -> list[str]:
    """Return what doesn't hold of a home that nobody uses any more."""
    left = Home(home)
    with left.open_catalog() as catalog, closing(left.open_store()) as store:
        problems = [f"after {seen.kills} kills: {problem}" for problem in store.admin.verify().problems]
        stored = set(store.chunk_hashes(evicted=config.store.disk_gib is not None))
        for name, is_present in seen.indexed.items():
            document = str((home / "documents" / name).resolve())
            if name == seen.at_work:
                continue
            if is_present != (catalog.document_digest(document) is not None):
                problems.append(f"{name} is {'missing' if is_present else 'present still'}")
            if missing := catalog.chunk_hashes_of([document]) - stored:
                problems.append(f"{name} lacks the KV of {len(missing)} chunks")
        return problems
