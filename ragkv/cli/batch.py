"""`ragkv batch`: many requests from a file, of which none is urgent."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ragkv.cli import output
from ragkv.cli.options import AsJson, Tenant, Verbose
from ragkv.cli.output import err
from ragkv.cli.session import log_file, opened, prepare
from ragkv.config import MAIN, Config

if TYPE_CHECKING:
    from ragkv.batch.requests import BatchRequest
    from ragkv.batch.run import Summary


def batch(
    config: Config,
    file: Annotated[
        Path,
        typer.Argument(
            help="A JSON object in each line: OpenAI's batch requests, which the model answers by itself, or "
            '{"question": "…"}, which is answered from the documents.'
        ),
    ],
    out: Annotated[Path, typer.Option(help="Where answers are appended; what has one there isn't asked again.")],
    as_json: AsJson = False,
    tenant: Tenant = MAIN,
    verbose: Verbose = False,
) -> None:
    """Answer all requests of a file, so that what they share is computed once.

    Answers come in another order than requests; `custom_id` says whose they are. Interrupted at any moment, it goes on
    where it stopped when run again. Exits with status 1 if a request couldn't be answered.
    """
    prepare(log_file(config), verbose)
    from ragkv.batch.requests import read

    requests = read(file, config.model.name)
    try:
        summary = asyncio.run(_batch(config, requests, out, tenant))
    except KeyboardInterrupt:
        err.print(f"interrupted; what {out} has stays, run it again to continue")
        raise
    output.print_batch(summary, out, as_json=as_json)
    if summary.failed:
        raise typer.Exit(1)


async def _batch(config: Config, requests: "list[BatchRequest]", out: Path, tenant: str) -> "Summary":
    from ragkv.batch.results import Results
    from ragkv.batch.run import run

    with Results(out):  # reports a file that can't be used before a model is loaded
        pass
    async with opened(config, tenant=tenant) as pipeline:
        with output.BatchBar() as bar:
            return await run(pipeline, requests, out, bar.update)
