"""The settings in force as text, with where each is set."""

import typing
from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import tomlkit
from pydantic.fields import FieldInfo
from tomlkit.items import Item

from ragkv.config import Config, Section
from ragkv.settings import origin, setting_fields

_NUM_HASH_DIGITS = 8


def named_section(field: FieldInfo) -> type[Section] | None:
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
        value: Any = reduce(getattr, path, config)
        where = origin(path, sources) or "default"
        if isinstance(field.default, Section):
            target = tomlkit.table()
            document.add(tomlkit.nl())
            document.add(path[0], target)
        elif value is None:
            target.add(tomlkit.comment(f"{path[-1]} is not set"))
        elif named_section(field) is not None:
            tables = tomlkit.table(is_super_table=True)
            for name, section in value.items():
                tables.add(name, _table(section, where))
            document.add(tomlkit.nl())
            document.add(path[0], tables)
        else:
            target.add(path[-1], _shown(value).comment(where))
    return document.as_string()


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
