"""The tables of rows: a function each, which takes what `--json` prints and prints it to be read."""

from collections.abc import Sequence

from rich.table import Table

from ragkv.cli.output import out
from ragkv.evals.arrivals import rates_at_equal_p90
from ragkv.evals.experiment import Row

_WIDTH = 115  # of wide tables, at least: on a narrow terminal lines wrap and no value is cut off


def ttft(rows: Sequence[Row]) -> None:
    table = Table(title="Time to first token, medians in ms", title_justify="left", box=None, padding=(0, 1, 0, 0))
    columns = ("tokens", "policy", "full", "fused", "speed-up", "load", "probe", "recompute", "reused", "computed")
    for name in columns:
        table.add_column(name, justify="left" if name == "policy" else "right", no_wrap=True)
    for row in rows:
        stages = (f"{row[stage]:,.0f}" for stage in ("load_ms", "probe_ms", "recompute_ms"))
        policy = row["policy"] if row["policy"] in ("none", "full") else f"{row['policy']}:{row['budget']:g}"
        table.add_row(
            f"{row['tokens']:,}",
            f"{policy}, from disk" if row["cold"] else policy,
            f"{row['baseline_ttft_ms']:,.0f}",
            f"{row['ttft_ms']:,.0f}",
            f"{row['speedup']:.1f}×",
            *stages,
            f"{row['reused_tokens']:,}",
            f"{row['recomputed_tokens']:,}",
        )
    out.print(table)


def retrieval(rows: Sequence[Row]) -> None:
    table = Table("questions", "by", box=None, padding=(0, 2, 0, 0))
    depths = list(dict.fromkeys(row["depth"] for row in rows))
    for depth in depths:
        table.add_column(f"recall at {depth}", justify="right", no_wrap=True)
        table.add_column("difference", justify="right", no_wrap=True)
    for first in rows[:: len(depths)]:
        way = [row for row in rows if all(row[name] == first[name] for name in ("turns", "mode", "reranked"))]
        cells = (
            cell
            for row in way
            for cell in (
                f"{row['recall']:.3f}",
                "{:+.3f} [dim]{:+.3f} to {:+.3f}[/]".format(row["difference"], *row["difference_interval"]),
            )
        )
        by = f"{first['mode']}, reranked" if first["reranked"] else first["mode"]
        table.add_row(f"{first['turns']}, {first['tasks']:,}", by, *cells)
    out.width = max(out.width, _WIDTH)
    out.print(table)


def cache(rows: Sequence[Row]) -> None:
    table = Table(title="Hits, % of the cost to recompute (% of chunks)", title_justify="left", box=None)
    table.add_column("cache size", justify="right")
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    for policy in policies:
        table.add_column(policy, justify="right", no_wrap=True)
    found = {(row["share"], row["policy"]): row for row in rows}
    for share in dict.fromkeys(row["share"] for row in rows):
        cells = (found[share, policy] for policy in policies)
        table.add_row(f"{share:.1%}", *(f"{100 * c['cost_hit_rate']:.1f} ({100 * c['hit_rate']:.1f})" for c in cells))
    out.print(table)


def find(rows: Sequence[Row]) -> None:
    table = Table(title="Finding chunks in a prompt's tokens", title_justify="left", box=None)
    for column in ("chunks", "tokens", "without any, ms", "of nothing but chunks, ms", "found"):
        table.add_column(column, justify="right")
    for row in rows:
        times = (f"{row['without_ms']:.2f}", f"{row['of_chunks_ms']:.2f}")
        table.add_row(f"{row['chunks']:,}", f"{row['tokens']:,}", *times, f"{row['found']:,}")
    out.print(table)


def learn(rows: Sequence[Row]) -> None:
    table = Table(title="TTFT of plain vLLM that learns passages, and of vLLM alone", title_justify="left", box=None)
    for column in ("requests", "tokens", "learnt", "reused, %", "TTFT, ms", "vLLM alone, ms", "as fast"):
        table.add_column(column, justify="right")
    for row in rows:
        numbers = (f"{row['first']}-{row['last']}", f"{row['prompt_tokens']:,}", f"{row['learnt']:,}")
        times = (f"{row['ragkv_ttft_ms']:,.0f}", f"{row['vllm_ttft_ms']:,.0f}", f"{row['speedup']:.1f}×")
        table.add_row(*numbers, f"{100 * row['reused_share']:.0f}", *times)
    out.print(table)


def simulate(rows: Sequence[Row]) -> None:
    title = "Simulated: where chunks' tokens are found, %; TTFT in ms; GiB read meanwhile, and held by all in the end"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    names = ("chunks", "engines", "store", "routing", "memory", "disk", "bucket", "none")
    more = ("p50", "p90", "p99", "per s", "disk read", "bucket read", "memory held", "disk held", "bucket held")
    for name in (*names, *more):
        table.add_column(name, justify="left" if name in ("store", "routing") else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            f"{row['chunks']:,}",
            f"{row['engines']:,}",
            row["store"],
            row["routing"],
            *(f"{100 * row[f'{tier}_share']:.1f}" for tier in names[4:]),
            *(f"{row[f'ttft_{name}_ms']:,.0f}" for name in more[:3]),
            f"{row['answered_per_s']:,.2f}",
            *(f"{row[f'{tier}_read_bytes'] / (1 << 30):,.1f}" for tier in ("disk", "bucket")),
            *(f"{row[f'{tier}_bytes'] / (1 << 30):,.1f}" for tier in ("memory", "disk", "bucket")),
        )
    out.width = max(out.width, _WIDTH + 35)
    out.print(table)


def store(rows: Sequence[Row]) -> None:
    title = "MB/s; disk: itself, by 1 and 4 threads; memory: from store.memory_gib"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    ways = ("write", "churn", "cold", "disk_1", "disk_4", "warm", "checksum", "memory", "copy")
    for name in ("record", *(way.replace("_", ", ") for way in ways), "on disk", "of it records"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        speeds = (f"{row[way]:,}" if way in row else "-" for way in ways)
        sizes = (f"{row[name]:,} MiB" for name in ("file_mib", "record_mib"))
        table.add_row(f"{row['record_kib']:,} KiB", *speeds, *sizes)
    out.width = max(out.width, _WIDTH)
    out.print(table)


def swap(rows: Sequence[Row]) -> None:
    table = Table("MiB/s", box=None, padding=(0, 1))
    for name in (
        "stored",
        "near",
        "chunks",
        "batch",
        "tokens",
        "prefill",
        "fuse",
        "controller",
        "way",
        "over prefill",
        "over best",
    ):
        table.add_column(name, justify="right")
    for row in rows:
        speed = "disk" if row["mib_s"] is None else f"{row['mib_s']:g}"
        times = [f"{row[f'{name}_ms']:,.0f} ms" for name in ("prefill", "fuse", "controller")]
        over = [f"{row[f'over_{name}_ms']:+,.0f} ms" for name in ("prefill", "best")]
        arm = (f"{row['share']:.0%}", f"{row['near']:.0%}", f"{row['chunk_tokens']}", f"{row['batch']}")
        table.add_row(speed, *arm, f"{row['tokens']:,}", *times, row["way"], *over)
    out.print(table)


def timeline(rows: Sequence[Row]) -> None:
    table = Table("KV from", box=None, padding=(0, 1))
    for name in ("first token", "KV", "loading", "disk at work", "of it while computing", "read before needed"):
        table.add_column(name, justify="right")
    for row in rows:
        times = [f"{row[name]:,.0f} ms" for name in ("waited_ms", "disk_ms", "overlap_ms")]
        table.add_row(row["kv"], f"{row['ttft_ms']:,.0f} ms", f"{row['mib']:,.0f} MiB", *times, f"{row['ahead']:.0%}")
    out.print(table)


def load(rows: Sequence[Row]) -> None:
    table = Table("", "server", box=None, padding=(0, 1))
    columns = ("arrivals/min", "questions", "TTFT 50%", "TTFT 90%", "between tokens 50%", "99%", "failed")
    for name in columns:
        table.add_column(name, justify="right")
    for row in rows:
        rate = f"{60 * row['rate']:.1f}" if "rate" in row else ""
        keys = ("ttft_p50_ms", "ttft_p90_ms", "itl_p50_ms", "itl_p99_ms")
        times = [f"{row[key]:,.0f} ms" if key in row else "" for key in keys]
        table.add_row(row["part"], row["system"], rate, f"{row['questions']}", *times, f"{row['failed']}")
    out.print(table)


def rag(rows: Sequence[Row]) -> None:
    table = Table("", box=None, padding=(0, 1))
    table.add_column("engine", no_wrap=True)
    columns = ("a minute", "questions", "TTFT 50%", "90%", "99%", "tokens 50%", "99%", "a token of all", "reused")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        if row["part"] == "simulated":
            continue
        part = f"from {row['from']:,}" if row["part"] == "long" else row["part"]
        rate = f"{60 * row['rate']:.1f}" if "rate" in row else ""
        keys = ("ttft_p50_ms", "ttft_p90_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms", "normalised_ms")
        times = [f"{row[key]:,.0f} ms" for key in keys]
        table.add_row(part, row["system"], rate, f"{row['questions']}", *times, _share(row["reused_share"]))
    out.width = max(out.width, _WIDTH)
    out.print(table)
    alone = {row["system"]: row["ttft_p50_ms"] for row in rows if row["part"] == "alone"}
    for name, ttft_ms in alone.items():
        if name != "ragkv":
            out.print(f"one after the other, the first token comes {ttft_ms / alone['ragkv']:.1f}× as soon as {name}'s")
    for row, quickest, is_bound in rates_at_equal_p90(rows):
        at_least = "at least " if is_bound else ""
        out.print(
            f"at vLLM's {row['ttft_p90_ms']:,.0f} ms for nine in ten first tokens: "
            f"{at_least}{quickest / row['rate']:.1f}× its rate of {60 * row['rate']:.1f} a minute"
        )
    for row in rows:
        if row["part"] == "simulated":
            out.print(
                f"the simulation expects {_share(row['expected_memory_share'])} of the chunks in memory and "
                f"{row['expected_ttft_mean_ms']:,.0f} ms to the first token; it is {_share(row['memory_share'])} and "
                f"{row['ttft_mean_ms']:,.0f} ms"
            )


def chat(rows: Sequence[Row]) -> None:
    table = Table("", box=None, padding=(0, 2, 0, 0))
    for name in ("engine", "tokens from", "turns", "TTFT", "p90", "latency", "from memory", "from disk", "turns/s"):
        table.add_column(name, justify="left" if name == "engine" else "right")
    for row in rows:
        times = (f"{row[name]:,.0f} ms" for name in ("ttft_ms", "ttft_p90_ms", "latency_ms"))
        shares = (_share(row[name]) for name in ("prefix_share", "stored_share"))
        rate = f"{row['turns_per_s']:.3f}" if "turns_per_s" in row else ""
        table.add_row(row["part"], row["engine"], f"{row['from_tokens']:,}", f"{row['turns']}", *times, *shares, rate)
    out.width = max(out.width, _WIDTH)
    out.print(table)
    for part, engine in dict.fromkeys((row["part"], row["engine"]) for row in rows if row["engine"] != "vLLM"):
        row = next(row for row in rows if (row["part"], row["engine"]) == (part, engine))
        differing = f"{row['answers_that_differ']} of {row['answers']}"
        out.print(f"{part}: {differing} answers of {engine} differ from vLLM's")


def preempted(rows: Sequence[Row]) -> None:
    table = Table(title="Milliseconds, medians", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in ("blocks of", "tokens", "without KV", "computed", "copied out", "copied in", "prefill", "speed-up"):
        table.add_column(name, justify="right")
    for row in rows:
        counts = (f"{row[name]:,}" for name in ("block_tokens", "tokens", "swapped", "computed"))
        times = (f"{row[name]:,.1f}" for name in ("out_ms", "in_ms", "prefill_ms"))
        table.add_row(*counts, *times, f"{row['speedup']:.1f}×")
    out.print(table)


def batch(rows: Sequence[Row]) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("mix")
    columns = (
        "ordered",
        "as they came",
        "ratio",
        "tokens computed",
        "as they came",
        "KV in use",
        "as they came",
        "differ",
    )
    for name in columns:
        table.add_column(name, justify="right")
    for row in rows:
        differ = "" if row["answers_that_differ"] is None else f"{row['answers_that_differ']} of {row['requests']}"
        table.add_row(
            row["mix"],
            *(f"{row[f'{arm}_per_s']:.2f}/s" for arm in ("ordered", "arrival")),
            f"{row['ratio']:.3f}",
            *(f"{row[f'{arm}_computed']:,}" for arm in ("ordered", "arrival")),
            *(f"{row[f'{arm}_kv_use']:.0%}" for arm in ("ordered", "arrival")),
            differ,
        )
    out.width = max(out.width, _WIDTH)
    out.print(table)


def analytics(rows: Sequence[Row]) -> None:
    columns = ("instruction", "ragkv", "vLLM", "ratio", "of TTFT", "restarted: ragkv", "vLLM", "speed-up", "differ")
    names = {"uncached": "no prefix cache", "lmcache": "LMCache"}
    peers = [key for key in names if any(f"{key}_ratio" in row for row in rows)]
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in (*columns, *(column for key in peers for column in (f"{names[key]}: ratio", "restarted"))):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            f"{row['instruction_tokens']:,} tokens",
            f"{row['ragkv_per_s']:g}/s",
            f"{row['vllm_per_s']:g}/s",
            f"{row['throughput_ratio']:.3f}",
            f"{row['ttft_ratio']:.3f}",
            f"{row['ragkv_restarted_ttft_ms']:,.0f} ms",
            f"{row['vllm_restarted_ttft_ms']:,.0f} ms",
            f"{row['restart_speedup']:.1f}×",
            f"{row['answers_that_differ']} of {row['requests']}",
            *(text for key in peers for text in _of_peer(row, key)),
        )
    out.width = max(out.width, _WIDTH)
    out.print(table)


def _of_peer(row: Row, key: str) -> tuple[str, str]:
    return f"{row[f'{key}_ratio']:.3f}", f"{row[f'{key}_restarted_ttft_ms']:,.0f} ms"


def pressure(rows: Sequence[Row]) -> None:
    table = Table("prompts", "blocks", "memory", "preempted", box=None, padding=(0, 2, 0, 0))
    columns = ("took", "tokens/s", "of vLLM's", "preemptions", "tokens loaded", "KV use", "differ")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        if row["way"] == "vLLM":  # the first of each cell
            alone = row["tokens_per_s"]
        table.add_row(
            f"{row['tokens_in']:,}",
            f"{row['block_tokens']:,}",
            f"{row['share']:.0%}, {row['kv_tokens']:,} tokens",
            row["way"],
            f"{row['seconds']:,.1f} s",
            f"{row['tokens_per_s']:.1f}",
            f"{row['tokens_per_s'] / alone:.2f}",
            f"{row['preemptions']:,}",
            f"{row['resumed_tokens']:,}",
            _share(row["kv_use"]),
            f"{row['answers_that_differ']} of {len(row['all_seconds']) * row['requests']}",
        )
    out.width = max(out.width, _WIDTH)
    out.print(table)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def quality(rows: Sequence[Row]) -> None:
    first = rows[0]
    title = f"{first['dataset']}, {first['examples']} examples: drift from full prefill, with 95% intervals"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    drift, score = ("KL", "", "p90", "worst", "> none", "agree"), (first["score_name"], "full", "kept")
    for name in ("policy", "KV", *drift, *score, "TTFT", "full"):
        table.add_column(name, justify="left" if name in ("policy", "KV") else "right", no_wrap=True)
    for row in rows:
        times = (row["ttft_ms"], row["baseline_ttft_ms"])
        table.add_row(
            row["policy"] if row["policy"] in ("none", "full") else f"{row['policy']}:{row['budget']:g}",
            row["kv"],
            f"{row['kl']:.4f}",
            "[dim]{:.4f} to {:.4f}[/]".format(*row["kl_interval"]),
            f"{row['kl_p90']:.3f}",
            f"{row['kl_worst']:.3f}",
            _share(row["further_than_none"]),
            f"{row['agreement']:.3f}",
            f"{row['score']:.3f}",
            f"{row['score_full']:.3f}",
            _share(row["right_kept"]),
            *(f"{value:,.0f} ms" if value else "-" for value in times),
        )
    out.width = max(out.width, _WIDTH)
    out.print(table)
