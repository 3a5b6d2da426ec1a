"""Formats that are text themselves: plain text, Markdown, reStructuredText, JSON and CSV."""

import codecs
import csv
import io
import json
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import yaml

from ragkv.errors import DocumentError

_MARKS = {  # UTF-32 first: its mark begins with that of UTF-16
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
    codecs.BOM_UTF8: "utf-8-sig",
}
_FRONT_MATTER = re.compile(r"\s*(?P<mark>---|\+\+\+)[ \t]*\n(?P<fields>.*?)^(?:(?P=mark)|\.\.\.)[ \t]*$", re.S | re.M)
_FIELD = re.compile(r"([\w-]+):[ \t]+(.*)")
_HEADING = re.compile(r" {0,3}#{1,6}[ \t]+(.*?)(?:[ \t]+#+)?[ \t]*$")
_FENCE = re.compile(r" {0,3}(```|~~~)")
_UNDERLINE = re.compile(r" {0,3}=+[ \t]*$")
_RST_UNDERLINE = re.compile(r"([!-/:-@\[-`{-~])\1+\s*$")
_DELIMITERS = ",;\t|"


def mark_of(data: bytes) -> str | None:
    """Return the encoding that a byte order mark names."""
    return next((encoding for mark, encoding in _MARKS.items() if data.startswith(mark)), None)


def decode(data: bytes) -> str:
    """Decode what its byte order mark says, else UTF-8. Raises DocumentError for anything else."""
    encoding = mark_of(data)
    if encoding in (None, "utf-8-sig") and b"\x00" in data:
        raise DocumentError("it holds binary data, not text; convert it to UTF-8 text")
    try:
        return data.decode(encoding or "utf-8")
    except UnicodeDecodeError as error:
        name = "UTF-8" if encoding is None else encoding.upper().removesuffix("-SIG")
        raise DocumentError(f"it isn't {name} (byte {error.start}); convert it to UTF-8 text") from error


def parse_text(data: bytes) -> tuple[str, str]:
    """Plain text has no title."""
    return "", decode(data)


def parse_markdown(data: bytes) -> tuple[str, str]:
    """Take the title of the front matter, which is left out of the text, or the first heading."""
    title, text = _without_front_matter(decode(data).replace("\r\n", "\n"))
    return title or first_heading(text), text


def first_heading(markdown: str) -> str:
    """Return the first heading outside fenced code, or ""."""
    fence = previous = ""
    for line in markdown.splitlines():
        if mark := _FENCE.match(line):
            fence = ("" if fence == mark[1] else fence) if fence else mark[1]
        elif not fence:
            if (heading := _HEADING.match(line)) and heading[1]:
                return heading[1]
            if _UNDERLINE.match(line) and previous.strip():
                return previous.strip()
        previous = line
    return ""


def _without_front_matter(text: str) -> tuple[str, str]:
    """Return title and text; a block between two rulers that holds no fields is text."""
    match = _FRONT_MATTER.match(text)
    if match is None:
        return "", text
    block = match["fields"]
    fields: Any
    try:
        fields = tomllib.loads(block) if match["mark"] == "+++" else yaml.load(block, yaml.CSafeLoader)
    except (yaml.YAMLError, ValueError):  # `title: one: two` isn't YAML, and often written
        fields = {field[1]: field[2] for line in block.splitlines() if (field := _FIELD.match(line))}
    if not isinstance(fields, dict) or not fields:
        return "", text
    return str(fields.get("title") or ""), text[match.end() :]


def parse_rst(data: bytes) -> tuple[str, str]:
    """Take the first underlined line as the title, and the text as it is written: it is made to be read so."""
    text = decode(data)
    previous = ""
    for line in text.splitlines():
        if _RST_UNDERLINE.match(line) and previous.strip() and not _RST_UNDERLINE.match(previous):
            return previous.strip(), text
        previous = line
    return "", text


def parse_json(data: bytes) -> tuple[str, str]:
    """Write an outline of the values, each with its name; an object's "title" is the title.
    The items of the outermost list are paragraphs."""
    try:
        value: Any = json.loads(decode(data))
        items = value if isinstance(value, list) else [value]
        text = "\n\n".join("\n".join(_outline(item)) for item in items)
    except (ValueError, RecursionError) as error:
        raise DocumentError(f"it isn't JSON ({error}); a file with an object on each line is named .jsonl") from error
    title = value.get("title") if isinstance(value, dict) else None
    return title if isinstance(title, str) else "", text


def _outline(value: Any) -> Iterator[str]:
    """Yield a line for each value: `name: value` in objects, `- value` in lists."""
    if isinstance(value, dict) and value:
        for name, item in value.items():
            lines = _outline(item)
            if isinstance(item, dict | list) and item:
                yield f"{name}:"
                yield from (f"  {line}" for line in lines)
            else:
                yield f"{name}: {next(lines)}"
    elif isinstance(value, list) and value:
        for item in value:
            lines = _outline(item)
            yield f"- {next(lines)}"
            yield from (f"  {line}" for line in lines)
    else:
        yield value if isinstance(value, str) else json.dumps(value)


def parse_csv(data: bytes) -> tuple[str, str]:
    """Write a Markdown table; the delimiter is the one that cuts the first row into most cells."""
    text = decode(data).lstrip("\n\r")
    csv.field_size_limit(sys.maxsize)
    try:
        if named := re.match(r"sep=(.)\r?\n", text):  # a line for Excel
            delimiter, text = named[1], text[named.end() :]
        else:
            delimiter = max(_DELIMITERS, key=lambda each: len(next(_rows(text, each), [])))
        return "", table(_rows(text, delimiter))
    except csv.Error as error:
        raise DocumentError(f"it isn't CSV ({error}); export it again") from error


def _rows(text: str, delimiter: str) -> Iterator[list[str]]:
    return csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)


def table(rows: Iterable[Sequence[str]]) -> str:
    """Write a Markdown table, the first row as its head; rows without text are left out."""
    lines: list[str] = []
    for row in rows:
        cells = [" ".join(cell.split()).replace("|", "\\|") for cell in row]
        if any(cells):
            lines.append(f"| {' | '.join(cells)} |")
            if len(lines) == 1:
                lines.append(f"|{' --- |' * len(cells)}")
    return "\n".join(lines)
