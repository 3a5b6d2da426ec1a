"""Whether a store is well: for load balancers and people."""

import shutil
from dataclasses import dataclass, field

from ragkv.errors import StoreError
from ragkv.home import Home
from ragkv.store.admin import LastVerification
from ragkv.store.disk_store import DiskStore
from ragkv.store.prefixes import size_on_disk

MIN_FREE_BYTES = 64 << 20  # with less, documents are soon refused


@dataclass(frozen=True)
class Health:
    """problems: why KV can't be read or stored; none of them: it is well. warnings: what somebody should look at.

    disk_bytes: the store's budget, None: the disk's. prefix_bytes: what exact prefixes take, which have a budget of
    their own. damaged: entries that answers found damaged since the server's start, None where no server is asked.
    """

    readable: bool
    writable: bool
    free_bytes: int
    used_bytes: int | None
    pinned_bytes: int | None
    disk_bytes: int | None
    prefix_bytes: int
    damaged: int | None
    verified: LastVerification | None
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def is_well(self) -> bool:
        return not self.problems


def unusable(home: Home, disk_bytes: int | None, problem: str, damaged: int | None = None) -> Health:
    """Return the health of a store that can't be opened, or doesn't answer."""
    free_bytes = shutil.disk_usage(home.path).free if home.path.exists() else 0
    return Health(False, False, free_bytes, None, None, disk_bytes, 0, damaged, None, [problem])


def examine(home: Home, store: DiskStore, disk_bytes: int | None, damaged: int | None = None) -> Health:
    """Read and write as answers and indexing do. Waits for others that write."""
    problems, warnings, failed = [], [], set()
    for name, attempt in (("read", store.control.try_reading), ("write", store.control.try_writing)):
        try:
            attempt()
        except StoreError as error:
            problems.append(str(error))
            failed.add(name)
    free_bytes = shutil.disk_usage(home.path).free
    if free_bytes < MIN_FREE_BYTES:
        problems.append(
            f"{free_bytes >> 20} MiB are free on the disk of {home.path}; free some, or documents are refused"
        )
    used = pinned = None
    if not failed:
        gauges = store.admin.gauges()
        used, pinned = gauges["disk_bytes"], gauges["pinned_bytes"]
        if disk_bytes is not None and pinned > disk_bytes:
            warnings.append("more is pinned than store.disk_gib holds, so nothing else is kept; `ragkv store unpin`")
    if damaged:
        warnings.append(f"{damaged} entries were damaged and are made anew; look at the disk, and `ragkv store verify`")
    verified = store.admin.last_verification()
    if verified is not None and verified.num_problems:
        warnings.append(f"the last `ragkv store verify` found {verified.num_problems} problems")
    return Health(
        "read" not in failed,
        not failed,
        free_bytes,
        used,
        pinned,
        disk_bytes,
        size_on_disk(home.prefixes),
        damaged,
        verified,
        problems,
        warnings,
    )
