"""The one place where the product knows of `ragkv.evals`, whose packages a plain install needn't have."""

from typing import Any

import typer
from typer.core import TyperGroup

from ragkv.cli.output import err

EXTRA = ("aiohttp", "httpx", "matplotlib", "psutil", "rouge_score")  # the packages of `ragkv[eval]`


class Evaluations(TyperGroup):
    """The commands of `ragkv.evals.cli`, which is imported when one of them is listed or named."""

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
