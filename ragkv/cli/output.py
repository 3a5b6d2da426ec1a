"""Prints results and progress. Results go to stdout, progress and errors to stderr."""

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from ragkv.answer import Answer
    from ragkv.batch.run import Summary
    from ragkv.cli.diagnosis import Finding
    from ragkv.controller.cost_model import Profile
    from ragkv.index.deletion import Deletion, Garbage
    from ragkv.index.work import IngestProgress, IngestReport
    from ragkv.store.admin import StoreStats, Verification
    from ragkv.store.tier import RemoteStatus
    from ragkv.store.transfer import Transfer

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

STAGES = {"load": "Reading files", "embed": "Embedding chunks", "prefill": "Precomputing KV", "send": "Sending KV"}
MARKS = {True: Text("ok", "green"), False: Text("wrong", "red"), None: Text("warning", "yellow")}
PROFILE_BUDGET = 0.05
MIB = 1 << 20
_LINE_EVERY_S = 15.0


def detach_streams(log: Path | None) -> None:
    """Keep stdout and stderr for this process's own output. What vLLM's processes and libraries write there goes to
    `log`, or else to stderr."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        stream.flush()
        own = os.dup(descriptor)
        setattr(sys, name, open(own, "w", buffering=1, encoding=stream.encoding, errors=stream.errors))  # noqa: SIM115, PTH123
    if log:
        with log.open("w") as file:
            os.dup2(file.fileno(), 2)
    os.dup2(2, 1)


class Bar:
    """A progress bar that is shown while its block runs; in a log, a line now and then."""

    _progress: Progress
    _next_line = 0.0  # monotonic seconds

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def _tell(self, what: str, of: str) -> None:
        """Print a line where there is no terminal, unless there was one just now."""
        if err.is_terminal or time.monotonic() < self._next_line:
            return
        err.print(f"{what} {of}".rstrip(), style="dim", markup=False, soft_wrap=True)
        self._next_line = time.monotonic() + _LINE_EVERY_S


class IngestBars(Bar):
    """A progress bar for each stage of an ingest; in a log, each as it was at the end."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[item]}", style="dim", markup=False),
            console=err,
        )
        self._tasks: dict[str, TaskID] = {}
        self._stopped = False

    def __exit__(self, *_: object) -> None:
        self._stopped = True
        super().__exit__()

    def update(self, step: "IngestProgress") -> None:
        if self._stopped:
            raise KeyboardInterrupt  # in the thread that reads files: asyncio can't cancel it, and waits for it
        if step.stage not in self._tasks:
            self._tasks[step.stage] = self._progress.add_task(STAGES.get(step.stage, step.stage), item="")
        item = "" if step.done == step.total else step.item
        self._progress.update(self._tasks[step.stage], completed=step.done, total=step.total, item=item)
        self._tell(STAGES.get(step.stage, step.stage), f"{step.done:,}/{step.total:,}")


class BatchBar(Bar):
    """How many requests of a batch are answered, and how long the others will take."""

    def __init__(self) -> None:
        columns = (TextColumn("Answering"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left:"))
        self._progress = Progress(*columns, TimeRemainingColumn(), console=err)
        self._task: TaskID | None = None

    def update(self, done: int, total: int) -> None:
        if self._task is None:  # answers of earlier runs say nothing about the time
            self._task = self._progress.add_task("", completed=done, total=total)
        self._progress.update(self._task, completed=done)
        self._tell("Answered", f"{done:,}/{total:,}")


def print_batch(summary: "Summary", file: Path, *, as_json: bool) -> None:
    if as_json:
        out.print_json(data=asdict(summary))
        return
    earlier = f", {summary.earlier:,} in an earlier run" * bool(summary.earlier)
    out.print(f"Requests answered: {summary.answered:,}{earlier}. Failed: {summary.failed:,}. Answers: ", end="")
    out.print(file, markup=False, soft_wrap=True)
    if summary.answered:
        rate = summary.answered / summary.seconds
        share = summary.num_reused / summary.num_prompt
        out.print(
            f"{summary.seconds:,.1f} s, {rate:,.2f} requests/s. Tokens of prompts: {summary.num_prompt:,}, "
            f"{share:.0%} of them not computed; generated: {summary.num_generated:,}.",
            soft_wrap=True,
        )


def print_ingest_report(report: "IngestReport") -> None:
    changes = ("new", "changed", "unchanged", "removed")
    counts = {name: getattr(report, f"documents_{name}") for name in changes} | {"rejected": len(report.rejected)}
    documents = ", ".join(f"{count} {name}" for name, count in counts.items() if count) or "none"
    fetched = f" Entries fetched: {report.entries_fetched}." if report.entries_fetched else ""
    out.print(f"Documents: {documents}. Chunks prefilled: {report.chunks_prefilled}.{fetched}")
    if report.entries_unsent:
        num_entries = f"{report.entries_unsent:,} entr{'y' if report.entries_unsent == 1 else 'ies'}"
        err.print(
            f"{num_entries} not sent to store.remote yet; the next run sends the rest", style="yellow", soft_wrap=True
        )
    if report.chunks_unreached:
        print_unreached(report.chunks_unreached)
    if report.hint_refused:
        err.print(f"the hint isn't kept: {report.hint_refused}", style="yellow", markup=False, soft_wrap=True)
    for error in report.rejected:
        out.print(f"rejected: {error}", style="yellow", markup=False, soft_wrap=True)


def print_unreached(num_chunks: int) -> None:
    err.print(
        f"KV of {_chunks(num_chunks)} that was deleted may still be in store.remote, which can't be reached. It isn't "
        "used; `ragkv serve`, `index` and `ask` try again, and `ragkv store stats` shows what is left",
        style="yellow",
        soft_wrap=True,
    )


def print_cut(answer: "Answer") -> None:
    """Say of an answer that used up its tokens how to get more of it."""
    if answer.finish_reason == "length":
        what = "cut off" if answer.text else "cut off while the model was still thinking"
        num_tokens = answer.usage.completion_tokens
        err.print(f"{what} after {num_tokens:,} tokens; --max-tokens allows more", style="yellow", soft_wrap=True)


def print_sources(answer: "Answer") -> None:
    if not answer.sources:
        out.print("\nNo sources.")  # `fallback` says why
        return
    table = Table("", "document", "chunk", "score", "title", box=None, title="Sources", title_justify="left")
    for i, source in enumerate(answer.sources, 1):
        path = source.document  # below the current folder: relative to it
        document = os.path.relpath(path) if Path(path).is_relative_to(Path.cwd()) else path
        table.add_row(
            f"{i}",
            Text(document, overflow="fold"),
            f"{source.ordinal}",
            f"{source.score:.3f}",
            Text(source.title, "dim"),
        )
    out.print()
    out.print(table)


def print_baseline(answer: "Answer", baseline: "Answer") -> None:
    out.print()
    if baseline.text == answer.text:
        out.print(f"With {baseline.policy.label}: the same answer")
    else:
        out.print(f"With {baseline.policy.label}:")
        out.print(baseline.text, markup=False, soft_wrap=True)


def print_timings(answers: Sequence["Answer"]) -> None:
    """Print a column for each answer, and how much faster the first was than the second, if there are two."""
    table = Table("", box=None, padding=(0, 1))
    for answer in answers:
        table.add_column(Text(answer.policy.label), justify="right")
    for name, values, unit in _timing_rows(answers):
        if any(values):
            table.add_row(name, *(f"{value:,.{unit == 'ms':d}f} {unit}".strip() if value else "-" for value in values))
    out.print()
    out.print(table)
    if len(answers) > 1:
        fused, full = (answer.timings.ttft_ms for answer in answers)
        out.print(f"\nThe first token came {full / fused:.1f} times as fast.", style="bold green")
    for answer in answers:
        if answer.plan:
            plan = answer.plan
            expected = f"expected {plan.predicted_ms:,.0f} ms; full prefill {plan.prefill_ms:,.0f} ms"
            out.print(f"plan: {plan.way}, {expected}", style="dim", markup=False, highlight=False, soft_wrap=True)
    for answer in answers:
        if answer.fallback:
            out.print(f"fallback: {answer.fallback}", style="yellow", markup=False, soft_wrap=True)


def _timing_rows(answers: Sequence["Answer"]) -> Iterable[tuple[str, list[float], str]]:
    timings, usages = [answer.timings for answer in answers], [answer.usage for answer in answers]
    yield "time to first token", [timing.ttft_ms for timing in timings], "ms"
    yield "  load", [timing.load_ms for timing in timings], "ms"
    yield "  probe", [timing.probe_ms for timing in timings], "ms"
    yield "  recompute", [timing.recompute_ms for timing in timings], "ms"
    yield "retrieve", [timing.retrieve_ms for timing in timings], "ms"
    yield "total", [timing.total_ms for timing in timings], "ms"
    yield "prompt", [usage.prompt_tokens for usage in usages], "tokens"
    yield "  reused", [usage.reused_tokens for usage in usages], "tokens"
    yield "  found in memory", [usage.memory_tokens for usage in usages], "tokens"
    yield "  recomputed", [usage.recomputed_tokens for usage in usages], "tokens"
    yield "  as an earlier prompt began", [usage.prefix_tokens for usage in usages], "tokens"
    yield "    of these from the disk", [usage.stored_prefix_tokens for usage in usages], "tokens"
    yield "answer", [usage.completion_tokens for usage in usages], "tokens"


def print_profile(profile: "Profile") -> None:
    """Print how long requests of several lengths should take with all chunks in memory, and by full prefill."""
    from ragkv.controller.cost_model import Chunk, Load, plan

    policy = replace(profile.policy, budget=PROFILE_BUDGET)
    table = Table("prompt", box=None, padding=(0, 1))
    for name in ("full prefill", "fused", "plan"):
        table.add_column(name, justify="right")
    for tokens in (64, 128, 256, 512, 1024, 2048, 4096, 8192):
        loaded = max(0, tokens - 50)
        fused = profile.fused_ms(Load(tokens, loaded, 0, int(PROFILE_BUDGET * loaded), tokens - loaded))
        way = plan(profile, tokens, [Chunk(loaded)], policy).way
        table.add_row(f"{tokens:,} tokens", f"{profile.prefill_ms(tokens):,.0f} ms", f"{fused:,.0f} ms", way)
    out.print(table)
    out.print(f"KV from disk instead of memory: {profile.cold_ms:,.1f} ms more per thousand tokens")


def print_stats(
    stats: "StoreStats", pinned_bytes: int, codecs: Mapping[str, int], remote: "RemoteStatus | None"
) -> None:
    out.print(f"chunks       {stats.num_chunks:,}")
    out.print(f"records      {stats.num_records:,} (one for each chunk and layer)")
    out.print(f"codecs       {', '.join(f'{name} {count:,}' for name, count in codecs.items()) or 'none'}")
    out.print(f"KV           {stats.size_bytes / MIB:,.1f} MiB")
    out.print(f"disk         {stats.file_bytes / MIB:,.1f} MiB")
    out.print(f"pinned       {pinned_bytes / MIB:,.1f} MiB")
    if remote is not None:
        pending = f"; {_chunks(remote.pending_deletions)} to be deleted there" if remote.pending_deletions else ""
        state = "answers" if remote.problem is None else f"doesn't answer: {remote.problem}"
        out.print(f"remote       {remote.url} {state}{pending}", markup=False, soft_wrap=True)


def print_deletion(deletion: "Deletion") -> None:
    for document in deletion.documents:
        out.print(f"deleted {document}", markup=False, soft_wrap=True)
    shared = f"; {deletion.num_shared:,} kept, other documents share them" if deletion.num_shared else ""
    out.print(f"KV of {_chunks(deletion.num_chunks)} deleted, {deletion.size_bytes / MIB:,.1f} MiB{shared}")
    if deletion.num_unreached:
        print_unreached(deletion.num_unreached)


def print_garbage(garbage: Sequence["Garbage"], dry_run: bool) -> None:
    for part in garbage:
        if part.num_chunks:
            out.print(f"{_chunks(part.num_chunks)}, {part.size_bytes / MIB:,.1f} MiB: {part.reason}", soft_wrap=True)
    total = sum(part.size_bytes for part in garbage) / MIB
    out.print(f"{total:,.1f} MiB {'would be freed' if dry_run else 'freed'}")


def print_transfer(console: Console, verb: str, done: "Transfer") -> None:
    for problem in done.problems:
        console.print(problem, style="red", markup=False, soft_wrap=True)
    kept = f", {len(done.kept):,} were present already" if done.kept else ""
    problems = f", {len(done.problems):,} problem{'s' * (len(done.problems) != 1)}" if done.problems else ""
    console.print(f"{_chunks(len(done.chunks))} {verb}, {done.size_bytes / MIB:,.1f} MiB{kept}{problems}")


def _chunks(count: int) -> str:
    return f"{count:,} chunk{'s' * (count != 1)}"


def print_verification(verification: "Verification") -> None:
    for problem in verification.problems:
        out.print(problem, style="red", markup=False, soft_wrap=True)
    num_problems = len(verification.problems)
    out.print(
        f"{verification.num_records:,} records checked, {num_problems or 'no'} problem{'s' * (num_problems != 1)}"
    )


def print_findings(findings: Mapping[str, "Finding"]) -> None:
    table = Table("", "", "", box=None, show_header=False, padding=(0, 1))
    for check, finding in findings.items():
        detail = Text(finding.detail)
        if finding.remedy and not finding.ok:
            detail.append(f"\n{finding.remedy}", "bold")
        table.add_row(MARKS[finding.ok], check, detail)
    out.print(table)


@contextmanager
def byte_bar(name: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Show progress over the bytes of an export or import; yields what advances it. total: None if unknown."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err) as progress:
        yield partial(progress.advance, progress.add_task(name, total=total))
