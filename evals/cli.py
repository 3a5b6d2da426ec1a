"""The commands of `ragkv eval`: one is made of each experiment's parameters, and `report` of what `quality` wrote."""

import asyncio
import inspect
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import MISSING, Field, fields
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import rich.progress
import typer
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

from ragkv.cli import options
from ragkv.cli.output import Bar, err
from ragkv.cli.session import log_file, log_in_errors, prepare
from ragkv.evals import experiment, parameters, registry
from ragkv.evals.experiment import Experiment, Row, Rows, option_of

app = typer.Typer(add_completion=False)


def command_of(found: Experiment) -> Callable[..., None]:
    """Return the function from which typer makes an experiment's command: one keyword for each option."""

    def command(**values: Any) -> None:
        _run(found, values)

    hints = get_type_hints(found.parameters, vars(parameters) | {"Policy": str, "Arm": str})
    taken = [_keyword(parameter, hints[parameter.name]) for parameter in fields(found.parameters)]
    taken.append(_optional("as_json", options.AsJson, False))
    taken += [options.parameter(name) for name in (*options.MODEL, "config_file") if name in found.settings]
    if "verbose" in found.settings:
        taken.append(_optional("verbose", options.Verbose, False))
    command.__signature__ = inspect.Signature(taken)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in taken}
    command.__doc__ = found.parameters.__doc__
    return command


def _keyword(parameter: "Field[Any]", type_: Any) -> inspect.Parameter:
    described = option_of(parameter)
    option = typer.Option(
        ... if described.default is MISSING else described.default,
        _flag(parameter),
        help=described.help,
        min=described.least,
        max=described.most,
        dir_okay=parameter.name != "out",
    )
    return _optional(parameter.name, str if described.parse else type_, option)


def _optional(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


def _flag(parameter: "Field[Any]") -> str:
    return f"--{parameter.name.replace('_', '-')}"


def _run(found: Experiment, values: dict[str, Any]) -> None:
    """Measure, and print the rows: as JSON, each as soon as it is known, or as a table in the end."""
    as_json = values.pop("as_json")
    settings = {name: values.pop(name) for name in found.settings}
    chosen = {options.SETTINGS[name][0]: settings[name] for name in options.MODEL if name in settings}
    overrides = {option_of(parameter).setting: values[parameter.name] for parameter in fields(found.parameters)}
    chosen |= {setting: value for setting, value in overrides.items() if setting}
    config = options.load(settings.get("config_file"), chosen)
    wanted = found.parameters(**{p.name: _parsed(p, values[p.name]) for p in fields(found.parameters)})
    explained: AbstractContextManager[None] = nullcontext()
    if "verbose" in found.settings:
        prepare(log_file(config), settings["verbose"])
        explained = log_in_errors(config)
    module = import_module(found.module)
    rows: list[Row] = []

    def take(row: Row) -> None:
        rows.append(row)
        if as_json:
            typer.echo(json.dumps(row))

    with Shown(found.forks, as_json) as progress, explained:
        _each(module.run(config, wanted, progress), take)
    if found.draws and wanted.out is not None:
        module.draw(rows, wanted.out)
    if not as_json:
        found.table(rows)
    if any(map(found.fails, rows)):
        raise typer.Exit(1)


def _parsed(parameter: "Field[Any]", value: Any) -> Any:
    parse = option_of(parameter).parse
    if parse is None:
        return value
    try:
        return parse(value)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=_flag(parameter)) from None


def _each(rows: Rows, take: Callable[[Row], None]) -> None:
    async def drain(rows: AsyncIterator[Row]) -> None:
        async for row in rows:
            take(row)

    if isinstance(rows, AsyncIterator):
        asyncio.run(drain(rows))
    else:
        for row in rows:
            take(row)


class Shown(Bar, experiment.Progress):
    """A run's progress, in one line on stderr that is deleted at the end; in a log, a line now and then."""

    def __init__(self, forks: bool, quiet: bool) -> None:
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description} {task.fields[of]}", markup=False),
            TimeElapsedColumn(),
        )
        self._progress = rich.progress.Progress(
            *columns, console=err, transient=True, auto_refresh=not forks, disable=not err.is_terminal
        )
        self._task = self._progress.add_task("measuring", total=None, of="")
        self._quiet = quiet

    def update(self, what: str, done: int | None = None, total: int | None = None) -> None:
        of = "" if done is None else f"{done}/{total}"
        self._progress.update(self._task, description=what, of=of, refresh=True)
        if not self._quiet:
            self._tell(what, of)

    def note(self, line: str) -> None:
        if not self._quiet:
            err.print(line, style="dim", markup=False)


def report(
    files: Annotated[
        list[Path], typer.Argument(help="What `ragkv eval quality` wrote: a JSONL file for each dataset.")
    ],
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder for the page and its pictures.")] = Path("report"),
    against: Annotated[
        str, typer.Option(help="Drift is also given as a ratio to this one's.")
    ] = "cacheblend:0.15@alone",
) -> None:
    """Write an HTML page with pictures: drift by budget, score by TTFT, what was recomputed."""
    from ragkv.evals import report as page

    typer.echo(page.write(files, out, against))


def everything(
    data: Annotated[Path, typer.Option(help="Folder that holds the datasets.")],
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder for rows, pictures and the page.")] = Path("all"),
    quick: Annotated[bool, typer.Option("--quick", help="Some of them, small: about 15 minutes on two cores.")] = False,
    only: Annotated[str, typer.Option(help="Names of cases, with commas between. Default: all.")] = "",
) -> None:
    """Run every experiment, one after the other, and write a page with all tables and pictures.

    What is there already isn't run again, so that an interrupted run goes on.
    """
    from ragkv.evals import everything as all_cases

    names = [name.strip() for name in only.split(",") if name.strip()]
    cases = all_cases.chosen(names, is_quick=quick)
    failed = 0
    for case, result in all_cases.run(cases, data, out, is_quick=quick, note=partial(err.print, markup=False)):
        if result.status:
            failed += 1
            err.print(f"{case.name} ended with status {result.status}: {result.error}", style="red", markup=False)
    typer.echo(out / all_cases.PAGE)
    if failed:
        raise typer.Exit(1)


for _experiment in registry.EXPERIMENTS:
    app.command(_experiment.name)(command_of(_experiment))
app.command()(report)
app.command("all")(everything)
