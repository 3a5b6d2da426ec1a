"""Fills a request's blocks of vLLM's paged cache: runs the model over some tokens while it loads stored KV for others.

One such forward is a pass. In it a layer's stored KV is read, checked and fused (rotated to its new position and
written to its slots) just before that layer attends, and dropped after it (on CUDA, where it was in memory, after the
request: `ragkv.engine.device_copy`). Runs in the worker, between vLLM's own forwards: `fusion` plans a request's passes
by its policy, `precompute` loads single layers. Knows nothing about policies.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from ragkv.engine.blocks import Blocks, selective
from ragkv.engine.forward import Piece
from ragkv.engine.loader import KVLoader, LoadedSpan
from ragkv.engine.positions import covered
from ragkv.engine.shift import MeanShift
from ragkv.engine.task import Job, Report, Span
from ragkv.store.base import Snapshot

_NOT_WRITTEN = -1  # the slot of a token whose KV isn't to be written
_UNKNOWN = (1 << 31) - 1  # a position after every query: nothing attends to it


@dataclass(frozen=True)
class LayerView:
    """A layer, just before it attends. q, k, v: `[T, H, D]` of the tokens in the pass.

    key_positions: `[N]`, the position of each key; where no key has been written, one after every query. An observer
    must not keep `loaded` after it returns: the memory is used again.
    """

    layer: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    loaded: list[LoadedSpan]
    blocks: Blocks
    key_positions: torch.Tensor

    @property
    def keys(self) -> torch.Tensor:
        """`[Hkv, N, D]` of all tokens, those in the pass and those that were loaded; of others, anything."""
        kv = self.blocks.kv(self.layer)
        return kv.in_order(kv.k, len(self.key_positions))


Observe = Callable[[LayerView], bool | None]  # returns True to end the pass


@dataclass(frozen=True)
class PassPlan:
    """What one pass computes and loads.

    positions: `[T]`, sorted, on the host: the tokens to compute, none of them in vLLM's prefix cache. spans_at: the
    spans to load just before a layer attends; where layers differ, the last layer's include all others'. observe:
    called with each layer before it attends. shift: add the mean change of the KV of a span's computed tokens to its
    other tokens. stage: the field of the report that the pass's time is added to, apart from the load's.

    attend_in: the blocks over which the tokens attend by our kernel. That may be the filler's `blocks` only if the
    spans, `positions` and what was kept together are all tokens up to the last; else it is the filler's `paged`. None:
    vLLM's own attention. flush: False leaves the pass's KV out of vLLM's blocks if the filler's are separate. keep:
    the positions, of these, whose KV stays as this pass computes it, for the passes that follow.
    """

    positions: torch.Tensor
    spans_at: Callable[[int], Sequence[Span]]
    observe: Observe | None = None
    shift: bool = False
    stage: Literal["probe_ms", "recompute_ms"] = "recompute_ms"
    attend_in: Blocks | None = None
    flush: bool = True
    keep: torch.Tensor | None = None


class BlockFiller:
    """The blocks of one request being filled.

    blocks: where a layer's KV is put together. paged: vLLM's own blocks, None if our kernels can't read their layout.
    is_separate: whether `blocks` is memory of ours, as on CPU, from which KV is copied (flushed) into vLLM's. kept: the
    positions whose KV a pass has computed for good.
    """

    def __init__(self, loader: KVLoader, job: Job, report: Report) -> None:
        self.loader, self.job, self.report = loader, job, report
        self.blocks, self.paged = loader.blocks(job)
        self.is_separate = self.blocks is not self.paged
        self.slots = self.blocks.slots.clone()
        if not self.is_separate:  # vLLM's prefix cache must not be written: other requests share those blocks
            self.slots[: job.num_prefix] = _NOT_WRITTEN
        self.kept = torch.empty(0, dtype=torch.int64)
        self._kept_kv: list[tuple[torch.Tensor, torch.Tensor]] = []  # of each layer, where `blocks` doesn't hold it

    def run(self, plan: PassPlan) -> None:
        """Do one pass. Raises BadSpanError if a span can't be loaded; some layers are written then: fill them again."""
        if plan.keep is not None:
            self.kept, self._kept_kv = plan.keep, []
        stages = self.report.stages
        begin, loaded_before = time.perf_counter(), stages.load_ms
        with self.loader.snapshot() as snapshot:
            _Pass(self, plan, snapshot).run()
        elapsed_ms = 1e3 * (time.perf_counter() - begin) - (stages.load_ms - loaded_before)
        setattr(stages, plan.stage, getattr(stages, plan.stage) + elapsed_ms)

    def is_transient(self, attend_in: Blocks | None) -> bool:
        """Return whether a pass that attends there keeps its KV only if it is flushed."""
        return self.is_separate and attend_in is self.blocks

    def keep(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Keep the KV `[T, Hkv, D]` of the kept positions that a pass has computed at this layer.

        It goes into vLLM's blocks as well, where later slices attend.
        """
        if self.is_separate:
            block_ids = torch.tensor(self.job.block_ids)
            self.loader.forward.write(layer, k, v, self.loader.forward.slots(self.kept, block_ids))
            self._kept_kv.append((k, v))

    def put_kept(self, layer: int) -> None:
        """Put the kept positions' KV where the layer's is put together."""
        if self._kept_kv:
            self.blocks.put(layer, self.kept, *self._kept_kv[layer])

    def load(self, snapshot: Snapshot, layer: int, spans: Sequence[Span], *, flush: bool) -> None:
        """Write one layer of spans into the blocks of a job without a cached prefix; into vLLM's, if flushed."""
        with self.loader.device_copy.in_use():
            loaded = [self.loader.read(snapshot, layer, span) for span in spans]
            self.loader.fuse(layer, loaded, self.blocks, self.slots)
        for span in spans if flush else ():
            self.blocks.flush(layer, span.start, span.end)


class _Pass:
    """One pass: the forward over the plan's positions, and before each layer its load."""

    def __init__(self, filler: BlockFiller, plan: PassPlan, snapshot: Snapshot) -> None:
        self._filler, self._loader, self._plan, self._snapshot = filler, filler.loader, plan, snapshot
        self._forward, self._blocks = filler.loader.forward, filler.blocks
        self._num_layers, device = len(self._forward.layers), self._forward.device
        self._positions = plan.positions.to(device)
        self._slots = filler.slots.index_fill(0, self._positions, _NOT_WRITTEN)  # these are computed in the pass
        kept = plan.positions[:0] if plan.keep is None else plan.keep
        self._kept_rows = torch.searchsorted(plan.positions, kept).to(device)
        self._mean_shift = MeanShift(self._loader, plan.positions) if plan.shift else None
        num_computed = int(plan.positions[-1]) + 1 if len(plan.positions) else 0
        self._end = max([num_computed, *(span.end for span in plan.spans_at(0))])
        self._key_positions = self._find_key_positions() if plan.observe else self._positions  # for observers

    def run(self) -> None:
        plan = self._plan
        self._loader.stage(self._snapshot, plan.spans_at(self._num_layers - 1))
        if len(plan.positions):
            attend = None
            if plan.attend_in is not None:
                attend = selective(self._forward, self._loader.kernels, plan.attend_in, self._positions)
            self._forward.run([piece(self._filler.job, plan.positions)], self._before_layer, attend)
        else:  # everything is cached: there is nothing to run, only to write
            nothing = torch.empty(0, device=self._forward.device)
            for layer in range(self._num_layers):
                self._before_layer(layer, nothing, nothing, nothing)

    def _before_layer(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool | None:
        """Load the layer's spans, put the computed tokens' KV next to them, and show the whole to the observer.

        vLLM writes the computed tokens' KV only later, so it is put where our kernel and observers read.
        """
        with self._loader.device_copy.in_use():
            self._prefetch(layer + 1)
            begin = time.perf_counter()
            loaded = self._load(layer, k, v)
            if self._plan.flush:
                self._flush(layer)
            attend_in, observe = self._plan.attend_in, self._plan.observe
            if attend_in is not None and attend_in is not self._blocks:  # vLLM's, which a flush overwrites
                attend_in.put(layer, self._positions, k, v)
            if self._plan.keep is not None:
                self._filler.keep(layer, k[self._kept_rows], v[self._kept_rows])
            self._record_load(layer, begin)
            return observe(LayerView(layer, q, k, v, loaded, self._blocks, self._key_positions)) if observe else None

    def _prefetch(self, layer: int) -> None:
        """Have a layer's KV read from disk while the one before it is computed."""
        for span in self._plan.spans_at(layer) if layer < self._num_layers else ():
            self._loader.prefetch(self._snapshot, layer, span)

    def _load(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> list[LoadedSpan]:
        loaded = [self._loader.read(self._snapshot, layer, span) for span in self._plan.spans_at(layer)]
        shifts = self._mean_shift.shifts(loaded, k, v, self._loader.rotations[layer]) if self._mean_shift else None
        self._loader.fuse(layer, loaded, self._blocks, self._slots, shifts)
        if len(self._positions) and (self._plan.observe or self._plan.attend_in is self._blocks):
            self._blocks.put(layer, self._positions, k, v)
        if self._plan.keep is None:
            self._filler.put_kept(layer)
        return loaded

    def _flush(self, layer: int) -> None:
        """Copy the layer into vLLM's blocks: all of it, or the loaded spans where vLLM writes the rest."""
        first = self._filler.job.num_prefix
        if self._plan.attend_in is self._blocks:
            self._blocks.flush(layer, first, self._end)
            return
        for span in self._plan.spans_at(layer):
            self._blocks.flush(layer, max(span.start, first), span.end)

    def _record_load(self, layer: int, begin: float) -> None:
        stages, end = self._filler.report.stages, time.perf_counter()
        stages.load_ms += 1e3 * (end - begin)
        if stages.trace is not None:
            stages.trace.append((self._plan.stage, layer, begin, end))

    def _find_key_positions(self) -> torch.Tensor:
        positions = torch.arange(len(self._filler.job.token_ids))
        positions[~covered(len(positions), self._plan.positions, self._plan.spans_at(0))] = _UNKNOWN
        return positions.to(self._forward.device)


def piece(job: Job, positions: torch.Tensor) -> Piece:
    """Return the job's tokens at these positions, to compute."""
    return Piece(torch.tensor(job.token_ids)[positions], positions, torch.tensor(job.block_ids))
