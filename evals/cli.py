"""The commands that measure: TTFT, fidelity, the report of both, retrieval, the cache and the store."""

import asyncio
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ragkv.cli.options import AsJson, ConfigFile, DType, Embedder, Home, Model, Verbose
from ragkv.cli.output import err
from ragkv.cli.session import log_file, log_in_errors, prepare
from ragkv.config import load_config
from ragkv.evals import tables


def ttft(
    tokens: Annotated[str, typer.Option(help="Lengths of the prompt, in tokens.")] = "1024,2048,4096,7168",
    policies: Annotated[str, typer.Option(help="Policies with their budgets.")] = "full,query:0.15,query:0.05,none",
    repeats: Annotated[int, typer.Option(min=1, help="Measurements behind each median.")] = 5,
    cold: Annotated[bool, typer.Option("--cold", help="Also with KV from the disk instead of memory.")] = False,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Of the model only config.json and the tokenizer are read.")
    ] = False,
    as_json: AsJson = False,
    home: Home = None,
    model: Model = None,
    embedder: Embedder = None,
    dtype: DType = None,
    config_file: ConfigFile = None,
    verbose: Verbose = False,
) -> None:
    """Time to first token by policy, beside vLLM's own prefill of the same prompt."""
    config = load_config(config_file, home=home, model={"name": model, "dtype": dtype}, index={"embedder": embedder})
    lengths = _parse_lengths(tokens)
    from ragkv.policies import Policy

    parsed = [Policy.parse(text.strip()) for text in policies.split(",")]
    prepare(log_file(config), verbose)
    from ragkv.evals import ttft as evaluation

    rows: list[dict[str, Any]] = []

    def emit(row: dict[str, Any]) -> None:
        rows.append(row)
        if as_json:
            typer.echo(json.dumps(row))
        else:
            err.print(
                f"{row['tokens']} tokens, {row['policy']} {row['budget']:g}: {row['ttft_ms']:.0f} ms", style="dim"
            )

    with err.status("measuring"), log_in_errors(config):
        asyncio.run(evaluation.run(config, lengths, parsed, repeats, emit, cold=cold, random_weights=random_weights))
    if not as_json:
        tables.print_ttft(rows)


def quality(
    dataset: Annotated[
        str, typer.Option(help="musique, musique_s, xquad, samsum, multi_news, a .jsonl file or HF id.")
    ],
    data: Annotated[Path | None, typer.Option(help="Folder that holds the named datasets.")] = None,
    examples: Annotated[int, typer.Option(min=1, help="How many examples, from the first on.")] = 50,
    policies: Annotated[
        str, typer.Option(help="POLICY@KV with commas between; KV is alone, anchor, random or near.")
    ] = "none,guided:0.05,cacheblend:0.15@alone",
    captures: Annotated[int, typer.Option(min=1, help="Captures behind an average.")] = 4,
    codec: Annotated[str | None, typer.Option(help="How KV is stored: raw, int8 or fp8.")] = None,
    ttft_examples: Annotated[int, typer.Option(min=0, help="On how many examples times are taken.")] = 10,
    out: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Results by example; a run goes on from what it holds.")
    ] = None,
    as_json: AsJson = False,
    home: Home = None,
    model: Model = None,
    dtype: DType = None,
    config_file: ConfigFile = None,
    verbose: Verbose = False,
) -> None:
    """Drift from full prefill and task scores by policy, on real data."""
    config = load_config(config_file, home=home, model={"name": model, "dtype": dtype}, store={"codec": codec})
    from ragkv.evals import datasets
    from ragkv.evals import quality as evaluation

    arms = [evaluation.Arm.parse(text.strip()) for text in policies.split(",")]
    loaded = datasets.load(dataset, data)
    parts = (Path(dataset).stem, Path(config.model.name).name, config.model.dtype, captures, config.store.codec)
    name = "-".join(map(str, parts)) + ".jsonl"
    out = out or config.home / "evals" / name
    prepare(log_file(config), verbose)
    settings = evaluation.Settings(examples, captures, ttft_examples, config.index.chunk_tokens)
    with tables.ExampleBar(dataset) as bar, log_in_errors(config):
        rows = asyncio.run(evaluation.run(config, loaded, arms, settings, out, bar.update))
    for row in rows:
        if as_json:
            typer.echo(json.dumps(row))
    if not as_json:
        tables.print_quality(rows)
        err.print(f"by example: {out}", style="dim", markup=False)


def report(
    files: Annotated[
        list[Path], typer.Argument(help="What `ragkv eval quality` wrote: a JSONL file for each dataset.")
    ],
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder for the page and its pictures.")] = Path("report"),
    against: Annotated[
        str, typer.Option(help="Drift is also given as a ratio to this one's.")
    ] = "cacheblend:0.15@alone",
) -> None:
    """One HTML page with pictures: drift by budget, score by TTFT, what was recomputed."""
    from ragkv.evals import report as evaluation

    typer.echo(evaluation.write(files, out, against))


def retrieval(
    dataset: Annotated[str, typer.Option(help="mtrag, xquad, or xquad in another language: xquad.de.")],
    data: Annotated[Path, typer.Option(help="Folder that holds the datasets.")],
    depths: Annotated[str, typer.Option(help="Among how many chunks to look for the passages.")] = "3,5",
    as_json: AsJson = False,
    home: Home = None,
    embedder: Embedder = None,
    config_file: ConfigFile = None,
) -> None:
    """Recall by vectors and by vectors and words, and of each with the reranker if one is set. Needs no vLLM."""
    config = load_config(config_file, home=home, index={"embedder": embedder})
    lengths = _parse_lengths(depths, "--depths")
    from ragkv import models
    from ragkv.evals import retrieval as evaluation
    from ragkv.retriever import embedder as embedding
    from ragkv.retriever.reranker import Reranker

    collection = evaluation.load(dataset, data)
    name = config.retrieval.reranker
    reranker = None if name is None else Reranker(models.resolve(name, config.home))
    loaded = embedding.Embedder(models.resolve(config.index.embedder, config.home))
    models_used = {"embedder": Path(config.index.embedder).name, "reranker": name and Path(name).name}
    rows = []
    with tables.ExampleBar(dataset) as bar:
        for row in evaluation.run(
            dataset, collection, loaded, reranker, lengths, config.retrieval.candidates, bar.update
        ):
            rows.append({**row, **models_used})
    for row in rows:
        if as_json:
            typer.echo(json.dumps(row))
    if not as_json:
        tables.print_retrieval(rows)


def cache(
    trace: Annotated[str, typer.Option(help="zipf (documents), or a file like Mooncake's trace.")] = "zipf",
    shares: Annotated[str, typer.Option(help="Cache sizes, as shares of all distinct chunks.")] = "0.01,0.05,0.1,0.25",
    as_json: AsJson = False,
) -> None:
    """Hit rates of eviction policies over a trace, beside Belady's optimum. Needs no model."""
    from ragkv.evals import cache as evaluation

    parsed = _parse_numbers(shares, "--shares")
    rows = []
    for row in evaluation.run(Path(trace).stem, evaluation.load(trace), parsed, evaluation.ALL_POLICIES):
        rows.append(row)
        if as_json:
            typer.echo(json.dumps(row))
    if not as_json:
        tables.print_cache(rows)


def store(
    records: Annotated[str, typer.Option(help="Sizes of a record, in KiB: one layer of a chunk.")] = "64,256,1024,2048",
    mib: Annotated[int, typer.Option(min=1, help="How much is stored.")] = 256,
    churn: Annotated[float, typer.Option(min=0, help="How many times that is deleted and written anew.")] = 10,
    repeats: Annotated[int, typer.Option(min=1, help="Measurements behind each median.")] = 3,
    as_json: AsJson = False,
    home: Home = None,
    config_file: ConfigFile = None,
) -> None:
    """How fast a store on this disk writes and reads, beside the disk and the memory themselves. Needs no model."""
    config = load_config(config_file, home=home)
    sizes = _parse_lengths(records, "--records")
    from ragkv.evals import disk as evaluation

    rows = []
    with err.status("measuring"):
        for row in evaluation.run(config.home, sizes, mib, churn, repeats):
            rows.append(row)
            if as_json:
                typer.echo(json.dumps(row))
    if not as_json:
        tables.print_store(rows)


def faults(
    kills: Annotated[int, typer.Option(min=0, help="How often processes that use a store are killed.")] = 200,
    flips: Annotated[int, typer.Option(min=0, help="How often a bit is flipped or a file cut off.")] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="Of the first round; the others count on from it.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Kill processes that use a KV store, damage its files, fill its disk, and see what is lost. Needs no model."""
    from ragkv.evals import faults as evaluation

    rows = []
    with tables.RoundLine() as line:
        for row in evaluation.run(kills, flips, seed, line.update):
            rows.append(row)
            if as_json:
                typer.echo(json.dumps(row))
    if not as_json:
        tables.print_faults(rows)
    if any(row["failed"] for row in rows):
        raise typer.Exit(1)


def churn(
    seconds: Annotated[float, typer.Option(min=1, help="How long to work, after the kills.")] = 300,
    kills: Annotated[int, typer.Option(min=0, help="How often the process is killed at work before that.")] = 0,
    disk_gib: Annotated[float, typer.Option(help="Budget of the store's disk.")] = 0.5,
    memory_gib: Annotated[float, typer.Option(help="Budget of the store's memory.")] = 0.125,
    seed: Annotated[int, typer.Option(min=0, help="Of everything at random.")] = 0,
    at: Annotated[Path | None, typer.Option(hidden=True, help="Only work, in this home.")] = None,
    as_json: AsJson = False,
    home: Home = None,
    model: Model = None,
    dtype: DType = None,
    config_file: ConfigFile = None,
    verbose: Verbose = False,
) -> None:
    """Index, change, remove and ask within small budgets; kill it, and see what is lost and what grows."""
    budgets = {} if at else {"store": {"disk_gib": disk_gib, "memory_gib": memory_gib}}
    config = load_config(config_file, home=at or home, model={"name": model, "dtype": dtype}, **budgets)
    prepare(log_file(config), verbose)
    from ragkv.evals import churn as evaluation

    if at:
        evaluation.work_here(config, seconds, seed)
        return
    with err.status("starting") as status:
        (row,) = evaluation.run(config, seconds, kills, seed, status.update)
    typer.echo(json.dumps(row)) if as_json else tables.print_churn(row)
    if row["problems"]:
        raise typer.Exit(1)


def soak(
    seconds: Annotated[float, typer.Option(min=1, help="How long, once the server is ready.")] = 900,
    clients: Annotated[int, typer.Option(min=1, max=24, help="How many at a time.")] = 6,
    memory_gib: Annotated[float, typer.Option(help="Budget of the store's memory.")] = 0.125,
    seed: Annotated[int, typer.Option(min=0, help="Of everything at random.")] = 0,
    as_json: AsJson = False,
    home: Home = None,
    model: Model = None,
    dtype: DType = None,
    config_file: ConfigFile = None,
) -> None:
    """Serve, and ask, upload, replace, delete and leave at random; see what fails, is lost, or grows."""
    flags = {"model": {"name": model, "dtype": dtype}, "store": {"memory_gib": memory_gib}}
    config = load_config(config_file, home=home, **flags)
    from ragkv.evals import soak as evaluation

    with err.status("starting") as status:
        (row,) = evaluation.run(config, seconds, clients, seed, status.update)
    typer.echo(json.dumps(row)) if as_json else tables.print_soak(row)
    if row["problems"]:
        raise typer.Exit(1)


def load(
    streams: Annotated[int, typer.Option(min=0, help="Answers being decoded while questions arrive, at first.")] = 8,
    questions: Annotated[int, typer.Option(min=4, help="Of each measurement.")] = 16,
    shares: Annotated[
        str, typer.Option(help="Rates of arrival, as shares of what each server answers one after the other.")
    ] = "0.4,0.6,0.8,0.95",
    top_k: Annotated[int, typer.Option(min=1, help="Chunks of a question, some 500 tokens each.")] = 8,
    seed: Annotated[int, typer.Option(help="Of the questions and the arrivals.")] = 0,
    out: Annotated[Path | None, typer.Option(dir_okay=False, help="A picture of it.")] = None,
    as_json: AsJson = False,
    home: Home = None,
    model: Model = None,
    dtype: DType = None,
    config_file: ConfigFile = None,
) -> None:
    """Questions that arrive at random, beside vLLM alone: how long to the first token, and between tokens of others."""
    config = load_config(config_file, home=home, model={"name": model, "dtype": dtype})
    rates = tuple(_parse_numbers(shares, "--shares"))
    from ragkv.evals import load as evaluation

    rows: list[dict[str, Any]] = []

    def emit(row: dict[str, Any]) -> None:
        rows.append(row)
        if as_json:
            typer.echo(json.dumps(row))

    with err.status("starting") as status:
        wanted = evaluation.Load(top_k, streams, questions, rates, seed)
        asyncio.run(evaluation.run(config, wanted, emit, status.update))
    if out is not None:
        evaluation.draw(rows, out)
    if not as_json:
        tables.print_load(rows)


def swap(
    tokens: Annotated[str, typer.Option(help="Lengths of the prompt, in tokens.")] = "64,128,256,512,1024,2048,4096",
    shares: Annotated[str, typer.Option(help="Shares of the chunks that are stored.")] = "0,0.5,1",
    near: Annotated[str, typer.Option(help="Shares of these that the system has in memory.")] = "1",
    chunk_tokens: Annotated[str, typer.Option(help="Tokens of a chunk, so of a record.")] = "512",
    batches: Annotated[str, typer.Option(help="Requests at a time.")] = "1",
    bandwidths: Annotated[str, typer.Option(help="Of the store's reads, in MiB/s; 0 is the disk's own.")] = "0,400,50",
    repeats: Annotated[int, typer.Option(min=1, help="Measurements behind each median, at least.")] = 3,
    out: Annotated[Path | None, typer.Option(dir_okay=False, help="A picture of it.")] = None,
    as_json: AsJson = False,
    home: Home = None,
    model: Model = None,
    dtype: DType = None,
    config_file: ConfigFile = None,
    verbose: Verbose = False,
) -> None:
    """Recompute or load: full prefill, fusion, and the controller's choice between them."""
    config = load_config(config_file, home=home, model={"name": model, "dtype": dtype})
    lengths, sizes = _parse_lengths(tokens), _parse_lengths(chunk_tokens, "--chunk-tokens")
    stored, speeds = _parse_numbers(shares, "--shares"), _parse_numbers(bandwidths, "--bandwidths")
    where, at_a_time = _parse_numbers(near, "--near"), _parse_lengths(batches, "--batches")
    prepare(log_file(config), verbose)
    from ragkv.evals import swap as evaluation

    sweep = evaluation.Sweep(lengths, stored, where, sizes, at_a_time, [speed or None for speed in speeds], repeats)
    rows: list[dict[str, Any]] = []

    def emit(row: dict[str, Any]) -> None:
        rows.append(row)
        if as_json:
            typer.echo(json.dumps(row))

    with err.status("measuring"), log_in_errors(config):
        asyncio.run(evaluation.run(config, sweep, emit))
    if out is not None:
        evaluation.draw(rows, out)
    if not as_json:
        tables.print_swap(rows)


def timeline(
    tokens: Annotated[int, typer.Option(min=1, help="Length of the prompt, in tokens.")] = 4096,
    policy: Annotated[str, typer.Option(help="With its budget.")] = "query:0.05",
    out: Annotated[Path, typer.Option(dir_okay=False, help="The picture.")] = Path("timeline.png"),
    as_json: AsJson = False,
    home: Home = None,
    model: Model = None,
    dtype: DType = None,
    config_file: ConfigFile = None,
    verbose: Verbose = False,
) -> None:
    """Draw what one request reads, loads and computes, and when: with KV from the disk and from memory."""
    config = load_config(config_file, home=home, model={"name": model, "dtype": dtype})
    from ragkv.policies import Policy

    parsed = Policy.parse(policy)
    prepare(log_file(config), verbose)
    from ragkv.evals import timeline as evaluation

    with err.status("measuring"), log_in_errors(config):
        rows = asyncio.run(evaluation.run(config, tokens, parsed, out))
    for row in rows:
        if as_json:
            typer.echo(json.dumps(row))
    if not as_json:
        tables.print_timeline(rows)
        err.print(f"picture: {out}", style="dim", markup=False)


app = typer.Typer(add_completion=False)
for _command in (ttft, quality, report, retrieval, cache, swap, timeline, faults, store, churn, soak, load):
    app.command()(_command)


def _parse_numbers(text: str, option: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of numbers", param_hint=option) from None


def _parse_lengths(text: str, option: str = "--tokens") -> list[int]:
    try:
        lengths = [int(part) for part in text.split(",")]
    except ValueError:
        lengths = []
    if not lengths or min(lengths) < 1:
        raise typer.BadParameter(f"{text!r} is not a list of positive numbers with commas between", param_hint=option)
    return lengths
