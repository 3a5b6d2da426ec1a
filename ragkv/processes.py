"""Ends the processes that this one has started, at once.

Knows nothing of what they do. For when there is nothing to finish: vLLM's processes don't end before they have loaded
their model.
"""

import os
import re
import signal
from contextlib import suppress
from multiprocessing import active_children, resource_tracker
from pathlib import Path

_PROC, _SHARED = Path("/proc"), Path("/dev/shm")
# As multiprocessing names their files and calls them; loky, which comes with the embedder, changes the prefix.
_KINDS = {"psm_*": "shared_memory", "sem.mp-*": "semaphore", "sem.loky-*": "semaphore"}
_MAPPED = re.compile(rf" (\d+) +{_SHARED}/")


def end_children() -> None:
    """Kill multiprocessing's children and theirs. Free the memory and semaphores that they and this process share.

    For a process that exits at once. What is killed doesn't free them; multiprocessing's tracker would, and complain.
    """
    children = active_children()
    pids = [pid for child in children if child.pid for pid in _family(child.pid)]
    inodes = {inode for pid in (os.getpid(), *pids) for inode in _shared_inodes(pid)}
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for child in children:
        child.join()
    for pattern, kind in _KINDS.items():
        for file in _SHARED.glob(pattern):
            with suppress(FileNotFoundError):
                if file.stat().st_ino in inodes:
                    file.unlink()
                    resource_tracker.unregister(f"/{file.name.removeprefix('sem.')}", kind)


def _family(pid: int) -> list[int]:
    """Return a process and all that it has started, where Linux says so."""
    found = [pid]
    for file in (_PROC / str(pid)).glob("task/*/children"):
        with suppress(OSError):
            found += [other for child in file.read_text().split() for other in _family(int(child))]
    return found


def _shared_inodes(pid: int) -> set[int]:
    """Return the inodes of the files in shared memory that a process has mapped; their paths may be earlier names."""
    with suppress(OSError):
        return set(map(int, _MAPPED.findall((_PROC / str(pid) / "maps").read_text())))
    return set()
