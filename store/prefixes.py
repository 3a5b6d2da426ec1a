"""Exact prefixes on disk: the KV of what requests began with, in a store of its own.

Its entries are segments of prompts (`ragkv.engine.prefixes`), unchanged; those unused longest are evicted first. Any of
them may have the text of any document. So where a chunk's KV is deleted, all prefixes are, and what requests that have
begun before would still store is refused.
"""

import logging
import os
import shutil
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

from ragkv.errors import ConfigError, StoreError
from ragkv.store.disk_store import DiskStore
from ragkv.store.record import FORMAT_VERSION
from ragkv.store.remote import Remote
from ragkv.store.remote_state import LISTED_FOR_S
from ragkv.store.tier import RemoteTier

logger = logging.getLogger(__name__)

_CLEARED = "cleared"  # a file in the folder: its time of change tells when all was deleted last
_PLACE = "prefixes"  # in the bucket
_LISTED_FOR_S = 60.0  # a conversation may go on at another machine; what isn't listed isn't looked for


def open_prefixes(folder: Path, disk_bytes: int) -> DiskStore | None:
    """Open the store, or make it; None, with a warning, where that fails: prefixes aren't kept then.

    disk_bytes: the limit for all entries. What another release has left there is deleted.
    """
    try:
        _remove_other_formats(folder)
        return DiskStore(folder, "raw", disk_bytes=disk_bytes, eviction="lru")
    except (StoreError, OSError) as error:
        logger.warning("prefixes aren't kept: %s", error)
        return None


def open_prefix_tier(
    folder: Path, remote: Remote, disk_bytes: int, is_quiet: Callable[[], bool] = lambda: True, *, is_shared: bool
) -> RemoteTier | None:
    """Open the bucket behind the store of prefixes, in a place of their own; None, with a warning, where that fails.

    remote: where chunks' KV is. is_quiet: as of `Sender`. is_shared: whether prefixes are sent; if not, it is only
    for what is deleted.
    """
    try:
        place = remote.below(_PLACE)
    except ConfigError as error:
        logger.warning("prefixes aren't in the bucket: %s", error)
        return None
    if (store := open_prefixes(folder, disk_bytes)) is None:
        place.close()
        return None
    if is_shared:
        return RemoteTier(store, place, is_quiet=is_quiet, listed_for_s=_LISTED_FOR_S)
    return RemoteTier(store, place, unneeded=set, listed_for_s=LISTED_FOR_S)


def generation(folder: Path) -> int:
    """Return a number that is another one after each `clear_prefixes`, of any process."""
    try:
        return (folder / _CLEARED).stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def size_on_disk(folder: Path) -> int:
    """Return the bytes that all prefixes take, without opening their store; what can't be read counts as nothing."""
    total = 0
    for file in (folder / f"v{FORMAT_VERSION}").glob("*/*"):
        with suppress(OSError):  # it may be evicted just now
            total += file.stat().st_blocks * 512
    return total


def clear_prefixes(folder: Path) -> int:
    """Delete all prefixes. Returns how many segments that were.

    When it returns no file has them, and none will be stored of a request that had asked for its `generation` before.
    Raises StoreError if the folder can't be changed.
    """
    if not folder.exists():
        return 0
    _remove_other_formats(folder)
    with closing(DiskStore(folder, "raw", eviction="lru")) as store:
        return store.delete_all(lambda: _begin_anew(folder / _CLEARED))


def _begin_anew(file: Path) -> None:
    file.touch()
    now = time.time_ns()  # finer than the system's own clock for files
    os.utime(file, ns=(now, now))


def _remove_other_formats(folder: Path) -> None:
    for other in folder.glob("v*"):
        if other.name != f"v{FORMAT_VERSION}":
            shutil.rmtree(other)
