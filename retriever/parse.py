"""A separate process that reads untrusted files: `python -m ragkv.retriever.parse OUT FILE NAME [FILE NAME]…`.

Writes the documents to OUT, one JSON object a line, and prints what can't be indexed, one JSON string a line. Its
memory, time and output are bounded: a file that was made to exceed them ends this process and nothing else.
"""

import json
import resource
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

from ragkv.errors import DocumentError
from ragkv.files import atomic_write
from ragkv.retriever.documents import Document, load_file

MEMORY_BYTES, CPU_S = 2 << 30, 120
_MAX_ERRORS = 10


def read_documents(file: Path) -> Iterator[Document]:
    """Yield the documents that were written to OUT."""
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            yield Document(**json.loads(line))


def write_documents(file: Path, documents: Iterable[Document]) -> None:
    """Write what `read_documents` reads: all or nothing, and on disk when it returns."""
    with atomic_write(file) as lines:
        for document in documents:
            lines.write(json.dumps(asdict(document)).encode() + b"\n")


def main(out: str, *rest: str) -> None:
    files = [(Path(file), name) for file, name in zip(rest[::2], rest[1::2], strict=True)]
    most_bytes = 8 * sum(file.stat().st_size for file, _ in files) + (64 << 20)
    limits = {resource.RLIMIT_AS: MEMORY_BYTES, resource.RLIMIT_CPU: CPU_S, resource.RLIMIT_FSIZE: most_bytes}
    for what, value in limits.items():
        _, most = resource.getrlimit(what)  # the process' own hard limit stays
        limit = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(what, (limit, limit))
    write_documents(Path(out), _read(files))


def _read(files: Iterable[tuple[Path, str]]) -> Iterator[Document]:
    """Yield the files' documents and print what can't be indexed; ends the process after `_MAX_ERRORS` of them."""
    num_errors = 0
    for file, name in files:
        for document in load_file(file, name):
            if not isinstance(document, DocumentError):
                yield document
                continue
            print(json.dumps(str(document)), flush=True)
            num_errors += 1
            if num_errors == _MAX_ERRORS:
                sys.exit()


if __name__ == "__main__":
    main(*sys.argv[1:])
