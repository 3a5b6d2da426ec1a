"""`ragkv eval swap`: recompute or load? TTFT by prompt length, by what of it is stored and where, by record size, batch
and bandwidth.

For each combination three ways on one engine, interleaved: vLLM's own prefill, fusion of all that is stored, and what
the controller chooses. Medians over the rounds, of which short prompts get more. Reads are the store's own, without its
memory tier: what is "near" is in the page cache.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from ragkv.chunk_kv import ChunkKV
from ragkv.config import Config
from ragkv.controller.cost_model import Profile
from ragkv.controller.profile import Bench, load_of, measure, without
from ragkv.engine.task import FuseTask
from ragkv.errors import ModelError
from ragkv.evals.experiment import Progress, Row
from ragkv.evals.parameters import Swap
from ragkv.evals.rig import rig
from ragkv.policies import Policy
from ragkv.prompt import Prompt
from ragkv.routing import plan_task
from ragkv.store.disk_store import DiskStore
from ragkv.store.record import ChunkKey

_LEAST_S = 8.0  # of rounds: what is short is taken more often, for single requests differ by 20 ms
_ARMS = ("mib_s", "share", "near", "chunk_tokens", "batch")  # what a picture holds fixed


async def run(config: Config, wanted: Swap, progress: Progress) -> AsyncIterator[Row]:
    """Yield a row for each combination as soon as it is known."""
    policy = Policy.of(config.answer.policy, config.answer.budget)
    for bandwidth in wanted.bandwidths:
        async with rig(config, 1, config.store.options(), **_slow_disk(bandwidth)) as on:
            for chunk_tokens in wanted.chunk_tokens:
                bench = on.bench(chunk_tokens)
                profile = await measure(bench, on.kv, policy, on.store, on.engine.max_model_len)
                if profile is None:
                    raise ModelError(f"nothing to measure: the context of {config.model.name} is too short to fuse")
                for num_tokens in wanted.tokens:
                    prompt, chunk_hashes = await bench.prepare(max(num_tokens, bench.shortest))
                    whole = on.kv.task(prompt, chunk_hashes, policy, on.store)
                    for share, near, batch in itertools.product(wanted.shares, wanted.near, wanted.batches):
                        task = without(whole, range(1, 1 + round((1 - share) * len(chunk_hashes))))
                        far = [on.kv.key(span) for span in task.spans[1 + round(near * (len(task.spans) - 1)) :]]
                        case = _Case(bench, prompt, task, profile, on.kv, on.store, far, batch)
                        arm = dict(zip(_ARMS, (bandwidth, share, near, chunk_tokens, batch), strict=True))
                        progress.update(f"{num_tokens} tokens, {share:.0%} stored")
                        yield {**arm, "model": config.model.name, **await case.measure(wanted.repeats)}


def _slow_disk(mib_s: float | None) -> dict[str, Any]:
    """Return vLLM's arguments for a store that reads at this bandwidth."""
    if mib_s is None:
        return {}
    return {"worker_extension_cls": "ragkv.evals.slow_disk.SlowDiskWorker", "additional_config": {"read_mib_s": mib_s}}


@dataclass(frozen=True)
class _Case:
    """One combination. far: the chunks that are not in the page cache."""

    bench: Bench
    prompt: Prompt
    task: FuseTask
    profile: Profile
    kv: ChunkKV
    store: DiskStore
    far: Sequence[ChunkKey]
    batch: int

    async def measure(self, repeats: int) -> Row:
        times: dict[str, list[float]] = {"prefill": [], "fuse": [], "controller": []}
        num_tokens, found = len(self.prompt.token_ids), None
        begin, num_rounds = time.perf_counter(), 0
        while num_rounds < 1 + repeats or time.perf_counter() - begin < _LEAST_S:
            num_rounds += 1
            for name, collected in times.items():
                self.store.admin.drop_cached(self.far)
                request: FuseTask | None = self.task if name == "fuse" else None
                if name == "controller":
                    found, request = plan_task(self.profile, num_tokens, self.task, self.kv, self.store)
                collected.append(await self._ttft_ms(request))
        assert found is not None
        medians = {name: median(collected[1:]) for name, collected in times.items()}  # the first round warms up
        best = min(medians["prefill"], medians["fuse"])
        far = set(self.far)
        cold = sum(span.end - span.start for span in self.task.spans if self.kv.key(span) in far)
        load = replace(load_of(num_tokens, self.task), cold=cold)
        return {
            "tokens": num_tokens,
            "policy": self.task.policy.label,
            **{f"{name}_ms": round(ms, 1) for name, ms in medians.items()},
            "way": found.way,
            "predicted_prefill_ms": round(found.prefill_ms, 1),
            "predicted_fuse_ms": round(self.profile.fused_ms(load), 1),
            "over_prefill_ms": round(medians["controller"] - medians["prefill"], 1),
            "over_best_ms": round(medians["controller"] - best, 1),
            "repeats": num_rounds - 1,
        }

    async def _ttft_ms(self, request: FuseTask | None) -> float:
        """Return the median over the requests of a batch, all sent at once."""
        asked = await asyncio.gather(*(self.bench.ask(self.prompt, request) for _ in range(self.batch)))
        return median(timed.ttft_ms for timed in asked)


def break_even(rows: Sequence[Row], prefix: str = "") -> float | None:
    """Return the prompt length from which fusion is quicker than full prefill, between two that were measured.

    None if it is at all of them, or at none. prefix: `predicted_` for the profile's.
    """
    points = sorted((row["tokens"], row[f"{prefix}prefill_ms"] - row[f"{prefix}fuse_ms"]) for row in rows)
    for (tokens, gain), (more_tokens, more_gain) in itertools.pairwise(points):
        if gain <= 0 < more_gain:
            return float(tokens + (more_tokens - tokens) * -gain / (more_gain - gain))
    return None


def draw(rows: Sequence[Row], out: Path) -> None:
    """Draw TTFT by prompt length, measured and predicted, with the break-even: a picture for each other setting."""
    arms: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        arms.setdefault(tuple(row[name] for name in _ARMS), []).append(row)
    columns = min(3, len(arms))
    lines = -(-len(arms) // columns)
    size = (5 * columns, 4 * lines)
    figure, axes = plt.subplots(lines, columns, figsize=size, squeeze=False, layout="constrained")
    for ax, (arm, found) in zip(axes.flat, arms.items(), strict=False):
        _draw_arm(ax, sorted(found, key=lambda row: row["tokens"]))
        bandwidth, share, near, chunk_tokens, batch = arm
        where = f"{near:.0%} near" + ("" if bandwidth is None else f", {bandwidth:g} MiB/s")
        ax.set_title(f"{share:.0%} stored, {where}\nchunks of {chunk_tokens}, batch {batch}", fontsize=10)
    for ax in axes.flat[len(arms) :]:
        ax.set_axis_off()
    axes[0, 0].legend(fontsize=8)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)
    plt.close(figure)


def _draw_arm(ax: Any, rows: Sequence[Row]) -> None:
    tokens = np.array([row["tokens"] for row in rows])
    for name, color in (("prefill", "tab:red"), ("fuse", "tab:blue")):
        ax.plot(tokens, [row[f"{name}_ms"] for row in rows], "o-", color=color, label=name)
        predicted = [row[f"predicted_{name}_ms"] for row in rows]
        ax.plot(tokens, predicted, "x--", color=color, alpha=0.6, label=f"{name}, predicted")
    chosen = [row["controller_ms"] for row in rows]
    ax.plot(tokens, chosen, "s", color="black", markerfacecolor="none", markersize=9, label="controller")
    for prefix, style in (("", "-"), ("predicted_", "--")):
        if (length := break_even(rows, prefix)) is not None:
            ax.axvline(length, color="gray", linestyle=style, linewidth=1)
            height = 0.9 if prefix else 0.96  # of the axes
            ax.text(length, height, f" {length:,.0f}", fontsize=8, color="gray", transform=ax.get_xaxis_transform())
    ax.set(xscale="log", yscale="log", xlabel="prompt, tokens", ylabel="time to first token, ms")
    ax.set_xticks(tokens, [f"{n:,}" for n in tokens], rotation=60, fontsize=8)
    ax.minorticks_off()
    ax.grid(alpha=0.3)
