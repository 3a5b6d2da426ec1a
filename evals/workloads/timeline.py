"""`ragkv eval timeline`: what one request does and when. Its KV is read from the disk while its layers are computed.

The worker notes when it loads each layer. What the disk has brought by then is seen from outside: by which pages of the
segment files the system holds in memory, looked at every few milliseconds.
"""

import asyncio
import ctypes
import mmap
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import numpy.typing as npt

from ragkv.config import Config
from ragkv.controller.profile import Timed
from ragkv.evals.experiment import Progress, Row
from ragkv.evals.parameters import Timeline as Wanted
from ragkv.evals.rig import rig
from ragkv.store.disk_store import DiskStore
from ragkv.store.record import ChunkKey

_EVERY_S = 0.01  # more often, and the looking slows down what is looked at
_WARM_UP = 2  # requests
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


@dataclass
class Timeline:
    """One request. Times are in seconds since it was sent.

    sizes: bytes of each layer's records. loads: pass, layer, begin and end of its load. resident: bytes of each layer
    that are in the page cache, at each of `times`.
    """

    first_token: float
    sizes: list[int]
    loads: list[tuple[str, int, float, float]]
    times: list[float] = field(default_factory=list)
    resident: list[list[int]] = field(default_factory=list)

    def row(self) -> Row:
        """waited_ms: that the worker spent in loads. disk_ms: in which bytes came from the disk; overlap_ms: of it,
        while the worker computed. ahead: the share of the bytes that were in memory when their load began."""
        begins: dict[int, float] = {}
        for _, layer, begin, end in self.loads:
            if end - begin > 1e-6:
                begins.setdefault(layer, begin)
        ahead = sum(self._resident_at(begin, layer) for layer, begin in begins.items())
        read = [
            (start, end)
            for (start, before), (end, after) in pairwise(zip(self.times, map(sum, self.resident), strict=True))
            if after > before
        ]
        waiting = [(begin, end) for _, _, begin, end in self.loads]
        reading = sum(end - start for start, end in read)
        both = sum(max(0.0, min(b, d) - max(a, c)) for a, b in read for c, d in waiting)
        return {
            "ttft_ms": round(1e3 * self.first_token, 1),
            "mib": round(sum(self.sizes) / (1 << 20), 1),
            "waited_ms": round(1e3 * sum(end - begin for begin, end in waiting), 1),
            "disk_ms": round(1e3 * reading, 1),
            "overlap_ms": round(1e3 * (reading - both), 1),
            "ahead": round(ahead / max(1, sum(self.sizes[layer] for layer in begins)), 3),
        }

    def _resident_at(self, moment: float, layer: int) -> int:
        before = [resident[layer] for t, resident in zip(self.times, self.resident, strict=True) if t <= moment]
        return before[-1] if before else 0


class Residency:
    """Which bytes of some records are in the page cache. Looking at a file's pages doesn't bring them there."""

    def __init__(self, store: DiskStore, keys: Sequence[ChunkKey], num_layers: int) -> None:
        self._maps: dict[Path, npt.NDArray[np.uint8]] = {}
        self._chunks: list[tuple[int, int, npt.NDArray[np.int64]]] = []  # address, bytes, first page of each layer
        self.sizes = [0] * num_layers
        for key in keys:
            locations = [store.admin.locate(key, layer) for layer in range(num_layers)]  # one after the other
            (path, first, _), (_, last, length) = locations[0], locations[-1]
            pages = np.array([(offset - first) // mmap.PAGESIZE for _, offset, _ in locations])
            address = self._map(path).ctypes.data + first
            self._chunks.append((address, last + length - first, pages))
            self.sizes = [size + length for size, (_, _, length) in zip(self.sizes, locations, strict=True)]

    def _map(self, path: Path) -> npt.NDArray[np.uint8]:
        if path not in self._maps:
            with path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
            self._maps[path] = np.frombuffer(mapped, dtype=np.uint8)
        return self._maps[path]

    def resident(self) -> list[int]:
        """Return the bytes of each layer that are."""
        found = np.zeros(len(self.sizes), dtype=np.int64)
        for address, length, first_pages in self._chunks:
            pages = np.empty(-(-length // mmap.PAGESIZE), dtype=np.uint8)
            if _libc.mincore(address, length, pages.ctypes.data):
                raise OSError(ctypes.get_errno(), "mincore")
            found += np.add.reduceat((pages & 1).astype(np.int64), first_pages)
        return [min(size, int(n) * mmap.PAGESIZE) for size, n in zip(self.sizes, found, strict=True)]


async def run(config: Config, wanted: Wanted, progress: Progress) -> AsyncIterator[Row]:
    """Measure a request whose KV is on disk, and one whose KV is in the page cache; yield a row of each, and draw both.

    Without a memory tier (`store.memory_gib`), which would leave nothing to read. Raises ConfigError for a length that
    the model's context can't hold.
    """
    async with rig(config, config.index.num_contexts, config.store.options()) as on:
        bench = on.bench(config.index.chunk_tokens)
        prompt, chunk_hashes = await bench.prepare(wanted.tokens)
        task = replace(on.kv.task(prompt, chunk_hashes, wanted.policy, on.store), trace=True)
        keys = [key for span in task.spans if (key := on.kv.stored_key(span, on.store)) is not None]
        for _ in range(_WARM_UP):
            trace = (await bench.ask(prompt, task)).report.stages.trace or []
        num_layers = 1 + max(layer for _, layer, _, _ in trace)
        residency = Residency(on.store, keys, num_layers)
        timelines = {}
        for name in ("memory", "disk"):
            if name == "disk":
                on.store.admin.drop_cached(keys)
            timelines[name] = await _watched(bench.ask(prompt, task), residency)
    num_tokens, policy = len(prompt.token_ids), wanted.policy.label
    _draw(timelines, f"{num_tokens:,} tokens, {policy}, {config.model.name} in {config.model.dtype}", wanted.out)
    progress.note(f"picture: {wanted.out}")
    for name, timeline in timelines.items():
        yield {"kv": name, "tokens": num_tokens, "policy": policy, **timeline.row()}


async def _watched(request: Coroutine[Any, Any, Timed], residency: Residency) -> Timeline:
    begin = time.perf_counter()
    times, resident = [], []
    asking = asyncio.create_task(request)
    while not asking.done():
        resident.append(residency.resident())
        times.append(time.perf_counter() - begin)
        await asyncio.sleep(_EVERY_S)
    timed = asking.result()
    loads = [(stage, layer, a - begin, b - begin) for stage, layer, a, b in timed.report.stages.trace or []]
    return Timeline(1e-3 * timed.ttft_ms, residency.sizes, loads, times, resident)


def _draw(timelines: Mapping[str, Timeline], title: str, out: Path) -> None:
    """Draw each request: its layers over time, read, loaded and computed; below, the bytes that came from the disk."""
    size = (11, 3.4 * len(timelines) + 1)
    figure, axes = plt.subplots(len(timelines), figsize=size, sharex=True, squeeze=False, layout="constrained")
    for (name, timeline), ax in zip(timelines.items(), axes[:, 0], strict=True):
        _draw_layers(timeline, ax)
        ax.set(ylabel="layer", title=f"KV from {name}: first token after {1e3 * timeline.first_token:.0f} ms")
        ax.invert_yaxis()
        ax.axvline(1e3 * timeline.first_token, color="black", linewidth=1)
    axes[-1, 0].legend(loc="upper right", fontsize=8)
    axes[-1, 0].set_xlabel("ms since the request was sent")
    figure.suptitle(title)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120)
    plt.close(figure)


def _draw_layers(timeline: Timeline, ax: Any) -> None:
    bars: dict[str, list[tuple[int, float, float]]] = {"read from disk": [], "loaded": [], "computed": []}
    for layer, size in enumerate(timeline.sizes):
        held = [resident[layer] for resident in timeline.resident]
        before = [t for t, part in zip(timeline.times, held, strict=True) if part <= 0.1 * size]
        after = [t for t, part in zip(timeline.times, held, strict=True) if part >= size]
        if before:
            bars["read from disk"].append((layer, before[-1], after[0] if after else timeline.times[-1]))
    for (stage, layer, begin, end), (next_stage, _, next_begin, _) in pairwise(
        [*timeline.loads, ("", 0, timeline.first_token, timeline.first_token)]
    ):
        bars["loaded"].append((layer, begin, end))
        bars["computed"].append(
            (layer, end, next_begin if stage == next_stage else min(next_begin, timeline.first_token))
        )
    heights = {"read from disk": (-0.45, 0.3), "loaded": (-0.15, 0.3), "computed": (0.15, 0.3)}
    colors = {"read from disk": "tab:orange", "loaded": "tab:green", "computed": "tab:blue"}
    for name, parts in bars.items():
        above, height = heights[name]
        rows = np.array([layer + above for layer, _, _ in parts])
        ax.barh(
            rows,
            [1e3 * (end - begin) for _, begin, end in parts],
            left=[1e3 * begin for _, begin, _ in parts],
            height=height,
            align="edge",
            color=colors[name],
            label=name,
        )
