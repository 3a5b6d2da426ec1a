"""Opens a store's folder and recovers it: a damaged table is made anew, what a killed process left is removed."""

import errno
import fcntl
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import lmdb

from ragkv.errors import StoreError
from ragkv.store.entries import EntryFolder
from ragkv.store.record import FORMAT_VERSION, CorruptRecordError, read_header
from ragkv.store.table import TableDamageError, is_damage, remove
from ragkv.store.usage import Usage

logger = logging.getLogger(__name__)

USAGE_NAME = "usage.mdb"
_OF_BEFORE = "usage.db"  # the same in SQLite, of earlier releases: made anew
_NEARLY_FULL_BYTES = 64 << 20
_FORMATS = {"segments": "3", **{f"v{version}": str(version) for version in range(1, 100)}}  # by the folder's name


def open_folder(path: Path, policy: str) -> tuple[EntryFolder, Usage, int]:
    """Open the folder, or make it. Returns also the descriptor of a lock, which the caller holds until it closes.

    Raises StoreError if the folder holds something else, was made by another version, or can't be written.
    """
    with store_errors(path, "open"):
        path.mkdir(parents=True, exist_ok=True)
        _check_format(path)
        lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # Not `filelock`'s: every user shares it, and one that mends the folder is alone.
            fcntl.flock(lock, fcntl.LOCK_SH)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_alone = True  # and none comes before the lock is shared again
            except BlockingIOError:
                fcntl.flock(lock, fcntl.LOCK_SH)  # the attempt has given it up
                is_alone = False
            entries = EntryFolder(path / f"v{FORMAT_VERSION}")
            if is_alone:
                entries.remove_unfinished()
            usage = _open_usage(path / USAGE_NAME, policy, is_alone)
            if usage.is_empty:
                _fill(usage, entries)
            fcntl.flock(lock, fcntl.LOCK_SH)
        except BaseException:
            os.close(lock)
            raise
    return entries, usage, lock


def _check_format(path: Path) -> None:
    names = {file.name for file in path.iterdir()} - {f"v{FORMAT_VERSION}"}
    if found := [_FORMATS[name] for name in names if name in _FORMATS]:
        raise StoreError(
            f"{path} holds KV records of format {found[0]}; this release reads format {FORMAT_VERSION}. Use the "
            "release that wrote it, another --home, or delete the folder and index again"
        )


def _open_usage(file: Path, policy: str, is_alone: bool) -> Usage:
    try:
        usage = Usage(file, policy, is_alone=is_alone)
    except (TableDamageError, lmdb.Error) as error:
        if not is_damage(error):
            raise
        if not is_alone:
            raise StoreError(
                f"{file} is damaged ({error}), and another process uses it. Stop that process and start again: it is "
                "then made anew"
            ) from error
        logger.warning("%s is damaged (%s); made anew, without what was known of uses", file, error)
        remove(file)
        usage = Usage(file, policy, is_alone=is_alone)
    if is_alone:
        for old in file.parent.glob(f"{_OF_BEFORE}*"):
            old.unlink()
    return usage


def _fill(usage: Usage, entries: EntryFolder) -> None:
    """Make a row for each entry, as used just now; delete entries whose head or first record is damaged."""
    with usage.writing():
        for key in entries:
            try:
                file = entries.open(key)
                assert file is not None  # nobody else writes
                with closing(file):
                    num_tokens = read_header(file.read(0)).shape[1]
                usage.put(key, entries.size(key), cost=num_tokens, stored=True)
            except CorruptRecordError as error:
                logger.warning("chunk %s is deleted: %s", key.chunk_hash, error)
                entries.delete([key])


@contextmanager
def store_errors(path: Path, verb: str) -> Iterator[None]:
    """Raise StoreError, with the remedy, for what the system and LMDB raise inside."""
    try:
        yield
    except (TableDamageError, lmdb.Error, OSError) as error:
        free = shutil.disk_usage(path).free if path.exists() else 0
        full = free < _NEARLY_FULL_BYTES or getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        remedy = "Is it a ragkv store that you may write to?"
        if is_damage(error):
            remedy = f"{USAGE_NAME} is damaged. Stop all that uses it and start again: it is then made anew"
        elif full:
            remedy = "Free some space, or choose another --home"
        raise StoreError(
            f"can't {verb} the KV store {path} ({free >> 20} MiB free on its disk): {error}. {remedy}"
        ) from error
