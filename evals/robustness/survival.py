"""`ragkv eval survival`: conversations whose stored KV has to outlive restarts, kills, eviction and damage.

Each answer is compared with that of vLLM alone, greedily and token by token; in float32 no two may differ. Several
users talk at a time and want more memory than there is. Between two turns the engine is left alone (others evict what
it has), closed and started again, or killed while it answers; what it hadn't answered is asked again.
"""

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import psutil

from ragkv.config import Config
from ragkv.engine.engine import Engine
from ragkv.errors import ConfigError, EngineStoppedError
from ragkv.evals.beside_vllm import Timed, ask, folder, start
from ragkv.evals.experiment import Progress, Row
from ragkv.evals.registry import Chat, Survival
from ragkv.evals.robustness.faults import Part, Round, small_disk
from ragkv.evals.workloads.chat import Turn, talks
from ragkv.store.entries import EntryFolder
from ragkv.store.record import FORMAT_VERSION

_EVENTS = ("nothing", "restart", "nothing", "kill")
_LONGEST_S = 1.5  # from the first question of a group until the engine is killed
_WRITTEN_S = 20.0
_LEAST_TOKENS, _MOST_TOKENS = 400, 1000  # of a prompt whose stored KV is damaged
_NUM_DAMAGED = 10  # prompts
_DISK_BYTES = 1 << 30


async def run(config: Config, wanted: Survival, progress: Progress) -> AsyncIterator[Row]:
    """Yield a row for what happens between turns, and one for each kind of damage."""
    chat = Chat(wanted.data, wanted.conversations or _NUM_DAMAGED, tokens=wanted.tokens, kv_tokens=wanted.kv_tokens)
    found = [talk[: wanted.turns] for talk in talks(config, chat)]
    with folder() as temporary:
        alone = await start(config, Path(temporary), wanted.kv_tokens, alone=True)
        try:
            if wanted.conversations:
                for part in await _converse(config, wanted, found, alone, Path(temporary), progress):
                    yield part.row()
            if wanted.damages:
                prompts = [
                    turn.token_ids
                    for talk in found
                    for turn in talk
                    if _LEAST_TOKENS < len(turn.token_ids) < _MOST_TOKENS
                ]
                async for part in _damage(config, wanted, prompts[:_NUM_DAMAGED], alone, Path(temporary), progress):
                    yield part.row()
        finally:
            await alone.close()


class _Victim:
    """ragkv's engine, and its processes."""

    def __init__(self, config: Config, folder: Path, kv_tokens: int) -> None:
        self._config, self.folder, self._kv_tokens = config, folder, kv_tokens
        self._processes: list[psutil.Process] = []
        self.engine: Engine

    async def start(self) -> None:
        others = set(psutil.Process().children(recursive=True))
        self.engine = await start(self._config, self.folder, self._kv_tokens, alone=False)
        self._processes = [each for each in psutil.Process().children(recursive=True) if each not in others]

    async def restart(self) -> None:
        await self.engine.close()
        await self.start()

    def kill(self) -> None:
        for process in self._processes:
            try:
                os.kill(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    async def ask(self, token_ids: list[int], max_tokens: int, salt: str | None = None) -> Timed:
        return await ask(self.engine, token_ids, max_tokens, "session", salt)


async def _converse(
    config: Config,
    wanted: Survival,
    conversations: Sequence[list[Turn]],
    alone: Engine,
    folder: Path,
    progress: Progress,
) -> list[Part]:
    rng = random.Random(wanted.seed)
    parts = {event: Part(f"between turns: {event}") for event in dict.fromkeys(_EVENTS)}
    groups = [conversations[i : i + wanted.users] for i in range(0, len(conversations), wanted.users)]
    victim = _Victim(config, folder, wanted.kv_tokens)
    await victim.start()
    try:
        num_events = 0
        for i, group in enumerate(groups):
            for number in range(wanted.turns):
                turns = [talk[number].token_ids for talk in group if len(talk) > number]
                event = _EVENTS[num_events % len(_EVENTS)] if number else "nothing"
                num_events += bool(number)
                begin = time.monotonic()
                expected = [await ask(alone, turn, wanted.tokens) for turn in turns]
                found = await _survive(victim, turns, wanted.tokens, event, rng)
                part = parts[event]
                part.seconds += time.monotonic() - begin
                for j, (a, b) in enumerate(zip(found, expected, strict=True)):
                    is_same = a.token_ids == b.token_ids
                    problem = f"turn {number + 1} of {a.num_tokens} tokens: {a.token_ids} and not {b.token_ids}"
                    outcome = "from the disk" if a.stored else "from memory" if a.prefix else "computed"
                    _note(part, Round(i * wanted.users + j, outcome, None if is_same else problem))
            progress.update("conversations", min(len(conversations), (i + 1) * wanted.users), len(conversations))
    finally:
        await victim.engine.close()
    return list(parts.values())


async def _survive(
    victim: _Victim, turns: Sequence[list[int]], max_tokens: int, event: str, rng: random.Random
) -> list[Timed]:
    """Ask these at once after the event, or with it."""
    if event == "restart":
        await victim.restart()
    asked = [asyncio.ensure_future(victim.ask(turn, max_tokens)) for turn in turns]
    if event == "kill":
        await asyncio.sleep(rng.uniform(0, _LONGEST_S))
        victim.kill()
    answers = await asyncio.gather(*asked, return_exceptions=True)
    lost = [answer for answer in answers if isinstance(answer, BaseException)]
    if others := [error for error in lost if event != "kill" or not isinstance(error, EngineStoppedError)]:
        raise others[0]
    if event == "kill":
        await victim.restart()
    again = await asyncio.gather(
        *(victim.ask(turn, max_tokens) for turn, answer in zip(turns, answers, strict=True) if answer in lost)
    )
    anew = iter(again)
    return [next(anew) if isinstance(answer, BaseException) else answer for answer in answers]


async def _damage(
    config: Config, wanted: Survival, prompts: list[list[int]], alone: Engine, folder: Path, progress: Progress
) -> AsyncIterator[Part]:
    if not prompts:
        raise ConfigError(f"no turn of {_LEAST_TOKENS} to {_MOST_TOKENS} tokens among --conversations")
    expected = [(await ask(alone, prompt, wanted.tokens)).token_ids for prompt in prompts]
    home = folder / "damaged"
    home.mkdir()
    with ExitStack() as stack:
        disk = home / "prefixes"
        error = stack.enter_context(small_disk(disk, _DISK_BYTES))
        victim = _Victim(config, home, wanted.kv_tokens)
        await victim.start()
        try:
            kinds: dict[str, Callable[[Path, random.Random], None]] = {
                "a flipped bit": _flip,
                "a file cut off": _cut,
                "a lost file": _lose,
            }
            for name, spoil in kinds.items():
                part = Part(name)
                await _spoil(part, victim, wanted, prompts, expected, spoil, progress)
                yield part
            part = Part("a full disk", skipped=f"can't mount a small disk: {error}" if error else None)
            if not error:
                await _fill(part, victim, wanted, prompts, expected, progress)
            yield part
        finally:
            await victim.engine.close()


async def _spoil(
    part: Part,
    victim: _Victim,
    wanted: Survival,
    prompts: list[list[int]],
    expected: list[tuple[int, ...]],
    spoil: Callable[[Path, random.Random], None],
    progress: Progress,
) -> None:
    """Ask for a prompt whose stored KV has just been damaged in one place."""
    begin, stored = time.monotonic(), dict[int, list[Path]]()
    for i in range(wanted.damages):
        which, rng = i % len(prompts), random.Random(wanted.seed + i)
        salt = f"{part.name} {which}"
        if which not in stored:
            before = set(_files(victim.folder))
            await victim.ask(prompts[which], wanted.tokens, salt)
            num_segments = -(-(len(prompts[which]) // 128) // 2)
            stored[which] = await _written(lambda old=before: set(_files(victim.folder)) - old, num_segments)  # type: ignore[misc]
        await victim.engine.forget_prefixes()
        spoil(rng.choice(stored[which]), rng)
        found = await victim.ask(prompts[which], wanted.tokens, salt)
        whole = len(prompts[which]) // 128 * 128
        outcome = "noticed" if found.stored < whole else "loaded all the same"
        is_same = found.token_ids == expected[which]
        problem = None if is_same else f"{found.token_ids} and not {expected[which]}"
        _note(part, Round(wanted.seed + i, outcome, problem))
        await _written(lambda files=stored[which]: {file for file in files if file.exists()}, len(stored[which]))  # type: ignore[misc]
        progress.update(part.name, i + 1, wanted.damages)
    part.seconds = time.monotonic() - begin


async def _fill(
    part: Part,
    victim: _Victim,
    wanted: Survival,
    prompts: list[list[int]],
    expected: list[tuple[int, ...]],
    progress: Progress,
) -> None:
    """Ask on a disk that has hardly any room left, and again once it has."""
    begin, disk = time.monotonic(), victim.folder / "prefixes"
    ballast = disk / "ballast"
    for i in range(wanted.damages):
        which, rng = i % len(prompts), random.Random(wanted.seed + i)
        status = os.statvfs(disk)
        room = status.f_bavail * status.f_frsize - rng.randrange(24 << 20)
        descriptor = os.open(ballast, os.O_RDWR | os.O_CREAT)
        os.posix_fallocate(descriptor, 0, max(1, room))
        os.close(descriptor)
        salt = f"full {i}"
        answers = [await victim.ask(prompts[which], wanted.tokens, salt)]
        await asyncio.sleep(0.2)
        await victim.engine.forget_prefixes()
        answers.append(await victim.ask(prompts[which], wanted.tokens, salt))
        ballast.unlink()
        await victim.engine.forget_prefixes()
        answers.append(await victim.ask(prompts[which], wanted.tokens, salt))
        wrong = [answer for answer in answers if answer.token_ids != expected[which]]
        problem = f"{wrong[0].token_ids} and not {expected[which]}" if wrong else None
        _note(part, Round(wanted.seed + i, "nothing kept" if not answers[1].stored else "some kept", problem))
        progress.update(part.name, i + 1, wanted.damages)
    part.seconds = time.monotonic() - begin


def _note(part: Part, played: Round) -> None:
    part.num_rounds += 1
    part.outcomes[played.outcome] += 1
    if played.problem is not None:
        part.failures.append(played)


def _files(folder: Path) -> list[Path]:
    entries = EntryFolder(folder / "prefixes" / f"v{FORMAT_VERSION}")
    return [entries.path(key) for key in entries]


async def _written(files: Callable[[], set[Path]], number: int) -> list[Path]:
    """Wait for so many files. Returns those that are there."""
    end = time.monotonic() + _WRITTEN_S
    while len(found := files()) < number and time.monotonic() < end:
        await asyncio.sleep(0.02)
    return sorted(found)


def _flip(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def _cut(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size))


def _lose(path: Path, rng: random.Random) -> None:
    path.unlink()
