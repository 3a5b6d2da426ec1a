"""Finds files and turns them into documents of plain text or Markdown. Knows nothing about chunks or indexes."""

import hashlib
import json
import os
import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragkv.errors import DocumentError
from ragkv.retriever import formats

_PARSERS = {
    ".txt": formats.parse_text,
    ".md": formats.parse_markdown,
    ".markdown": formats.parse_markdown,
    ".html": formats.parse_html,
    ".htm": formats.parse_html,
    ".pdf": formats.parse_pdf,
}
SUFFIXES = (*_PARSERS, ".jsonl")
_JSONL_RECORD = re.compile(r"(.*?\.jsonl)#", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True)
class Document:
    """A text to index.

    id: the file's absolute path, or the name it was given; for a record of a JSONL file `path#<id or line number>`.
    """

    id: str
    title: str
    text: str
    markdown: bool

    @property
    def digest(self) -> str:
        """A hash of the content (title, text, kind), whatever the id."""
        content = json.dumps([self.title, self.text, self.markdown])
        return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def source_file(document_id: str) -> str:
    """Return the path of the file that the document is from."""
    match = _JSONL_RECORD.match(document_id)
    return match[1] if match else document_id


def find_files(paths: Iterable[str | Path]) -> list[Path]:
    """Return the loadable files among `paths` and below them: absolute, each once, a directory's files sorted.

    In directories, hidden entries and other suffixes are passed over, and links to directories are not followed.
    Raises DocumentError for a path that is missing or can't be listed, and for a named file of another kind: a
    caller that removes vanished documents must not take an unreadable directory for an empty one.
    """
    files: dict[Path, Path] = {}  # resolved path -> path as found
    for path in map(Path, paths):
        try:
            for file in _walk(path) if path.is_dir() else [_named_file(path)]:
                files.setdefault(file.resolve(), file.absolute())
        except OSError as error:
            raise _unreadable(Path(error.filename or path), error) from error
    return list(files.values())


def load_file(path: str | Path, name: str | None = None) -> Iterator[Document | DocumentError]:
    """Yield the file's documents, and a DocumentError in the place of each one that can't be indexed.

    name: what the file is called, if not by its path; decides what kind it is. Never raises DocumentError: a bad record
    doesn't cost the good ones around it. JSONL is read line by line.
    """
    path = Path(path)
    try:
        if str(path).encode(errors="replace").decode() != str(path):
            raise DocumentError(f"the file name {str(path)!r} isn't UTF-8; rename the file")
        shown, id = (str(path), str(path.resolve())) if name is None else (name, name)
        if Path(shown).suffix.lower() == ".jsonl":
            yield from _load_jsonl(path, shown, id)
        else:
            yield _load_whole(path, shown, id)
    except DocumentError as error:
        yield error
    except OSError as error:
        yield _unreadable(path, error)


def _walk(directory: Path) -> Iterator[Path]:
    def fail(error: OSError) -> None:
        raise error

    for folder, subfolders, names in os.walk(directory, onerror=fail):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        for name in sorted(names):
            file = Path(folder, name)
            if not name.startswith(".") and file.suffix.lower() in SUFFIXES and file.is_file():
                yield file


def _named_file(path: Path) -> Path:
    if not path.exists():
        raise DocumentError(f"{str(path)!r} doesn't exist; give a directory or a file ({', '.join(SUFFIXES)})")
    if path.suffix.lower() not in SUFFIXES:
        raise unsupported(path)
    return path


def _load_whole(path: Path, shown: str, id: str) -> Document:
    suffix = Path(shown).suffix.lower()
    if suffix not in _PARSERS:
        raise unsupported(shown)
    try:
        title, text = _PARSERS[suffix](path.read_bytes())
        return Document(id, _line(title) or Path(shown).name, _clean(text), _PARSERS[suffix] is formats.parse_markdown)
    except DocumentError as error:
        raise DocumentError(f"{shown!r}: {error}") from error


def _load_jsonl(path: Path, shown: str, id: str) -> Iterator[Document | DocumentError]:
    line_of: dict[str, int] = {}  # record id -> line number
    blank = True
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            blank = False
            try:
                yield _load_record(id, number, line, line_of)
            except DocumentError as error:
                yield DocumentError(f"{shown!r}, line {number}: {error}")
    if blank:
        raise DocumentError(f"{shown!r}: it's empty; remove it or give it text")


def _load_record(file: str, number: int, line: bytes, line_of: dict[str, int]) -> Document:
    """Turn one line into a document, and enter its id into `line_of`."""
    try:
        record: Any = json.loads(formats.decode(line))
    except (ValueError, RecursionError) as error:
        raise DocumentError(f"it isn't JSON ({error}); write one object per line") from error
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        raise DocumentError('it has no "text"; write {"text": "...", "id": "...", "title": "..."} (id, title optional)')
    name = _line(str(record.get("id", ""))) or str(number)
    text = _clean(record["text"])
    if (earlier := line_of.setdefault(name, number)) != number:
        raise DocumentError(f"the id {name!r} is also that of line {earlier}; give each record its own")
    title = _line(str(record.get("title") or f"{Path(file).name}#{name}"))
    return Document(f"{file}#{name}", title, text, False)


def _clean(text: str) -> str:
    """Bring newlines and Unicode to one form. Raises DocumentError if nothing to read is left."""
    text = _unicode(text).replace("\r\n", "\n").replace("\r", "\n").strip("\n").rstrip()
    if not text.strip():
        raise DocumentError("it's empty; remove it or give it text")
    return text


def _line(text: str) -> str:
    """Make one clean line of a title or an id; "" if nothing is left."""
    return " ".join(_unicode(text).split())


def _unicode(text: str) -> str:
    """Return NFC without the lone surrogates and NULs that JSON and PDF can hold, but UTF-8 and SQLite can't."""
    text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return unicodedata.normalize("NFC", text.replace("\x00", ""))


def unsupported(name: str | Path) -> DocumentError:
    return DocumentError(f"{str(name)!r} is of a kind that can't be read; supported: {', '.join(SUFFIXES)}")


def _unreadable(path: Path, error: OSError) -> DocumentError:
    return DocumentError(f"can't read {str(path)!r} ({error.strerror or error}); check the path and its rights")
