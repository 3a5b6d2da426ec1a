"""The shape of every experiment: frozen parameters become options, a run yields rows, rows become a table.

Knows nothing of the command line (`ragkv.evals.cli`), nor of what is measured.
"""

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import MISSING, Field, dataclass, field
from typing import Any

Row = dict[str, Any]
Rows = Iterator[Row] | AsyncIterator[Row]
Table = Callable[[Sequence[Row]], None]
VLLM = ("home", "model", "dtype", "config_file", "verbose")  # the settings that an experiment on an engine takes


@dataclass(frozen=True)
class Option:
    """What the command line needs to know of a parameter.

    parse: reads the option's text; raises ValueError. default: that text, or the value where nothing parses. setting:
    the setting that the parameter overrides, as `store.codec`.
    """

    help: str
    default: Any = MISSING
    parse: Callable[[str], Any] | None = None
    least: float | None = None
    setting: str | None = None
    most: float | None = None


def option(help: str, default: Any = MISSING, **more: Any) -> Any:
    """Return a dataclass field that is an option of the command line; `more` goes to `Option`."""
    described = Option(help, default, **more)
    metadata = {"option": described}
    if default is MISSING:
        return field(metadata=metadata)
    if described.parse is None:
        return field(default=default, metadata=metadata)
    parse = described.parse
    return field(default_factory=lambda: parse(default), metadata=metadata)


def option_of(parameter: "Field[Any]") -> Option:
    found = parameter.metadata["option"]
    assert isinstance(found, Option)
    return found


class Progress:
    """What a run reports while it works. This one shows nothing."""

    def update(self, what: str, done: int | None = None, total: int | None = None) -> None:
        """Replace what is shown as being done."""

    def note(self, line: str) -> None:
        """Show a line that stays."""


@dataclass(frozen=True)
class Experiment:
    """One command of `ragkv eval`.

    parameters: a dataclass of `option`s, whose docstring is the command's help.
    module: is imported when the experiment starts; its `run(config, parameters, progress)` yields rows.
    table: prints the rows.
    settings: those of the configuration that the command takes.
    draws: the module has `draw(rows, out)` for the picture that the parameter `out` names.
    fails: whether a row makes the command end with status 1.
    forks: processes are forked from this one, which may have no threads then.
    """

    name: str
    parameters: type
    module: str
    table: Table
    settings: Sequence[str] = ()
    draws: bool = False
    fails: Callable[[Row], bool] = lambda row: False
    forks: bool = False
