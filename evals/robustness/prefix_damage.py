"""Damage to the stored KV of prompts, on the disk and in the bucket behind it: it may cost time, and never a token."""

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ragkv.config import Config
from ragkv.engine.engine import Engine
from ragkv.engine.prefixes import Beginnings, Prefixes
from ragkv.engine.task import Span
from ragkv.evals import bucket as s3
from ragkv.evals.beside_vllm import Timed, ask
from ragkv.evals.bucket import Bucket
from ragkv.evals.experiment import Progress, Row
from ragkv.evals.parameters import DAMAGES, Survival
from ragkv.evals.robustness.faults import Part, Round, small_disk
from ragkv.evals.robustness.victim import Victim, note
from ragkv.store.entries import EntryFolder
from ragkv.store.prefixes import clear_prefixes, open_prefix_tier
from ragkv.store.record import FORMAT_VERSION, ChunkKey
from ragkv.store.remote import Remote
from ragkv.store.tier import RemoteTier

_Stored = TypeVar("_Stored")  # a file or an entry
_WRITTEN_S = 20.0
_DISK_BYTES = 1 << 30
_TIMEOUT_S = 1.0  # of a request to the bucket
_WAIT_S = 0.5  # for what the bucket has of a prompt
_SLOWEST, _FASTEST = 5 << 20, 100 << 20  # bytes a second of a slow bucket
_SOON_S = 0.2  # within which a bucket goes away


async def damage(
    config: Config, wanted: Survival, prompts: list[list[int]], alone: Engine, folder: Path, progress: Progress
) -> AsyncIterator[Row]:
    """Yield a row for each way to damage what is stored of these prompts. alone: vLLM, whose answers count."""
    expected = [(await ask(alone, prompt, wanted.tokens)).token_ids for prompt in prompts]
    home = folder / "damaged"
    home.mkdir()
    with ExitStack() as stack:
        disk = home / "prefixes"
        error = stack.enter_context(small_disk(disk, _DISK_BYTES))
        victim = Victim(config, home, wanted.kv_tokens)
        await victim.start()
        try:
            trial = _Trial(wanted, victim, prompts, expected, progress)
            for name, spoil in zip(DAMAGES[:3], (_flip, _cut, _lose), strict=True):
                if name in wanted.kinds:
                    yield (await trial.of_a_file(name, spoil)).row()
            if (name := DAMAGES[3]) in wanted.kinds:
                if error:
                    yield Part(name, skipped=f"can't mount a small disk: {error}").row()
                else:
                    yield (await trial.of_a_full_disk()).row()
            names = [name for name in DAMAGES[-3:] if name in wanted.kinds]
            if not names:
                return
            if not s3.is_installed():
                for name in names:
                    yield Part(name, skipped="there is no S3 server: pip install 'moto[server]'").row()
                return
            found = stack.enter_context(s3.new_bucket(stack.enter_context(s3.s3_server())))
            tier = open_prefix_tier(disk, Remote(found.url, _TIMEOUT_S), _DISK_BYTES, is_shared=True)
            assert tier is not None
            stack.enter_context(closing(tier.store))
            stack.enter_context(closing(tier))
            behind = _Behind(trial, tier, found)
            for name, trouble in zip(DAMAGES[-3:], (behind.slow, behind.away, behind.damaged), strict=True):
                if name in names:
                    yield (await behind.of_a_bucket(name, trouble)).row()
        finally:
            await victim.engine.close()


@dataclass
class _Trial:
    """Prompts, whose KV is damaged one after the other."""

    wanted: Survival
    victim: Victim
    prompts: list[list[int]]
    expected: list[tuple[int, ...]]
    progress: Progress

    def rounds(self, part: Part) -> "list[tuple[int, int, random.Random]]":
        """Return for each round its number, its prompt's and its chances."""
        seeds = range(self.wanted.seed, self.wanted.seed + self.wanted.damages)
        return [(i, i % len(self.prompts), random.Random(f"{part.name} {seed}")) for i, seed in enumerate(seeds)]

    async def ask(self, which: int, salt: str) -> Timed:
        return await self.victim.ask(self.prompts[which], self.wanted.tokens, salt)

    async def store(self, which: int, salt: str) -> list[Path]:
        """Have the KV of a prompt stored. Returns the files."""
        before = set(_files(self.victim.folder))
        await self.ask(which, salt)
        return await _written(lambda: set(_files(self.victim.folder)) - before, len(self._segments(which)))

    def note(self, part: Part, i: int, which: int, outcome: str, answers: Sequence[Timed]) -> None:
        wrong = [answer.token_ids for answer in answers if answer.token_ids != self.expected[which]]
        problem = f"{wrong[0]} and not {self.expected[which]}" if wrong else None
        note(part, Round(self.wanted.seed + i, outcome, problem))
        self.progress.update(part.name, i + 1, self.wanted.damages)

    def whole(self, which: int) -> int:
        """Return how many of a prompt's tokens are loaded if nothing is wrong.

        The last token is vLLM's to compute, and a segment that goes on into the answer isn't the prompt's.
        """
        prompt, stored = self.prompts[which], set(map(self._known().key, self._segments(which)))
        found = self._known(stored.__contains__).find(self._beginnings(prompt), 0, len(prompt) - 1)
        return found[-1].end if found else 0

    def _segments(self, which: int) -> tuple[Span, ...]:
        """Return what is stored of a prompt and its answer, without the last token of all."""
        token_ids = [*self.prompts[which], *self.expected[which]]
        return self._known().missing(self._beginnings(token_ids), len(token_ids) - 1)

    def _known(self, contains: Callable[[ChunkKey], bool] = lambda key: False) -> Prefixes:
        engine = self.victim.engine
        return Prefixes(contains, lambda: 0, "", engine.kv_heads, engine.block_size)

    def _beginnings(self, token_ids: list[int]) -> Beginnings:
        engine = self.victim.engine
        return Beginnings(engine.block_hashes(token_ids, None), token_ids, engine.block_size)

    async def of_a_file(self, name: str, spoil: Callable[[Path, random.Random], None]) -> Part:
        """Ask for a prompt whose stored KV has just been damaged in one place."""
        part, begin, stored = Part(name), time.monotonic(), dict[int, list[Path]]()
        for i, which, rng in self.rounds(part):
            salt = f"{name} {which}"
            if which not in stored:
                stored[which] = await self.store(which, salt)
            await self.victim.engine.forget_prefixes()
            spoil(rng.choice(stored[which]), rng)
            found = await self.ask(which, salt)
            outcome = "noticed" if found.stored < self.whole(which) else "loaded all the same"
            self.note(part, i, which, outcome, [found])
            await _written(lambda files=stored[which]: {each for each in files if each.exists()}, len(stored[which]))  # type: ignore[misc]
        part.seconds = time.monotonic() - begin
        return part

    async def of_a_full_disk(self) -> Part:
        """Ask on a disk that has hardly any room left, and again once it has."""
        part, begin = Part("a full disk"), time.monotonic()
        ballast = self.victim.folder / "prefixes" / "ballast"
        for i, which, rng in self.rounds(part):
            await _take_room(ballast, rng.randrange(24 << 20))
            salt = f"full {i}"
            answers = [await self.ask(which, salt)]
            await asyncio.sleep(0.2)
            for is_full in (True, False):
                if not is_full:
                    ballast.unlink()
                await self.victim.engine.forget_prefixes()
                answers.append(await self.ask(which, salt))
            self.note(part, i, which, "some kept" if answers[1].stored else "nothing kept", answers)
        clear_prefixes(self.victim.folder / "prefixes")  # what follows needs room
        part.seconds = time.monotonic() - begin
        return part


class _Behind:
    """A bucket that has the KV of all prompts, behind the store that the engine loads it from."""

    def __init__(self, trial: _Trial, tier: RemoteTier, bucket: Bucket) -> None:
        self._trial, self._tier, self._bucket = trial, tier, bucket

    async def of_a_bucket(self, name: str, trouble: Callable[[random.Random, Sequence[ChunkKey]], None]) -> Part:
        """Ask for a prompt whose KV is in the bucket only, with which something is wrong just then."""
        part, begin, stored = Part(name), time.monotonic(), dict[int, list[ChunkKey]]()
        trial, tier, store = self._trial, self._tier, self._tier.store
        for i, which, rng in trial.rounds(part):
            salt = f"{name} {which}"
            if which not in stored:
                files = set(await trial.store(which, salt))
                stored[which] = [key for key in store.entries if store.entries.path(key) in files]
                await asyncio.to_thread(tier.send)
            store.control.clear(stored[which])  # as if they had been evicted
            await trial.victim.engine.forget_prefixes()
            trouble(rng, stored[which])
            await tier.fetch(stored[which], _WAIT_S)
            found = await trial.ask(which, salt)
            outcome = "all came" if found.stored == trial.whole(which) else "some came" if found.stored else "none came"
            trial.note(part, i, which, outcome, [found])
            self._bucket.proxy.set()
            tier.remote.breaker.succeeded()
            await _written(lambda keys=stored[which]: set(filter(store.contains, keys)), len(stored[which]))  # type: ignore[misc]
            await asyncio.to_thread(tier.send)
        part.seconds = time.monotonic() - begin
        return part

    def slow(self, rng: random.Random, keys: Sequence[ChunkKey]) -> None:
        self._bucket.proxy.set(bytes_per_s=rng.uniform(_SLOWEST, _FASTEST))

    def away(self, rng: random.Random, keys: Sequence[ChunkKey]) -> None:
        """Now or while something comes, and with or without a word."""
        state, soon_s = rng.choice(("closed", "silent")), rng.choice((0.0, rng.uniform(0, _SOON_S)))
        if soon_s:
            asyncio.get_running_loop().call_later(soon_s, self._bucket.proxy.set, state)
        else:
            self._bucket.proxy.set(state)

    def damaged(self, rng: random.Random, keys: Sequence[ChunkKey]) -> None:
        objects, key = self._bucket.objects(), rng.choice(keys)
        name = next(name for name in objects if key.chunk_hash in name)
        self._bucket.write(name, _flipped(objects[name], rng))


def _files(folder: Path) -> list[Path]:
    entries = EntryFolder(folder / "prefixes" / f"v{FORMAT_VERSION}")
    return [entries.path(key) for key in entries]


async def _written(found: Callable[[], set[_Stored]], number: int) -> list[_Stored]:
    """Wait for so many files or entries. Returns those that are there."""
    end = time.monotonic() + _WRITTEN_S
    while len(written := found()) < number and time.monotonic() < end:
        await asyncio.sleep(0.02)
    return list(written)


async def _take_room(ballast: Path, num_bytes: int) -> None:
    """Leave so many bytes on a file's disk, to which something may still be written meanwhile."""
    end = time.monotonic() + _WRITTEN_S
    while True:
        status = os.statvfs(ballast.parent)
        descriptor = os.open(ballast, os.O_RDWR | os.O_CREAT)
        try:
            os.posix_fallocate(descriptor, 0, max(1, status.f_bavail * status.f_frsize - num_bytes))
            return
        except OSError:
            if time.monotonic() > end:
                raise
        finally:
            os.close(descriptor)
        await asyncio.sleep(0.1)


def _flipped(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _flip(path: Path, rng: random.Random) -> None:
    path.write_bytes(_flipped(path.read_bytes(), rng))


def _cut(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size))


def _lose(path: Path, rng: random.Random) -> None:
    path.unlink()
