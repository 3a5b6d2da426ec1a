"""Rewrite the table of settings in configuration.md from ragkv/config.py."""

import types
import typing
from pathlib import Path
from typing import Any, Literal

from pydantic.fields import FieldInfo

from ragkv.cli.settings import named_section
from ragkv.config import Section
from ragkv.settings import setting_fields, variable

PAGE = Path(__file__).with_name("configuration.md")
BEGIN, END = "<!-- begin: made by docs/settings.py -->\n", "\n<!-- end -->"

_WORDS: dict[Any, str] = {
    bool: "`true` or `false`",
    int: "integer",
    float: "number",
    str: "text",
    Path: "path",
    dict: "table",
    list: "list",
}


def renewed(page: str) -> str:
    """Return the page with the table as it is now. Raises ValueError where a marker is missing."""
    begin = page.index(BEGIN) + len(BEGIN)
    return page[:begin] + reference() + page[page.index(END, begin) :]


def reference() -> str:
    """Return a Markdown table of every setting."""
    rows = ["| setting | type | default | environment | meaning |", "|---|---|---|---|---|"]
    for path, field in setting_fields():
        if not isinstance(field.default, Section):
            rows.append(_row(".".join(path), field, f"`{variable(*path)}`"))
        if (named := named_section(field)) is not None:
            rows += [_row(f"{path[0]}.NAME.{key}", each, "") for key, each in named.model_fields.items()]
    return "\n".join(rows)


def _row(name: str, field: FieldInfo, where: str) -> str:
    default = "none" if field.default in (None, {}, []) else f"`{_plain(field.default)}`"
    meaning = (field.description or "").replace("\n", " ")
    return f"| `{name}` | {_type(field)} | {default} | {where} | {meaning} |"


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _type(field: FieldInfo) -> str:
    """Return the type and its range in words: "integer, 16 to 8192"."""
    kind = field.annotation
    if isinstance(kind, types.UnionType):
        kind = next(part for part in typing.get_args(kind) if part is not types.NoneType)
    if typing.get_origin(kind) is Literal:
        return ", ".join(f"`{choice}`" for choice in typing.get_args(kind))
    return ", ".join([_WORDS[typing.get_origin(kind) or kind], *_range(field)])


def _range(field: FieldInfo) -> list[str]:
    rules = ("ge", "gt", "le")
    limits = {name: getattr(rule, name) for rule in field.metadata for name in rules if hasattr(rule, name)}
    if "ge" in limits:
        return [f"{limits['ge']} to {limits['le']}" if "le" in limits else f"at least {limits['ge']}"]
    return [f"{word} {limits[name]}" for name, word in (("gt", "above"), ("le", "at most")) if name in limits]


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text()))
