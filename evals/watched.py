"""Processes that are watched from outside: started with a configuration, measured, and always ended."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import psutil

from ragkv.config import Config


def as_environment(config: Config, home: Path) -> dict[str, str]:
    """Return the environment that gives another process this configuration, with `home`, without the server's part."""
    variables = {"RAGKV_HOME": str(home)}
    for section, values in config.model_dump(mode="json", exclude={"home", "server", "tenants"}).items():
        variables |= {f"RAGKV_{section}__{k}".upper(): str(v) for k, v in values.items() if v is not None}
    return variables


def with_models(home: Path, of: Path) -> Path:
    """Make `home` a home that has the models of the home `of`, and no documents. Returns it."""
    home.mkdir(parents=True, exist_ok=True)
    (home / "models").symlink_to((of / "models").resolve())
    return home


@contextmanager
def watched(
    command: list[str], environment: dict[str, str], errors: int | IO[bytes] = subprocess.DEVNULL
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process in a group of its own, and kill that group at the end, also where SIGTERM ends this process.

    errors: where its stderr goes. To be used in the main thread.
    """
    with (
        _in_order(),
        subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
        ) as process,
    ):
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def _in_order() -> Iterator[None]:
    """Let SIGTERM unwind this process meanwhile."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def at_rest(processes: Iterable[psutil.Process]) -> Iterator[None]:
    """Stop these processes meanwhile, so that they take no time on any core."""
    found = list(processes)
    suspend(found)
    try:
        yield
    finally:
        resume(found)


def suspend(processes: Iterable[psutil.Process]) -> None:
    """Stop these processes (SIGSTOP), as far as they run still."""
    for process in processes:
        with suppress(psutil.Error):
            process.suspend()


def resume(processes: Iterable[psutil.Process]) -> None:
    """Let these processes go on, as far as they run still."""
    for process in processes:
        with suppress(psutil.Error):
            process.resume()


def resources(tree: psutil.Process) -> tuple[int, int]:
    """Return the bytes of memory of its own, without mapped files, and the number of open descriptors and threads.

    Both are 0 while one of the processes ends.
    """
    size = handles = 0
    try:
        for process in (tree, *tree.children(recursive=True)):
            memory = process.memory_info()
            size += memory.rss - memory.shared
            handles += process.num_fds() + process.num_threads()
    except psutil.Error:
        return 0, 0
    return size, handles
