"""`ragkv eval report`: one HTML page and its pictures, from what `ragkv eval quality` wrote.

Knows nothing about models: it reads rows.
"""

import gzip
import html
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ragkv.errors import ConfigError
from ragkv.evals import intervals
from ragkv.evals.experiment import Row
from ragkv.evals.quality_rows import summary


@dataclass(frozen=True)
class Results:
    """The rows of one file; `arms` maps an arm's label to its rows by example."""

    name: str
    dataset: str
    rows: list[Row]

    @property
    def arms(self) -> dict[str, dict[str, Row]]:
        arms: dict[str, dict[str, Row]] = {}
        for row in self.rows:
            arms.setdefault(row["arm"], {})[row["example"]] = row
        return dict(
            sorted(arms.items(), key=lambda item: (item[0].split(":")[0], next(iter(item[1].values()))["budget"]))
        )


def write(files: Sequence[Path], out: Path, against: str) -> Path:
    """Write `index.html` and PNGs into the folder `out`; drift is also given as a ratio to that of the arm `against`.

    Pictures are named after their files. Returns the page's path. Raises ConfigError for a file that holds no results,
    and for two files of one name.
    """
    results = [_read(file) for file in files]
    for i, result in enumerate(results):
        if result.name in (other.name for other in results[:i]):
            raise ConfigError(f"two files are called {files[i].name}, and pictures are named after them: rename one")
    out.mkdir(parents=True, exist_ok=True)
    parts = []
    for result in results:
        drift, score = out / f"{result.name}-drift.png", out / f"{result.name}-score.png"
        _draw_drift(result, drift)
        has_times = _draw_scores(result, score)
        parts.append(_section(result, against, [drift, *([score] if has_times else [])]))
    parts += _example(results)
    page = out / "index.html"
    page.write_text(_PAGE.format(body="\n".join(parts)))
    return page


def _read(file: Path) -> Results:
    try:
        data = file.read_bytes()
        lines = (gzip.decompress(data) if file.suffix == ".gz" else data).decode().splitlines()
        rows = [json.loads(line) for line in lines if line.endswith("}")]  # the last may be cut off
        return Results(file.name.partition(".")[0], rows[0]["dataset"], rows)
    except (OSError, EOFError, ValueError, KeyError, IndexError) as error:
        problem = type(error).__name__ if isinstance(error, UnicodeDecodeError) else repr(error)
        raise ConfigError(f"{file} holds no results of `ragkv eval quality`: {problem}") from error


def _draw_drift(result: Results, file: Path) -> None:
    """Draw mean KL against budget, a line for each policy and kind of KV, with 95% intervals."""
    lines: dict[str, list[tuple[float, float, list[float]]]] = {}
    for row in map(summary, (list(rows.values()) for rows in result.arms.values())):
        if row["policy"] != "full":
            lines.setdefault(f"{row['policy']}@{row['kv']}", []).append((row["budget"], row["kl"], row["kl_interval"]))
    figure, axes = _axes()
    for i, (name, points) in enumerate(lines.items()):
        budgets, means, intervals = zip(*sorted(points), strict=True)
        below, above = zip(*((m - low, high - m) for m, (low, high) in zip(means, intervals, strict=True)), strict=True)
        positions = [100 * b + 0.06 * (i - len(lines) / 2) for b in budgets]  # side by side, so that all can be seen
        axes.errorbar(positions, means, (below, above), marker="o", ms=4, capsize=2, elinewidth=0.8, label=name)
    axes.set(xlabel="budget, % of the cached tokens", ylabel="KL to full prefill", title=result.name, ylim=(0, None))
    _save(figure, file)


def _draw_scores(result: Results, file: Path) -> bool:
    """Draw score against TTFT, a point for each arm, with 95% intervals of the difference from full prefill.

    Returns False if no times were taken.
    """
    figure, axes = _axes()
    drawn = {}
    for label, rows in result.arms.items():
        row = summary(list(rows.values()))
        if row["ttft_ms"]:
            difference = row["score"] - row["score_full"]
            below, above = difference - row["score_interval"][0], row["score_interval"][1] - difference
            axes.errorbar(row["ttft_ms"], row["score"], ([below], [above]), marker="o", ls="", capsize=3, label=label)
            drawn = row
    if drawn:
        axes.plot(drawn["baseline_ttft_ms"], drawn["score_full"], "k*", markersize=12, label="full prefill by vLLM")
        axes.axhline(drawn["score_full"], color="k", lw=0.8, ls=":")
        axes.set(xlabel="TTFT, ms (median)", ylabel=f"score: {drawn['score_name']}", title=result.name)
        axes.set(xlim=(0, None), ylim=(0, None))
        _save(figure, file)
    plt.close(figure)
    return bool(drawn)


def _axes() -> tuple[Figure, Axes]:
    figure, axes = plt.subplots(figsize=(8.6, 4.2), layout="constrained")
    axes.set_prop_cycle(color=[plt.get_cmap("tab20")(i) for i in (*range(0, 20, 2), *range(1, 20, 2))])  # 20 arms
    axes.grid(alpha=0.3)
    return figure, axes


def _save(figure: Figure, file: Path) -> None:
    """Save it with the legend next to the picture, where it hides nothing."""
    figure.legend(loc="outside right upper", fontsize=8)
    figure.savefig(file, dpi=110)
    plt.close(figure)


def _section(result: Results, against: str, pictures: Sequence[Path]) -> str:
    first, arms = result.rows[0], result.arms
    reference = arms.get(against)
    head = (
        "",
        "examples",
        "KL to full prefill",
        f"ratio to {against}",
        "agreement",
        "gold NLL",
        "score",
        "full",
        "TTFT",
    )
    table = ["<tr>" + "".join(f"<th>{html.escape(name)}</th>" for name in head) + "</tr>"]
    for label, rows in arms.items():
        row = summary(list(rows.values()))
        ratio = "-"
        if reference is not None and (ids := [id for id in rows if id in reference]):
            pair = [rows[id]["kl"] for id in ids], [reference[id]["kl"] for id in ids]
            low, high = intervals.ratio_interval(*pair)
            ratio = f"{np.mean(pair[0]) / np.mean(pair[1]):.2f} [{low:.2f}, {high:.2f}]"
        cells = (
            label,
            row["examples"],
            "{:.4f} [{:.4f}, {:.4f}]".format(row["kl"], *row["kl_interval"]),
            ratio,
            f"{row['agreement']:.3f}",
            f"{row['gold_nll_difference']:+.3f}",
            f"{row['score']:.3f}",
            f"{row['score_full']:.3f}",
            f"{row['ttft_ms']:,.0f} ms" if row["ttft_ms"] else "-",
        )
        table.append("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in cells) + "</tr>")
    images = "".join(f'<img src="{picture.name}" alt="{picture.stem}">' for picture in pictures)
    about = (
        f"{result.dataset}: {first['model']}, {first['dtype']}, {first['captures']} contexts, KV stored "
        f"{first['codec']}; score: {first['score_name']}, at most {first['score_ceiling']:g}; 95% bootstrap "
        "intervals in brackets"
    )
    return f"<h2>{html.escape(result.name)}</h2><p>{html.escape(about)}</p><table>{''.join(table)}</table>{images}"


def _example(results: Sequence[Results]) -> list[str]:
    """Return the prompt of one example, what was recomputed coloured, for each arm that recomputed some of it."""
    for result in results:
        shown = [row for row in result.rows if row.get("pieces") and row["recomputed_runs"]]
        if shown:
            parts = [f"<h2>What was recomputed: {result.name}, example {html.escape(shown[0]['example'])}</h2>"]
            for row in shown:
                share = f"{100 * row['recomputed_share']:.1f}% of the cached tokens"
                parts.append(f"<h3>{html.escape(row['arm'])}: {share}</h3><p class=prompt>{_coloured(row)}</p>")
            return parts
    return []


def _coloured(row: Row) -> str:
    recomputed = {i for start, end in row["recomputed_runs"] for i in range(start, end)}
    starts = {start for start, _ in row["chunk_ranges"]}
    end = row["chunk_ranges"][-1][1]
    pieces = []
    for i, piece in enumerate(row["pieces"]):
        text = html.escape(piece).replace("\n", "↵ ")
        kind = "asked" if i >= end else "recomputed" if i in recomputed else ""
        pieces.append(("<br>▸ " if i in starts else "") + (f"<b class={kind}>{text}</b>" if kind else text))
    return "".join(pieces)


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>ragkv: fidelity</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; color: #222 }}
table {{ border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums }}
td, th {{ padding: .15rem .5rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap }}
td:first-child, th:first-child {{ text-align: left }}
img {{ max-width: 49%; margin-top: 1rem }}
.prompt {{ font-size: 12px; color: #777; overflow-wrap: anywhere }}
b.recomputed {{ background: #fd8; color: #000; font-weight: 500 }}
b.asked {{ background: #bdf; color: #000; font-weight: 500 }}
</style>
<h1>How far fused answers drift from full prefill</h1>
<p>KL(full ‖ fused) over the whole vocabulary, teacher-forced along full prefill's own greedy continuation and the gold
answer; lower is better. Agreement: how often the fused model's first choice is full prefill's. Gold NLL and score:
their difference from, and value next to, full prefill of the same tokens.</p>
{body}
</html>
"""
