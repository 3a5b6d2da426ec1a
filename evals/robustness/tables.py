"""The tables of experiments that look for what fails, is lost or stands still."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from ragkv.cli.output import out
from ragkv.evals.experiment import Row


def churn(rows: Sequence[Row]) -> None:
    (row,) = rows
    table = Table("", "start", "peak", "end", "allowed", box=None, padding=(0, 1))
    memory, disk = row["memory_mib"], row["disk_mib"]
    allowed = "" if disk["allowed"] is None else f"{disk['allowed']:,} MiB"
    table.add_row("memory", *(f"{memory[name]:,} MiB" for name in ("start", "peak", "end", "allowed")))
    table.add_row("disk", "", f"{disk['peak']:,} MiB", "", allowed)
    table.add_row("descriptors and threads", f"{row['handles'][0]}", "", f"{row['handles'][-1]}", "")
    out.print(table)
    out.print(f"{row['kills']} kills, {row['compared']} answers compared with full prefill's, {row['steps']}")
    for problem in row["problems"]:
        out.print(problem, style="red", markup=False, soft_wrap=True)


def soak(rows: Sequence[Row]) -> None:
    (row,) = rows
    if "memory_mib" in row:
        memory, handles = row["memory_mib"], row["handles"]
        table = Table("", "warm", "end", "allowed", box=None, padding=(0, 1))
        sizes = (memory[name] for name in ("warm", "end", "allowed"))
        table.add_row("memory", *("any" if size is None else f"{size:,} MiB" for size in sizes))
        table.add_row("descriptors and threads", f"{handles['warm']:.0f}", f"{handles['end']:.0f}", "")
        out.print(table)
    out.print(f"{row['compared']} answers compared with full prefill's, {row['refused']} told to wait, {row['steps']}")
    for problem in row["problems"]:
        out.print(problem, style="red", markup=False, soft_wrap=True)


def remote(rows: Sequence[Row]) -> None:
    table = Table("bucket", box=None, padding=(0, 2, 0, 0))
    for name in ("first token, median and largest", "all KV in time", "differing answers", "as before again after"):
        table.add_column(name, justify="right")
    for row in rows:
        if row["state"] == "second home":
            out.print(
                f"the second home took {row['entries_fetched']} of {row['entries']} entries in {row['ingest_s']:g} s, "
                f"prefilled {row['chunks_prefilled']} chunks, and has {row['equal_files']} files and "
                f"{row['equal_answers']} of {row['questions']} answers like the first home's"
            )
            continue
        recovered = "never" if row["recovered_s"] is None else f"{row['recovered_s']:g} s"
        times, in_time = f"{row['median']:g}, {row['largest']:g}", f"{row['in_time']} of {row['questions']}"
        table.add_row(row["state"], times, in_time, str(row["differing"]), recovered)
    if table.row_count:
        out.print(table)
        out.print("times are shares of those of vLLM's own prefill of the same question")


def broken_batch(rows: Sequence[Row]) -> None:
    for row in rows:
        out.print(
            f"{row['requests']:,} requests, killed {row['kills']} times: {row['answers']:,} have an answer, "
            f"{row['twice']} more than one, {row['missing']} none; {row['differing']} differ from those of the batch "
            f"that was left alone, which took {row['alone_s']:,.0f} s of {row['seconds']:,.0f}"
        )
        for custom_id, expected, found in row["examples"]:
            out.print(f"{custom_id}: {found} and not {expected}", markup=False)


def faults(rows: Sequence[Row]) -> None:
    table = Table("", box=None, padding=(0, 1, 0, 0))
    for name in ("rounds", "failed", "seconds"):
        table.add_column(name, justify="right")
    table.add_column("of which")
    for row in rows:
        counts = ", ".join(f"{count} {name}" for name, count in row["outcomes"].items())
        note = f"skipped: {row['skipped']}" if row["skipped"] else counts
        table.add_row(
            row["part"],
            f"{row['rounds']:,}",
            f"{row['failed']:,}",
            f"{row['seconds']:,.0f}",
            Text(note, overflow="fold"),
        )
    out.print(table)
    for row in rows:
        for failure in row["failures"]:
            problem = f"{row['part']}, seed {failure['seed']}: {failure['problem']}"
            out.print(problem, style="red", markup=False, soft_wrap=True)


def uploads(rows: Sequence[Row]) -> None:
    for row in rows:
        out.print(f"while {row['mib']:g} MiB are indexed ({row['large_done']:,} of {row['large_total']:,} done):")
        times = ", ".join(f"{seconds:g}" for seconds in row["small_s"])
        out.print(f"small uploads: {times} s; beside answers: {row['beside_answers_s']:g} s")
        before, during = row["gap_p99_ms"]
        out.print(f"p99 between tokens: {before:g} ms without, {during:g} ms with ({row['p99_ratio']:g}×)")
        out.print(f"the server stopped within {row['stop_s']:g} s")


def stalls(rows: Sequence[Row]) -> None:
    table = Table("beside an answer", box=None, padding=(0, 2, 0, 0))
    for name in ("status", "took, s", "event loop's longest pause, ms", "longest gap between tokens, ms"):
        table.add_column(name, justify="right")
    for row in rows:
        figures = (f"{row[name]:g}" for name in ("seconds", "pause_ms", "gap_ms"))
        table.add_row(row["request"], str(row["status"] or ""), *figures)
    out.print(table)
