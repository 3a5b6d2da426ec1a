"""The commands for the embedded models, the settings and the machine. They start no model."""

from functools import partial
from typing import Annotated

import typer

from ragkv.cli import output
from ragkv.cli.options import ConfigFile
from ragkv.config import Config, load_config, read_sources


def fetch(
    config: Config,
    names: Annotated[list[str] | None, typer.Argument(help="Default: all.", show_default=False)] = None,
) -> None:
    """Download and convert the embedded models, unless they are there. No model hub is needed."""
    from ragkv import models

    for name in names or models.EMBEDDED:
        lines: list[str] = []
        folder = models.fetch(name, config.home, partial(_report, lines))
        if not lines:
            typer.echo(f"{name}: already in {folder}")


def _report(lines: list[str], line: str) -> None:
    lines.append(line)
    typer.echo(line)


def config(config_file: ConfigFile = None) -> None:
    """Show the settings in force, as TOML, and where each is set."""
    from ragkv.cli.settings import in_force

    typer.echo(in_force(load_config(config_file), read_sources(config_file)), nl=False)


def doctor(config: Config) -> None:
    """Check hardware, versions, models, store and disk. Exits with status 1 if something is wrong."""
    from ragkv.cli.diagnosis import diagnose

    findings = diagnose(config)
    output.print_findings(findings)
    if any(finding.ok is False for finding in findings.values()):
        raise typer.Exit(1)
