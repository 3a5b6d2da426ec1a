"""A process that reads untrusted files (`python -m ragkv.retriever.parse`), and `Reader`, which runs it.

Each line of the process's input is a file's path and name. It answers with a line for each document, or for why one
can't be read, and with an empty line at the end. Its memory, and for each file its time and output, are bounded: a file
that was made to exceed them ends this process and nothing else.
"""

import json
import logging
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from ragkv.errors import DocumentError
from ragkv.files import atomic_write
from ragkv.retriever.documents import Document

logger = logging.getLogger(__name__)

MEMORY_BYTES, CPU_S = 2 << 30, 120  # of the process; for each of its files
_SWELLING, _LEAST_OUTPUT = 8, 64 << 20  # a file's documents may have 8 times its bytes and 64 MiB
_MOST_SAID = 1000  # bytes of a process' last words that are logged
_BOUNDS = f"{MEMORY_BYTES >> 30} GiB of memory, {CPU_S} s or {_SWELLING} times its size"
_LOG_BYTES = 1 << 20  # what the process may write into files: what its libraries complain of


class Reader:
    """Reads files in a process of its own; after a file that ended it the next one gets a new process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - what the process complains of
        self._stopped = False

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *exception: object) -> None:
        self._end()
        self._log.close()

    def stop(self) -> None:
        """End what is being read, from any thread."""
        self._stopped = True
        if process := self._process:
            process.kill()

    def read(self, file: Path, name: str | None = None) -> Iterator[Document | DocumentError]:
        """Yield what `load_file` yields, and a DocumentError if reading the file ends the process."""
        process, room = self._started(), _LEAST_OUTPUT
        with suppress(OSError):  # the process says what is wrong with the file
            room += _SWELLING * file.stat().st_size
        assert process.stdin and process.stdout
        line = b""
        try:
            process.stdin.write(json.dumps([str(file), name]).encode() + b"\n")
            process.stdin.flush()
            while (line := process.stdout.readline(max(room, 0))).endswith(b"\n") and line != b"\n":
                room -= len(line)
                fields = json.loads(line)
                yield DocumentError(fields) if isinstance(fields, str) else Document(**fields)
        except BrokenPipeError:
            line = b""
        finally:
            if line != b"\n":
                self._end()
        if line != b"\n":
            shown = str(file) if name is None else name
            yield DocumentError(
                f"{shown!r}: reading it takes more than {_BOUNDS}, or breaks the reader; convert it to plain text"
            )

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is not None:
            self._end()
        if self._process is None:
            command, pipe = (sys.executable, "-P", "-m", __name__), subprocess.PIPE
            # A process group of its own: Ctrl-C is for this process, which ends that one.
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._log, process_group=0)
        if self._stopped:
            self._process.kill()
        return self._process

    def _end(self) -> None:
        """End the process, and log what it said if it has ended by itself."""
        if self._process is None:
            return
        with suppress(BrokenPipeError), self._process as process:  # closes its pipes and waits for it
            process.kill()  # which means nothing to one that has ended
        self._process = None
        self._log.seek(0)
        if process.returncode != -signal.SIGKILL:
            said = self._log.read(_MOST_SAID).decode(errors="replace")
            logger.warning("a reader of documents ended with status %s: %s", process.returncode, said)
        self._log.seek(0)
        self._log.truncate()


def read_documents(file: Path) -> Iterator[Document]:
    """Yield the documents that were written to a file."""
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            yield Document(**json.loads(line))


def write_documents(file: Path, documents: Iterable[Document]) -> None:
    """Write what `read_documents` reads: all or nothing, and on disk when it returns."""
    with atomic_write(file) as lines:
        for document in documents:
            lines.write(json.dumps(asdict(document)).encode() + b"\n")


def main() -> None:
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no document
    limits = {resource.RLIMIT_AS: MEMORY_BYTES, resource.RLIMIT_FSIZE: _LOG_BYTES, resource.RLIMIT_CORE: 0}
    for what, value in limits.items():
        _limit(what, value)
    from ragkv.retriever.loading import load_file  # within the limits, and not in the process that has a Reader

    for line in sys.stdin.buffer:
        file, name = json.loads(line)
        _limit(resource.RLIMIT_CPU, int(time.process_time()) + 1 + CPU_S)
        for document in load_file(file, name):
            said = str(document) if isinstance(document, DocumentError) else asdict(document)
            out.write(json.dumps(said).encode() + b"\n")
        out.write(b"\n")
        out.flush()


def _limit(what: int, value: int) -> None:
    """Set a soft limit, which can be set anew, up to the process' hard one."""
    _, most = resource.getrlimit(what)
    resource.setrlimit(what, (value if most == resource.RLIM_INFINITY else min(value, most), most))


if __name__ == "__main__":
    main()
