"""What the processes of a fault campaign do with a store. Knows nothing of how they are killed.

A chunk is made from its number and its version, which its records carry as their base position: whoever reads one knows
what it has to hold.
"""

import json
import os
import random
import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch

from ragkv.errors import StoreError
from ragkv.store.base import Snapshot
from ragkv.store.codecs import CODECS, INT8, Codec
from ragkv.store.difference import differences
from ragkv.store.disk_store import DiskStore
from ragkv.store.opening import USAGE_NAME
from ragkv.store.record import ChunkKey, CorruptRecordError, LayerKV

NUM_LAYERS = 3
NUM_CHUNKS = 16  # that writers choose from
_HEADS, _HEAD_SIZE = 2, 32
_CODECS = tuple(CODECS.values())
_RAW_VERSION = 30 * len(_CODECS)  # that is put as `raw`
_WORK_S = 60  # an end also for those that nobody kills
DELETED = NUM_CHUNKS  # in a store to be damaged
_NEW = NUM_CHUNKS + 1  # put after the damage

_PAGE_BYTES = 4096  # of LMDB

CUT_OFF, A_BIT, A_PAGE = "cut off", "a bit", "a page of garbage"
# Ways to damage a file, and between which of its bytes.
TABLE_DAMAGES: dict[str, Callable[[int], tuple[int, int]]] = {
    CUT_OFF: lambda size: (0, size),
    A_BIT: lambda size: (0, size),
    "a bit of the header": lambda size: (0, 2 * _PAGE_BYTES),
    A_PAGE: lambda size: (0, size),
}

Say = Callable[[str], None]
State = dict[int, int]  # chunk to version


def key(chunk: int) -> ChunkKey:
    return ChunkKey(f"{chunk:032x}", f"{1:032x}", f"{2:032x}", (0, _HEADS))


def codec_of(version: int) -> Codec:
    return _CODECS[version % len(_CODECS)]


def layers(chunk: int, version: int) -> list[LayerKV]:
    """Return what is put. Every other chunk is an average, with a v_std; in int8 half of these have a difference."""
    generator = torch.Generator().manual_seed(version * 1000 + chunk)
    num_tokens = 1 + version * 37 % 160
    shape = (_HEADS, num_tokens, _HEAD_SIZE)  # [Hkv, T, D]
    means = [
        LayerKV(
            torch.randn(shape, generator=generator),
            torch.randn(shape, generator=generator),
            version,
            torch.rand(num_tokens, generator=generator) if chunk % 2 else None,
        )
        for _ in range(NUM_LAYERS)
    ]
    if codec_of(version) != INT8 or chunk % 4 != 1:
        return means
    alone = [(kv.k + torch.randn(shape, generator=generator), kv.v) for kv in means]
    changes = differences(alone, [(kv.k, kv.v) for kv in means], INT8.share)
    return [replace(kv, difference=change) for kv, change in zip(means, changes, strict=True)]


def stored(chunk: int, version: int) -> list[LayerKV]:
    """Return what must be read back: what is put, as its codec rounds it."""
    found = []
    for kv in layers(chunk, version):
        codec = codec_of(version).of(is_mean=kv.v_std is not None)
        parts = codec.split(memoryview(codec.encode(kv.k, kv.v)), kv.shape, kv.k.dtype)
        found.append(replace(kv, **vars(parts)))
    return found


def equal(found: LayerKV, expected: LayerKV) -> bool:
    parts, wanted = _parts(found), _parts(expected)
    same = found.base_position == expected.base_position and len(parts) == len(wanted)
    return same and all(torch.equal(a, b) for a, b in zip(parts, wanted, strict=True))


def _parts(kv: LayerKV) -> list[torch.Tensor]:
    spread = () if kv.v_std is None else (kv.v_std,)
    return [*kv.mean().decoded(), *spread, *(kv.difference.parts() if kv.difference else ())]


def put(store: DiskStore, chunks: Iterable[tuple[int, int]]) -> None:
    store.put([(key(chunk), layers(chunk, version)) for chunk, version in chunks])


def write(say: Say, folder: Path, seed: int, deletes: float) -> None:
    """Put chunks, one to three at once, replace and delete some. deletes: the share of steps that do.

    Say what each step is to change, `{chunk: version or null}`, before it begins, and `done` once it returned.
    """
    rng, end = random.Random(seed), time.monotonic() + _WORK_S
    code = rng.randrange(len(_CODECS))
    with closing(DiskStore(folder, _CODECS[code].name)) as store:
        while time.monotonic() < end:
            chunks = rng.sample(range(NUM_CHUNKS), rng.randint(1, 3))
            if rng.random() < deletes:
                say(json.dumps(dict.fromkeys(chunks)))
                store.delete(key(chunk).chunk_hash for chunk in chunks)
            else:
                versions = {chunk: rng.randrange(10_000) * len(_CODECS) + code for chunk in chunks}
                say(json.dumps(versions))
                put(store, versions.items())
            say("done")


def read(say: Say, folder: Path, seed: int) -> None:
    """Read chunks while others write. Say `done` after each round, and raise ValueError for a wrong value."""
    rng, end = random.Random(seed), time.monotonic() + _WORK_S
    with closing(DiskStore(folder)) as store:
        while time.monotonic() < end:
            with store.snapshot() as snapshot:
                for chunk in rng.sample(range(NUM_CHUNKS), NUM_CHUNKS):
                    _read_during_writes(snapshot, chunk)
            say("done")


def _read_during_writes(snapshot: Snapshot, chunk: int) -> None:
    versions = set()
    for layer in range(NUM_LAYERS):
        found = snapshot.get(key(chunk), layer)
        if found is None:
            continue
        version = found.base_position
        versions.add(version)
        if not equal(found, stored(chunk, version)[layer]):
            raise ValueError(f"chunk {chunk}, layer {layer} is not what version {version} was")
    if len(versions) > 1:
        raise ValueError(f"chunk {chunk} has layers of the versions {sorted(versions)} in one snapshot")


def inspect(say: Say, folder: Path) -> None:
    """Say what the store holds, `{chunk: version}`. Raises ValueError if it doesn't verify or a value is wrong."""
    with closing(DiskStore(folder)) as store:
        if problems := store.admin.verify().problems:
            raise ValueError(f"verify: {problems[0]}")
        state: State = {}
        with store.snapshot() as snapshot:
            for chunk in range(NUM_CHUNKS):
                first = snapshot.get(key(chunk), 0)
                if first is not None:
                    state[chunk] = first.base_position
                    _expect(snapshot, chunk, first.base_position, missing=False)
        if [key(chunk).chunk_hash for chunk in state] != list(store.chunk_hashes()):
            raise ValueError("the folder has other entries than can be read")
        say(json.dumps(state))


def _expect(snapshot: Snapshot, chunk: int, version: int | None, *, missing: bool) -> bool:
    """Return whether all layers are present. Raises ValueError for one that isn't what it was, or may not be missing.

    version: None for a chunk that was deleted.
    """
    expected = [None] * NUM_LAYERS if version is None else stored(chunk, version)
    whole = True
    for layer, kv in enumerate(expected):
        try:
            found = snapshot.get(key(chunk), layer)
        except CorruptRecordError:
            if not missing:
                raise
            found = None
        if found is not None and (kv is None or not equal(found, kv)):
            raise ValueError(f"wrong value: chunk {chunk}, layer {layer}")
        if found is None and kv is not None:
            whole = False
            if not missing:
                raise ValueError(f"chunk {chunk}, layer {layer} is missing")
    return whole


def make(folder: Path, left_open: Path) -> None:
    """Make a store to be damaged: chunks of all codecs, one replaced, one deleted.

    left_open: the same without a seal, as a process that was killed leaves it.
    """
    for code in range(len(_CODECS)):
        with closing(DiskStore(folder, _CODECS[code].name)) as store:
            put(store, [(chunk, chunk) for chunk in range(NUM_CHUNKS) if chunk % len(_CODECS) == code])
    with closing(DiskStore(folder)) as store:
        put(store, [(0, 30), (DELETED, 30)])
        put(store, [(0, 0)])
        store.delete([key(DELETED).chunk_hash])
        shutil.copytree(folder, left_open)


def survive(say: Say, folder: Path, seed: int, while_open: bool, of_the_table: str | None = None) -> None:
    """Damage a store and use it. Say what is damaged, then one word for what came of it.

    of_the_table: one of TABLE_DAMAGES; None: a bit or the end of any file. Raises ValueError for a wrong value, and
    lets through every error that a store's users needn't expect.
    """
    rng = random.Random(seed)
    deleted, refused = {DELETED}, False
    if while_open:
        with closing(DiskStore(folder)) as store:
            _look(store)
            _read_all(store, deleted, missing=False)
            damage(say, folder, rng, of_the_table)
            _read_all(store, deleted, missing=True)
            for use in (_look, lambda store: _change(store, deleted, chunk=1, missing=True)):
                try:
                    use(store)
                except StoreError:
                    refused = True
            _read_all(store, deleted, missing=True)
    else:
        damage(say, folder, rng, of_the_table)
    whole = _use_again(folder, deleted)
    say("refused" if refused else "unharmed" if whole else "missed")


def start_again(say: Say, folder: Path) -> None:
    """Use a store as ever after damage has ended a process, perhaps while it deleted chunk 1."""
    with closing(DiskStore(folder)) as store:
        store.delete([key(1).chunk_hash])
    _use_again(folder, {DELETED, 1})


def _use_again(folder: Path, deleted: set[int]) -> bool:
    """Open and use a store. Returns whether all that wasn't deleted is present."""
    with closing(DiskStore(folder)) as store:
        _look(store)
        whole = _read_all(store, deleted, missing=True)
        _change(store, deleted, chunk=2, missing=False)
        _read_all(store, deleted, missing=True)
    return whole


def _look(store: DiskStore) -> None:
    store.admin.stats()
    store.admin.verify()
    list(store.chunk_hashes())


def _read_all(store: DiskStore, deleted: set[int], *, missing: bool) -> bool:
    """Return whether all chunks are present but those that are `deleted`."""
    with store.snapshot() as snapshot:
        chunks = [*range(NUM_CHUNKS), DELETED]
        return sum(_expect(snapshot, c, None if c in deleted else c, missing=missing) for c in chunks) == len(chunks)


def _change(store: DiskStore, deleted: set[int], chunk: int, *, missing: bool) -> None:
    put(store, [(_NEW, 0)])
    with store.snapshot() as snapshot:
        _expect(snapshot, _NEW, 0, missing=missing)
    store.delete([key(chunk).chunk_hash])
    deleted.add(chunk)
    with store.snapshot() as snapshot:
        _expect(snapshot, chunk, None, missing=True)


def damage(say: Say, folder: Path, rng: random.Random, of_the_table: str | None) -> None:
    """Damage a file in place: the table of uses in the way that is named, or any file, each as likely as the others.

    The locks are left alone: they hold nothing that outlives a process.
    """
    table = folder / USAGE_NAME
    kind, file = of_the_table or "", table
    if of_the_table is None:
        kind = CUT_OFF if rng.random() < 0.2 else A_BIT
        file = rng.choice([table, rng.choice(sorted(folder.glob("v*/*/*.kv")))])
    size = file.stat().st_size
    start, end = TABLE_DAMAGES[kind](size)
    offset = rng.randrange(start, end)
    with file.open("r+b", buffering=0) as opened:
        if kind == CUT_OFF:
            opened.truncate(offset)
        elif kind == A_PAGE:
            offset -= offset % _PAGE_BYTES
            os.pwrite(opened.fileno(), rng.randbytes(_PAGE_BYTES), offset)
        else:
            (byte,) = os.pread(opened.fileno(), 1, offset)
            os.pwrite(opened.fileno(), bytes([byte ^ 1 << rng.randrange(8)]), offset)
    say(f"{file.name}, {kind} at {offset} of {size} bytes")


def fill(say: Say, folder: Path) -> None:
    """Put chunks until the disk is full, delete half, put again. Raises ValueError for what should be otherwise."""
    with closing(DiskStore(folder)) as store:
        num_chunks = 0
        try:
            while True:
                put(store, [(num_chunks, _RAW_VERSION)])
                num_chunks += 1
        except StoreError as error:
            if "Free some space" not in str(error):
                raise
        for chunk in range(0, num_chunks, 2):
            with store.snapshot() as snapshot:
                _expect(snapshot, chunk, _RAW_VERSION, missing=False)
            store.delete([key(chunk).chunk_hash])
        put(store, [(num_chunks, _RAW_VERSION)])
        with store.snapshot() as snapshot:
            for chunk in (*range(1, num_chunks, 2), num_chunks):
                _expect(snapshot, chunk, _RAW_VERSION, missing=False)
        if problems := store.admin.verify().problems:
            raise ValueError(f"verify: {problems[0]}")
    say("held")
