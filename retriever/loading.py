"""Reads files into documents of plain text or Markdown. Runs in a process of its own (`ragkv.retriever.parse`)."""

import io
import json
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from ragkv.errors import DocumentError
from ragkv.retriever.documents import Document, document_name, is_visible, unreadable, unsupported
from ragkv.retriever.formats import html, office, pdf, text

_PARSERS: dict[str, Callable[[bytes], tuple[str, str]]] = {
    ".txt": text.parse_text,
    ".md": text.parse_markdown,
    ".markdown": text.parse_markdown,
    ".rst": text.parse_rst,
    ".html": html.parse_html,
    ".htm": html.parse_html,
    ".pdf": pdf.parse_pdf,
    ".docx": office.parse_docx,
    ".pptx": office.parse_pptx,
    ".xlsx": office.parse_xlsx,
    ".epub": html.parse_epub,
    ".csv": text.parse_csv,
    ".json": text.parse_json,
}
_PLAIN = (text.parse_text, text.parse_json)  # all others give Markdown
_INVISIBLE = dict.fromkeys(map(ord, "\x00\u00ad\u200b\u2060\ufeff"))
_EMPTY = "it's empty; remove it or give it text"
_LONGEST_REASON = 200  # characters of a value or a library's message in an error


def load_file(path: str | Path, name: str | None = None) -> Iterator[Document | DocumentError]:
    """Yield the file's documents, and a DocumentError in the place of each one that can't be indexed.

    name: what the file is called, if not by its path; decides what kind it is. Never raises DocumentError: a bad record
    doesn't cost the good ones around it. JSONL is read line by line.
    """
    path = Path(path)
    try:
        if str(path).encode(errors="replace").decode() != str(path):
            raise DocumentError(f"the file name {str(path)!r} isn't UTF-8; rename the file")
        shown, id = (str(path), document_name(str(path.resolve()))) if name is None else (name, document_name(name))
        if Path(shown).suffix.lower() == ".jsonl":
            yield from _load_jsonl(path, shown, id)
        else:
            yield _load_whole(path, shown, id)
    except DocumentError as error:
        yield error
    except OSError as error:
        yield unreadable(path, error)


def _load_whole(path: Path, shown: str, id: str) -> Document:
    parse = _PARSERS.get(Path(shown).suffix.lower())
    if parse is None:
        raise unsupported(shown)
    data = path.read_bytes()
    try:
        title, content = parse(data)
        return Document(id, _line(title) or document_name(Path(shown).name), _clean(content), parse not in _PLAIN)
    except DocumentError as error:
        raise DocumentError(f"{shown!r}: {error}") from error
    except MemoryError:  # ends the process
        raise
    except Exception as error:  # a damaged file fails anywhere in the library that reads it
        reason = f"{type(error).__name__}: {error}"[:_LONGEST_REASON]
        raise DocumentError(f"{shown!r}: it is damaged ({reason}); save it again") from error


def _load_jsonl(path: Path, shown: str, id: str) -> Iterator[Document | DocumentError]:
    line_of: dict[str, int] = {}  # record id -> line number
    with path.open("rb") as file:
        mark = text.mark_of(file.read(4))
        file.seek(0)
        lines: Iterable[bytes] = file
        if mark not in (None, "utf-8-sig"):  # in UTF-16 the byte of a newline is also part of other characters
            lines = (line.encode() for line in io.StringIO(text.decode(file.read())))
        num_records = 0
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            num_records += 1
            try:
                yield _load_record(id, number, line, line_of)
            except DocumentError as error:
                yield DocumentError(f"{shown!r}, line {number}: {error}")
    if not num_records:
        raise DocumentError(f"{shown!r}: {_EMPTY}")


def _load_record(file: str, number: int, line: bytes, line_of: dict[str, int]) -> Document:
    """Turn one line into a document, and enter its id into `line_of`."""
    try:
        record: Any = json.loads(text.decode(line))
    except (ValueError, RecursionError) as error:
        raise DocumentError(f"it isn't JSON ({error}); write one object per line") from error
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        raise DocumentError('it has no "text"; write {"text": "...", "id": "...", "title": "..."} (id, title optional)')
    id = record.get("id")
    if not isinstance(id, str | int | float | None):
        raise DocumentError(f"its id is {json.dumps(id)[:_LONGEST_REASON]}; write a string or a number")
    name = _line(str(id if id is not None else "")) or str(number)
    content = _clean(record["text"])
    if (earlier := line_of.setdefault(name, number)) != number:
        raise DocumentError(f"the id {name!r} is also that of line {earlier}; give each record its own")
    title = _line(str(record.get("title") or f"{Path(file).name}#{name}"))
    return Document(f"{file}#{name}", title, content, False)


def _clean(content: str) -> str:
    """Bring newlines and Unicode to one form. Raises DocumentError if nothing is left that can be seen."""
    content = _unicode(content).replace("\r\n", "\n").replace("\r", "\n").strip("\n").rstrip()
    if not is_visible(content):
        raise DocumentError(_EMPTY)
    return content


def _line(content: str) -> str:
    """Make one clean line of a title or an id; "" if nothing is left."""
    return " ".join(_unicode(content).split())


def _unicode(content: str) -> str:
    """Return NFC without what parts words but isn't seen, and without the lone surrogates and NULs that JSON and PDF
    can hold, but UTF-8 and SQLite can't. Joiners stay: in Persian, Hindi and emoji they make a difference."""
    content = content.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return unicodedata.normalize("NFC", content.translate(_INVISIBLE))
