"""Loads the settings (`ragkv.config`): defaults < file < `RAGKV_*` environment < flags.

Nested settings are written `RAGKV_MODEL__NAME` in the environment and `[model] name = …` in the TOML file.
"""

import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import EnvSettingsSource, SettingsError

from ragkv.config import Config, Section
from ragkv.errors import ConfigError

OTHER_VARIABLES = {"RAGKV_CONFIG", "RAGKV_DEVICE"}  # the settings file; the device that `make setup` installs for
# Variables that Kubernetes sets in every pod if there is a service called ragkv.
KUBERNETES = re.compile(r"RAGKV_(SERVICE_(HOST|PORT\w*)=|PORT=\w+://|PORT_\d+_)")


def load_config(config_file: Path | None = None, **flags: Any) -> Config:
    """Load the settings: defaults, overridden by the TOML file, the environment and flags.

    config_file: default `RAGKV_CONFIG`. flags: shaped as the settings, `home=…, model={"name": …}`; None is no value.
    Raises ConfigError, with a line for each problem, for an unreadable file, an unknown setting or an unusable value.
    """
    sources = read_sources(config_file, **flags)
    try:
        return Config(**_merge(sources.values()))
    except ValidationError as error:
        raise ConfigError("\n".join(_problem(detail, sources) for detail in error.errors())) from error


def read_sources(config_file: Path | None = None, **flags: Any) -> dict[str, dict[str, Any]]:
    """Return what each source sets, as a tree, weakest source first. Raises ConfigError as `load_config` does."""
    file = config_file or os.environ.get("RAGKV_CONFIG")
    return {
        f"in {file}": _read_toml(Path(file).expanduser()) if file else {},
        "in the environment": _read_environment(),
        "on the command line": _given(flags),
    }


def origin(path: Sequence[str], sources: Mapping[str, Any]) -> str | None:
    """Return which of `sources` a setting is from, None if none sets it."""
    found = None
    for where, source in sources.items():
        with suppress(KeyError, TypeError):
            reduce(getitem, path, source)
            found = where
    return found


def setting_fields() -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    """Return each section and each setting with its path."""
    for name, field in Config.model_fields.items():
        yield (name,), field
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from (((name, key), below) for key, below in field.annotation.model_fields.items())


def variable(*path: str) -> str:
    """Return the name of a setting in the environment."""
    return f"RAGKV_{'__'.join(path)}".upper()


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text())
    except OSError as error:
        raise ConfigError(f"can't read the settings file {file}: {error.strerror}") from error
    except ValueError as error:  # TOMLDecodeError and UnicodeDecodeError alike
        raise ConfigError(f"the settings file {file} is not TOML: {error}") from error


def _read_environment() -> dict[str, Any]:
    """Read the environment as a tree. Unknown variables are errors; pydantic-settings would ignore them."""
    known = {variable(*path) for path, _ in setting_fields()} | OTHER_VARIABLES
    for name, value in os.environ.items():
        if name.upper().startswith("RAGKV_") and name.upper() not in known and not KUBERNETES.match(f"{name}={value}"):
            similar = difflib.get_close_matches(name.upper(), known, n=1)
            remedy = f"did you mean {similar[0]}?" if similar else f"unset it; settings are {', '.join(sorted(known))}"
            raise ConfigError(f"{name} in the environment is not a setting; {remedy}")
    try:
        return EnvSettingsSource(Config)()
    except SettingsError as error:
        raise ConfigError(f"in the environment: {error}; a whole section must be JSON") from error


def _given(flags: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _given(value) if isinstance(value, Mapping) else value for key, value in flags.items() if value is not None
    }


def _merge(sources: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Merge setting by setting; later sources win."""
    merged: dict[str, Any] = {}
    for source in sources:
        for key, value in source.items():
            below = merged.get(key)
            merged[key] = {**below, **value} if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def _problem(detail: ErrorDetails, sources: Mapping[str, dict[str, Any]]) -> str:
    """Describe a problem in one line: the setting, its value, where it was set, and what is wrong with it."""
    path = [str(part) for part in detail["loc"]]
    where = f" {source}" if (source := origin(path, sources)) else ""
    if detail["type"] == "extra_forbidden":
        siblings = [known[-1] for known, _ in setting_fields() if list(known[:-1]) == path[:-1]]
        return f"unknown setting {'.'.join(path)}{where}; choose from {', '.join(siblings)}"
    return f"{'.'.join(path)} = {detail['input']!r}{where}: {detail['msg']}"
