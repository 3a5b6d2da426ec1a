"""The commands that start a model. They check their arguments before they do."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragkv.cli import output
from ragkv.cli.options import AsJson, Tenant, Verbose
from ragkv.cli.output import err
from ragkv.cli.session import log_file, open_pipeline, opened, prepare
from ragkv.config import MAIN, Config
from ragkv.errors import ConfigError, RagKVError
from ragkv.retriever.documents import SUFFIXES, find_files, is_visible

if TYPE_CHECKING:
    from ragkv.answer import Answer, AnswerOptions
    from ragkv.controller.cost_model import Profile
    from ragkv.index.work import IngestReport
    from ragkv.pipeline import Pipeline
    from ragkv.server.tenants import Tenants
    from ragkv.store.eviction import Hint


def index(
    config: Config,
    paths: Annotated[list[Path], typer.Argument(help=f"Files and folders: {' '.join(SUFFIXES)}")],
    hint: Annotated[
        str | None,
        typer.Option(
            help="When the store is full: pin (never evicted), session (kept while used), ephemeral (evicted first)."
        ),
    ] = None,
    allow_empty: Annotated[
        bool, typer.Option("--allow-empty", help="Remove a folder's documents also if the folder is empty now.")
    ] = False,
    tenant: Tenant = MAIN,
    verbose: Verbose = False,
) -> None:
    """Read documents, precompute the KV of their chunks and store it.

    Unchanged documents are skipped; documents whose files are missing from a folder are removed. Exits with status 1 if
    a document was rejected, or `store.disk_gib` can't hold what was to be pinned.
    """
    from ragkv.store.eviction import parse_hint

    treated = parse_hint(hint)
    find_files(paths)  # reports a bad path before a model is loaded
    prepare(log_file(config), verbose)
    try:
        report = asyncio.run(_index(config, paths, treated, tenant, allow_empty=allow_empty))
    except KeyboardInterrupt:
        err.print("interrupted; run it again to continue")
        raise
    output.print_ingest_report(report)
    if report.rejected or report.hint_refused:
        raise typer.Exit(1)


async def _index(
    config: Config, paths: list[Path], hint: "Hint | None", tenant: str, *, allow_empty: bool
) -> "IngestReport":
    async with opened(config, for_index_of=paths, tenant=tenant) as pipeline:
        if pipeline.is_ready:
            await _profile_once(pipeline)  # first, so that its chunks evict none of these documents'
        with output.IngestBars() as bars:
            return await pipeline.ingest(paths, bars.update, hint, allow_empty=allow_empty)


def ask(
    config: Config,
    question: str,
    compare: Annotated[
        bool, typer.Option("--compare", help="Also answer with full prefill, and compare the times.")
    ] = False,
    as_json: AsJson = False,
    tenant: Tenant = MAIN,
    verbose: Verbose = False,
) -> None:
    """Answer a question from the indexed documents."""
    from ragkv.answer import AnswerOptions, Sampling
    from ragkv.policies import Policy

    if not is_visible(question):
        raise ConfigError("the question is blank")
    options = AnswerOptions(
        Policy.of(config.answer.policy, config.answer.budget),
        config.answer.top_k,
        config.answer.max_tokens,
        sampling=Sampling.of(config.answer_defaults),
        max_drift=config.answer.max_drift,
    )
    prepare(log_file(config), verbose)
    answers = asyncio.run(_ask(config, question, options, compare, tenant, show=not as_json))
    if as_json:
        typer.echo(json.dumps(_as_json(*answers), ensure_ascii=False))
    else:
        output.print_cut(answers[0])
        output.print_sources(answers[0])
        if compare:
            output.print_baseline(*answers)
        output.print_timings(answers)


async def _ask(
    config: Config, question: str, options: "AnswerOptions", compare: bool, tenant: str, show: bool
) -> list["Answer"]:
    """Return the answer; to compare, also full prefill's, both on a warm engine with nothing in vLLM's prefix cache."""
    from ragkv.policies import FULL

    async with opened(config, tenant=tenant) as pipeline:
        if not compare:
            return [await _answer(pipeline, question, options, show=show)]
        fused = replace(options, fresh=True)
        full = replace(fused, policy=FULL)
        with err.status("warming up"):
            for warm_up in (fused, full):
                await _answer(pipeline, question, replace(warm_up, max_tokens=1), show=False)
        answer = await _answer(pipeline, question, fused, show=show)
        return [answer, await _answer(pipeline, question, full, show=False)]


async def _answer(pipeline: "Pipeline", question: str, options: "AnswerOptions", *, show: bool) -> "Answer":
    """Return the finished answer. show: print its text as it comes."""
    from ragkv.answer import Answer, Delta, Reasoning

    thinks = False
    async with aclosing(pipeline.answer(question, options)) as events:
        async for event in events:
            if isinstance(event, Reasoning) and show:
                err.print(event.text, style="dim", end="", markup=False, soft_wrap=True)
                thinks = True
            elif thinks:
                err.print("\n")
                thinks = False
            if isinstance(event, Delta) and show:
                typer.echo(event.text, nl=False)
            if isinstance(event, Answer):
                if show:
                    typer.echo()
                return event
    raise RuntimeError("the pipeline ended without an answer")


def _as_json(answer: "Answer", baseline: "Answer | None" = None) -> dict[str, Any]:
    """Return an answer in the format of the server's /v1/answer."""
    from ragkv.server.answers import AnswerResponse

    fields = AnswerResponse.model_validate(answer).model_dump()
    if baseline is not None:
        fields |= {"baseline": _as_json(baseline), "speedup": baseline.timings.ttft_ms / answer.timings.ttft_ms}
    return fields


def profile(config: Config, as_json: AsJson = False, verbose: Verbose = False) -> None:
    """Measure how long requests take on this machine, for the controller. `ragkv index` and `serve` do it once."""
    prepare(log_file(config), verbose)
    measured = asyncio.run(_profile(config))
    if as_json:
        typer.echo(json.dumps(measured.as_dict()))
    else:
        output.print_profile(measured)


async def _profile(config: Config) -> "Profile":
    async with opened(config) as pipeline:
        with err.status("measuring"):
            measured = await pipeline.profile(anew=True)
    if measured is None:
        raise ConfigError(f"nothing to measure: {pipeline.fallback or 'policy full reuses no KV'}")
    return measured


def serve(
    config: Config,
    fetch: Annotated[bool, typer.Option("--fetch", help="Download missing embedded models first.")] = False,
    verbose: Verbose = False,
) -> None:
    """Answer questions over HTTP: /v1/answer, and /v1/chat/completions as OpenAI's. /docs describes all of it."""
    prepare(None, verbose)
    from ragkv import server

    server.serve(config, lambda: _open_to_serve(config, fetch))


def front(config: Config) -> None:
    """One address before two servers: one computes each prompt's KV, the other loads it and decodes."""
    from ragkv.server.front import serve_front

    serve_front(config)


def key(
    names: Annotated[list[str], typer.Argument(help="Names of those who get a key, one key each.")],
    operator: Annotated[bool, typer.Option("--operator", help="Keys for the calls below /v1/store.")] = False,
) -> None:
    """Make API keys for the server. They are shown only now; the settings hold their hashes."""
    from ragkv.server.gate import new_key

    made = {name: new_key() for name in names}
    for key, _ in made.values():
        typer.echo(key)
    hashes = {name: key_hash for name, (_, key_hash) in made.items()}
    lines = "\n".join(f'{json.dumps(name)} = "{key_hash}"' for name, key_hash in hashes.items())
    setting = "operator_keys" if operator else "keys"
    err.print(
        f"Made for {', '.join(made)}, and shown only now. Put this into the settings file of `ragkv serve`:\n\n"
        f"[server.{setting}]\n{lines}\n\nor RAGKV_SERVER__{setting.upper()}='{json.dumps(hashes)}'",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


@asynccontextmanager
async def _open_to_serve(config: Config, fetch: bool) -> AsyncIterator["Tenants"]:
    from ragkv.server.tenants import Tenants

    if fetch:
        from ragkv import models

        for name in (config.model.name, config.index.embedder):
            if name in models.EMBEDDED:
                models.fetch(name, config.home, lambda line: err.print(line, style="dim", markup=False))
    async with AsyncExitStack() as stack:
        main = await open_pipeline(config)
        stack.push_async_callback(main.close)
        await _profile_once(main)
        pipelines = {MAIN: main, **{name: main.for_tenant(name) for name in config.tenants if name != MAIN}}
        home = main.workspace.home
        yield Tenants(config, pipelines, {name: home.folder(name) / "uploads" for name in pipelines})


async def _profile_once(pipeline: "Pipeline") -> None:
    """Measure this machine unless it was measured. A failure is only reported: answers may then be slower."""
    if pipeline.config.answer.controller:
        try:
            await pipeline.profile(lambda line: err.print(line, style="dim"))
        except RagKVError as error:
            err.print(f"could not measure this machine: {error}", style="yellow", markup=False, soft_wrap=True)
