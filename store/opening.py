"""Opens a store's folder and recovers it: a damaged index is made anew, and what a killed process left is freed."""

import fcntl
import logging
import os
from pathlib import Path

from ragkv.errors import StoreError
from ragkv.store.disk import INDEX_NAME, Disk, store_errors
from ragkv.store.index import FORMAT, DamagedIndexError, Index, Location
from ragkv.store.rebuild import find_chunks
from ragkv.store.record import FORMAT_VERSION, tokens_in
from ragkv.store.segments import SegmentFiles, outside
from ragkv.store.usage import Usage

logger = logging.getLogger(__name__)


def open_disk(path: Path, usage: Usage) -> Disk:
    """Open the folder, or make it. usage: counts the chunks of an index that is made anew.

    Raises StoreError if the folder holds something else, was made by another version, or can't be written.
    """
    with store_errors(path, "open"):
        path.mkdir(parents=True, exist_ok=True)
        lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # Not `filelock`'s: every user shares it, and one that mends the index is alone.
            fcntl.flock(lock, fcntl.LOCK_SH)
            files = SegmentFiles(path / "segments")
            disk = Disk(path, files, _open_index(path, lock), lock)
            _check_format(disk, usage)
            _free_leftovers(disk)
        except BaseException:
            os.close(lock)
            raise
    return disk


def _open_index(path: Path, lock: int) -> Index:
    """Open the index; replace a damaged one by an empty one, which no other process may use in the meantime."""
    file = path / INDEX_NAME
    try:
        return Index(file, str(FORMAT_VERSION))
    except DamagedIndexError as error:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreError(
                f"{file} is damaged ({error}), and another process uses it. Stop that process and start again: a "
                "new index is then made from the records"
            ) from error
        logger.warning("%s is damaged (%s); made anew from the records", file, error)
        for part in path.glob(f"{file.name}*"):
            part.unlink()
        index = Index(file, str(FORMAT_VERSION))
        fcntl.flock(lock, fcntl.LOCK_SH)
        return index


def _check_format(disk: Disk, usage: Usage) -> None:
    expected = str(FORMAT_VERSION)
    stored = disk.index.meta(FORMAT)
    if stored is None:
        _fill_index(disk, usage, expected)
    elif stored != expected:
        disk.index.close()
        raise StoreError(
            f"{disk.path} holds KV records of format {stored}; this release reads format "
            f"{FORMAT_VERSION}. Use the release that wrote it, another --home, or delete the folder and index again"
        )


def _fill_index(disk: Disk, usage: Usage, version: str) -> None:
    """Name in an empty index the chunks whose records are in the segments, and its format, in one transaction: so an
    index with a format is whole, and what it doesn't name may be freed."""
    with disk.index.writing() as changes:
        if changes.query("select 1 from meta where name = ?", FORMAT):  # another process was faster
            return
        chunks = list(find_chunks(disk.files))
        for key, segment, offset, lengths in chunks:
            changes.put(key, location := Location(segment, offset, lengths))
            first = disk.files.read(*location.layer(0)) or b""
            usage.put(changes, key, location.extent.length, cost=tokens_in(first))
        if chunks:
            logger.warning("found %d chunks again whose index was lost", len(chunks))
        changes.set_meta(FORMAT, version)


def _free_leftovers(disk: Disk) -> None:
    """Free what a killed process left: given up and not freed, or written and not named in the index."""
    disk.sweep()
    with disk.index.writing() as changes:  # nobody writes in the meantime
        for extent in list(outside(disk.files.data(), changes.extents())):
            disk.files.free(extent)
