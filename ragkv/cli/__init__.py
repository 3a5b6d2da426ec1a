"""The command line: parses, calls and prints. Knows nothing of how an answer is made.

Nothing heavy is imported before a command needs it: torch and vLLM take seconds.
"""

import atexit
import os
import sys
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from ragkv import __version__
from ragkv.cli import batch, engine_commands, home_commands, operator_commands
from ragkv.cli.options import MODEL, configured
from ragkv.cli.output import err
from ragkv.errors import RagKVError

EXTRA = ("aiohttp", "matplotlib", "psutil", "rouge_score")  # the packages of `ragkv[eval]`


class Evaluations(TyperGroup):
    """The commands of `ragkv.evals.cli`, which is imported when one of them is listed or named: a plain install needn't
    have its packages."""

    def _commands(self) -> TyperGroup:
        from ragkv.evals import cli

        group = typer.main.get_command(cli.app)
        assert isinstance(group, TyperGroup)
        return group

    def list_commands(self, ctx: Any) -> list[str]:
        return self._commands().list_commands(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return self._commands().get_command(ctx, cmd_name)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            name = (error.name or "").split(".")[0]
            if name not in EXTRA:
                raise
            err.print(f"error: {name} is missing: pip install 'ragkv[eval]'", style="red", markup=False)
            raise typer.Exit(2) from None


def _group(help: str, cls: type[TyperGroup] = TyperGroup) -> typer.Typer:
    return typer.Typer(help=help, cls=cls, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


app = _group("RAG on vLLM that reuses the KV of document chunks.")
app.command()(configured(engine_commands.index, "num_contexts", *MODEL))
app.command()(configured(engine_commands.ask, "policy", "budget", "max_drift", "top_k", "max_tokens", *MODEL))
app.command()(configured(batch.batch, "policy", "budget", "max_drift", "top_k", "max_tokens", *MODEL))
app.command()(configured(engine_commands.serve, "host", "port", *MODEL))
app.command()(configured(engine_commands.front, "prefill", "decode", "host", "port"))
app.command()(engine_commands.key)
app.command()(configured(engine_commands.profile, *MODEL))
store = _group("Inspect, control, clean, export and import the KV store.")
for command in (home_commands.stats, home_commands.verify, home_commands.delete, home_commands.gc):
    store.command()(configured(command, "home"))
for controlling in (
    *(operator_commands.lookup, operator_commands.pin, operator_commands.unpin, operator_commands.warm),
    *(operator_commands.demote, operator_commands.recode, operator_commands.clear, operator_commands.health),
):
    store.command()(configured(controlling, "home"))
store.command("export")(configured(home_commands.export_kv, "home"))
store.command("import")(configured(home_commands.import_kv, "home"))
app.add_typer(store, name="store")
models = _group("Manage the embedded models.")
models.command()(configured(home_commands.fetch, "home"))
app.add_typer(models, name="models")
app.add_typer(_group("Measure speed, quality and robustness on this machine.", cls=Evaluations), name="eval")
app.command()(home_commands.config)
app.command("vllm-config")(configured(home_commands.vllm_config, "learn", "policy", "budget", *MODEL))
app.command()(configured(home_commands.doctor, "home", "model", "embedder"))


@app.callback(invoke_without_command=True)
def version(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        typer.echo(f"ragkv {__version__}")
        raise typer.Exit


def main() -> None:
    """Run `app`, with errors as one line on stderr."""
    try:
        app()
    except RagKVError as error:
        err.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        _end(1)
    except SystemExit as exit:
        _end(exit.code if isinstance(exit.code, int) else int(exit.code is not None))


def _end(status: int) -> NoReturn:
    """End the process. All that it had open is closed; where vLLM was imported, Python isn't taken down piece by piece:
    that takes seconds, and Triton's extension module then lists all its types as leaked."""
    if "vllm" in sys.modules:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
