"""Settings as text: the reference of all settings, and those in force with where each is set."""

import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import tomlkit
from annotated_types import Ge, Gt, Le
from pydantic.fields import FieldInfo
from tomlkit.items import Item

from ragkv.config import Config, Section, origin, setting_fields, variable

_WORDS: dict[Any, str] = {
    bool: "`true` or `false`",
    int: "integer",
    float: "number",
    str: "text",
    Path: "path",
    dict: "table",
    list: "list",
}
_NUM_HASH_DIGITS = 8


def reference() -> str:
    """Return a Markdown table of every setting."""
    rows = ["| setting | type | default | environment | meaning |", "|---|---|---|---|---|"]
    for path, field in setting_fields():
        if not isinstance(field.default, Section):
            rows.append(_row(".".join(path), field, f"`{variable(*path)}`"))
        if (named := _named_section(field)) is not None:
            rows += [_row(f"{path[0]}.NAME.{key}", each, "") for key, each in named.model_fields.items()]
    return "\n".join(rows)


def _row(name: str, field: FieldInfo, where: str) -> str:
    default = "none" if field.default in (None, {}, []) else f"`{_plain(field.default)}`"
    return f"| `{name}` | {_type(field)} | {default} | {where} | {field.description} |"


def _named_section(field: FieldInfo) -> type[Section] | None:
    """Return the section type of a setting that is a table of named sections, None for others."""
    if typing.get_origin(field.annotation) is not dict:
        return None
    _, kind = typing.get_args(field.annotation)
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def in_force(config: Config, sources: Mapping[str, dict[str, Any]]) -> str:
    """Return the settings as TOML, each with where it is set. Of API keys it shows only the beginning of their hash.

    sources: those that `config` was made from, by `read_sources`.
    """
    document = tomlkit.document()
    target: Any = document
    for path, field in setting_fields():
        value = _value(config, path)
        where = origin(path, sources) or "default"
        if isinstance(field.default, Section):
            target = tomlkit.table()
            document.add(tomlkit.nl())
            document.add(path[0], target)
        elif value is None:
            target.add(tomlkit.comment(f"{path[-1]} is not set"))
        elif _named_section(field) is not None:
            tables = tomlkit.table(is_super_table=True)
            for name, section in value.items():
                tables.add(name, _table(section, where))
            document.add(tomlkit.nl())
            document.add(path[0], tables)
        else:
            target.add(path[-1], _shown(value).comment(where))
    return document.as_string()


def _value(config: Config, path: tuple[str, ...]) -> Any:
    value: Any = config
    for name in path:
        value = getattr(value, name)
    return value


def _table(section: Section, where: str) -> Item:
    table = tomlkit.table()
    for name, value in section:
        if value is not None:
            table.add(name, _shown(value).comment(where))
    return table


def _shown(value: Any) -> Item:
    if isinstance(value, dict):
        hashes = tomlkit.inline_table()
        hashes.update({name: f"{hash[:_NUM_HASH_DIGITS]}…" for name, hash in value.items()})
        return hashes
    return tomlkit.item(str(value) if isinstance(value, Path) else value)


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
    least = next((rule.ge for rule in field.metadata if isinstance(rule, Ge)), None)
    above = next((rule.gt for rule in field.metadata if isinstance(rule, Gt)), None)
    most = next((rule.le for rule in field.metadata if isinstance(rule, Le)), None)
    if least is not None:
        return [f"at least {least}" if most is None else f"{least} to {most}"]
    return [f"{word} {bound}" for word, bound in (("above", above), ("at most", most)) if bound is not None]
