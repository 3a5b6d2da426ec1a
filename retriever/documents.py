"""Documents, their names, and the files that they are read from. Knows nothing about chunks or indexes."""

import hashlib
import json
import os
import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import regex

from ragkv.errors import DocumentError

SUFFIXES = (
    *(".txt", ".md", ".markdown", ".rst", ".html", ".htm", ".pdf", ".docx", ".pptx", ".xlsx", ".epub"),
    *(".csv", ".json", ".jsonl"),
)
_VISIBLE = regex.compile(r"[^\s\p{C}\p{Default_Ignorable_Code_Point}\u2800]")
_JSONL_RECORD = re.compile(r"(.*?\.jsonl)#", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True)
class Document:
    """A text to index.

    id: the file's absolute path, or the name it was given, in the form of `document_name`; for a record of a JSONL file
    `path#<id or line number>`.
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


def document_name(name: str) -> str:
    """Return the one form (NFC) of a name or path that may be written in several ways: macOS takes "é" apart."""
    return unicodedata.normalize("NFC", name)


def is_visible(text: str) -> bool:
    """Return whether there is anything to read in a text: blanks and zero-width characters are nothing."""
    return _VISIBLE.search(text.strip()) is not None  # which is quick where there are only blanks


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
            raise unreadable(Path(error.filename or path), error) from error
    return list(files.values())


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
    if not path.is_file():  # reading a pipe or a device may never end
        raise DocumentError(f"{str(path)!r} isn't a regular file; copy its content into one")
    if path.suffix.lower() not in SUFFIXES:
        raise unsupported(path)
    return path


def unsupported(name: str | Path) -> DocumentError:
    return DocumentError(f"{str(name)!r} is of a kind that can't be read; supported: {', '.join(SUFFIXES)}")


def unreadable(path: Path, error: OSError) -> DocumentError:
    return DocumentError(f"can't read {str(path)!r} ({error.strerror or error}); check the path and its rights")
