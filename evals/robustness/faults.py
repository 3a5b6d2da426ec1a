"""`ragkv eval faults`: kill processes that use a store, damage its files, fill its disk. Needs no model.

Every store is used in a forked process only, which may die. So call `run` from a process without threads, and with
nothing of a store open.
"""

import json
import logging
import multiprocessing
import os
import random
import select
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from ragkv.config import Config
from ragkv.evals.experiment import Progress, Row
from ragkv.evals.parameters import Faults
from ragkv.evals.robustness import fault_work
from ragkv.evals.robustness.fault_work import NUM_CHUNKS, State

_FORK = multiprocessing.get_context("fork")
_TIMEOUT_S = 20  # then a process hangs
_MAX_DELAY_S = 0.15  # from a worker's first acknowledgement to its end
_DISK_BYTES = 8 << 20
DIED = "died by signal"


@dataclass(frozen=True)
class Round:
    """What came of one. problem: what did not hold."""

    seed: int
    outcome: str
    problem: str | None = None


@dataclass
class Part:
    """The rounds of one kind of fault. skipped: why there are none."""

    name: str
    num_rounds: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[Round] = field(default_factory=list)
    seconds: float = 0.0
    skipped: str | None = None

    def row(self) -> Row:
        return {
            "part": self.name,
            "rounds": self.num_rounds,
            "failed": len(self.failures),
            "outcomes": dict(sorted(self.outcomes.items())),
            "failures": [{"seed": failure.seed, "problem": failure.problem} for failure in self.failures],
            "seconds": round(self.seconds, 1),
            "skipped": self.skipped,
        }


def run(config: Config, wanted: Faults, progress: Progress) -> Iterator[Row]:
    """Yield a row for each part.

    Round i has the seed `seed + i`: one round with that seed is the same again, as far as kills at some time can be.
    """
    with tempfile.TemporaryDirectory(prefix="ragkv-faults-") as name:
        folder = Path(name)
        seed = wanted.seed
        parts: list[tuple[str, int, Callable[[Path, range], Iterator[Round]]]] = [
            ("kills", wanted.kills, kills),
            ("damage", wanted.flips, flips),
        ]
        for kind in fault_work.TABLE_DAMAGES:
            for when, while_open in (("at rest", False), ("while open", True)):
                on_uses = partial(table_damages, kind=kind, while_open=while_open)
                parts.append((f"uses: {kind}, {when}", wanted.table, on_uses))
        for part, count, rounds in parts:
            if count:
                yield _play(Part(part), count, rounds(folder / part, range(seed, seed + count)), progress).row()
        yield _full_disk(folder / "disk", seed, progress).row()


def _play(part: Part, count: int, rounds: Iterator[Round], progress: Progress) -> Part:
    start = time.monotonic()
    for played in rounds:
        part.num_rounds += 1
        part.outcomes[played.outcome] += 1
        if played.problem is not None:
            part.failures.append(played)
        progress.update(part.name, part.num_rounds, count)
    part.seconds = time.monotonic() - start
    return part


class Child:
    """A forked process that works, and what it said, line by line."""

    def __init__(self, work: Callable[..., None], *args: object) -> None:
        self._said, write = os.pipe()
        self._text = b""
        self._process = _FORK.Process(target=_child, args=(write, work, *args), daemon=True)
        self._process.start()
        os.close(write)

    def wait_for(self, line: str) -> str | None:
        """Wait until it says so. Returns how it failed before that."""
        end = time.monotonic() + _TIMEOUT_S
        while line not in self._lines():
            ready, _, _ = select.select([self._said], [], [], max(0, end - time.monotonic()))
            if not ready:
                return f"never said {line!r} in {_TIMEOUT_S} s"
            if not self._read():
                return self.join()[1] or "ended before it was killed"
        return None

    def kill(self) -> list[str]:
        """Kill it. Returns what it said, and nothing of a line that it didn't end."""
        self._process.kill()
        return self._end()

    def join(self) -> tuple[list[str], str | None]:
        """Wait for its end. Returns what it said, and how it failed. One that hangs is killed."""
        self._process.join(_TIMEOUT_S)
        code = self._process.exitcode
        lines = self.kill()
        if code is None:
            return lines, f"hung for {_TIMEOUT_S} s"
        if code < 0:
            return lines, f"{DIED} {-code}"
        return (lines[:-1], lines[-1]) if code else (lines, None)

    def failure(self) -> str | None:
        """Return how it failed, if it should still be working and isn't."""
        code = self._process.exitcode
        return None if code is None else self.join()[1] or "ended before it was killed"

    def _lines(self) -> list[str]:
        return self._text.decode().split("\n")[:-1]

    def _read(self) -> bool:
        text = os.read(self._said, 1 << 16)
        self._text += text
        return bool(text)

    def _end(self) -> list[str]:
        if self._said >= 0:
            self._process.join()
            while self._read():
                pass
            os.close(self._said)
            self._said = -1
        return self._lines()


def _child(write: int, work: Callable[..., None], *args: object) -> None:
    logging.disable()
    torch.set_num_threads(1)

    def say(line: str) -> None:
        os.write(write, f"{line}\n".encode())

    try:
        work(say, *args)
    except BaseException as error:
        say(f"{type(error).__name__}: {error}".replace("\n", " "))
        os._exit(1)


def kills(folder: Path, seeds: range) -> Iterator[Round]:
    """Kill an indexer, a compactor, or a reader and the writer next to it, on a store that lives from round to round;
    then it must hold what was acknowledged, and of what was begun each chunk as it was or as it was to be."""
    state: State = {}
    for seed in seeds:
        rng = random.Random(seed)
        role = ("indexer", "compactor", "reader")[seed % 3]
        readers = [Child(fault_work.read, folder, seed)] if role == "reader" else []
        writer = Child(fault_work.write, folder, seed, 0.7 if role == "compactor" else 0.1)
        problem = _kill(rng, [*readers, writer])
        before, after = _states(state, writer.kill())
        lines, failure = Child(fault_work.inspect, folder).join()
        if failure is None:
            state = {int(chunk): version for chunk, version in json.loads(lines[-1]).items()}
            if any(state.get(chunk) not in (before.get(chunk), after.get(chunk)) for chunk in range(NUM_CHUNKS)):
                failure = f"holds {state}, acknowledged was {before}, begun {after}"
        if failure is not None:  # the next round begins with a new store
            shutil.rmtree(folder, ignore_errors=True)
            state = {}
        yield Round(seed, role, problem or failure)


def _kill(rng: random.Random, children: list[Child]) -> str | None:
    """Kill each a random time after all are at work. Returns how one failed before."""
    problem = None
    for child in children:
        problem = problem or child.wait_for("done")
    delays = sorted((rng.uniform(0, _MAX_DELAY_S), i) for i in range(len(children)))
    start = time.monotonic()
    for delay, i in delays:
        time.sleep(max(0, start + delay - time.monotonic()))
        problem = problem or children[i].failure()
        children[i].kill()
    return problem


def _states(state: State, lines: list[str]) -> tuple[State, State]:
    """Return what a writer may leave: what it acknowledged, and the same with what it had begun."""
    before = after = state
    for line in lines:
        if line == "done":
            before = after
        elif line.startswith("{"):
            changes = {int(chunk): version for chunk, version in json.loads(line).items()}
            after = {c: v for c, v in sorted({**before, **changes}.items()) if v is not None}
    return before, after


def flips(folder: Path, seeds: range) -> Iterator[Round]:
    """Flip a bit, or cut a file off, before a store is opened or while it is open; it must be of use afterwards, and
    give no wrong value."""
    for seed, damaged in _damaged(folder, seeds):
        while_open = random.Random(seed).random() < 0.5
        lines, failure = Child(fault_work.survive, damaged, seed, while_open).join()
        yield _round(seed, lines, failure, " while open" * while_open)


def table_damages(folder: Path, seeds: range, kind: str, *, while_open: bool) -> Iterator[Round]:
    """Damage the table of uses. While it is open that may end the process; then the next start must find it."""
    for seed, damaged in _damaged(folder, seeds):
        lines, failure = Child(fault_work.survive, damaged, seed, while_open, kind).join()
        if while_open and failure is not None and failure.startswith(DIED):
            _, failure = Child(fault_work.start_again, damaged).join()
            lines = [*lines, "ended the process"]
        yield _round(seed, lines, failure)


def _damaged(folder: Path, seeds: range) -> Iterator[tuple[int, Path]]:
    """Yield for each seed a copy of a store that is to be damaged."""
    pristine = [folder / "closed", folder / "left_open"]
    shutil.rmtree(folder, ignore_errors=True)
    _, failure = Child(lambda _: fault_work.make(*pristine)).join()
    if failure is not None:
        raise RuntimeError(f"no store to be damaged can be made: {failure}")
    damaged = folder / "damaged"
    for seed in seeds:
        shutil.rmtree(damaged, ignore_errors=True)
        shutil.copytree(random.Random(f"which {seed}").choice(pristine), damaged)
        yield seed, damaged


def _round(seed: int, lines: list[str], failure: str | None, when: str = "") -> Round:
    if failure is None:
        return Round(seed, lines[-1])
    return Round(seed, "failed", f"{lines[0] if lines else ''}{when}: {failure}")


def _full_disk(folder: Path, seed: int, progress: Progress) -> Part:
    part = Part("full disk")
    with small_disk(folder, _DISK_BYTES) as error:
        if error is not None:
            part.skipped = f"can't mount a small disk: {error}"
            return part
        return _play(part, 1, fills(folder / "kv", seed), progress)


def fills(folder: Path, seed: int) -> Iterator[Round]:
    """Put until a disk is full: all that was put is present, and space that is freed is used again."""
    lines, failure = Child(fault_work.fill, folder).join()
    yield Round(seed, "failed" if failure else lines[-1], failure)


@contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[str | None]:
    """Mount one; give what the system says where that isn't permitted."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        yield str(error)
        return
    if mounted.returncode:
        yield mounted.stderr.strip()
        return
    try:
        yield None
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)  # a process may still be about to end
