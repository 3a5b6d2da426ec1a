"""A process of its own that reads strangers' files: `python -m ragkv.retriever.parse OUT FILE NAME [FILE NAME]…`.

Writes the documents to OUT, a JSON object in each line, and prints what can't be indexed, a JSON string in each line.
Its memory, time and output are bounded: a file that was made to exceed them ends this process and nothing else.
"""

import json
import os
import resource
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from ragkv.errors import DocumentError
from ragkv.retriever.documents import Document, load_file

MEMORY_BYTES, CPU_S = 2 << 30, 120
_MAX_ERRORS = 10


def read_documents(file: Path) -> Iterator[Document]:
    """What was written to OUT."""
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            yield Document(**json.loads(line))


def rewrite(file: Path, documents: Iterable[Document]) -> None:
    """All or nothing, and on disk."""
    new = file.with_name(f"{file.name}.tmp")
    with new.open("w", encoding="utf-8") as lines:
        for document in documents:
            _write(lines, document)
        _sync(lines)
    new.replace(file)


def main(out: str, *rest: str) -> None:
    _limit(resource.RLIMIT_AS, MEMORY_BYTES)
    _limit(resource.RLIMIT_CPU, CPU_S)
    files = [(Path(file), name) for file, name in zip(rest[::2], rest[1::2], strict=True)]
    _limit(resource.RLIMIT_FSIZE, 8 * sum(file.stat().st_size for file, _ in files) + (64 << 20))
    num_errors = 0
    with Path(out).open("w", encoding="utf-8") as lines:
        for file, name in files:
            for document in load_file(file, name):
                if isinstance(document, DocumentError):
                    print(json.dumps(str(document)), flush=True)
                    num_errors += 1
                    if num_errors == _MAX_ERRORS:
                        sys.exit()
                else:
                    _write(lines, document)
        _sync(lines)


def _limit(what: int, value: int) -> None:
    """Never above what the process may have already."""
    _, most = resource.getrlimit(what)
    value = value if most == resource.RLIM_INFINITY else min(value, most)
    resource.setrlimit(what, (value, value))


def _write(lines: TextIO, document: Document) -> None:
    lines.write(json.dumps(asdict(document)) + "\n")


def _sync(lines: TextIO) -> None:
    lines.flush()
    os.fsync(lines.fileno())


if __name__ == "__main__":
    main(*sys.argv[1:])
