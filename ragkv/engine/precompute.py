"""Precomputes chunks' KV at index time: once behind the anchor, or averaged over several contexts."""

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ragkv.engine.loader import BadSpanError, BlockFiller, Source, piece
from ragkv.engine.task import Job, MeanTask, PrecomputeTask, Report, Span
from ragkv.kernels.rotation import Rotation
from ragkv.store.record import LayerKV

logger = logging.getLogger(__name__)


class Precompute:
    """Turns jobs into records of the store. One for each worker; not thread-safe, like the model under it."""

    def __init__(self, source: Source) -> None:
        self._source, self._subset = source, source.subset

    def precompute(self, jobs: Sequence[Job]) -> None:
        """Prefill the jobs' prompts in one forward and store the KV of their spans, all in one transaction.

        Each span is computed behind what stands before it in its own prompt. Raises StoreError if there is no space.
        """
        pieces = [piece(job, torch.arange(len(job.token_ids))) for job in jobs]
        ends = torch.tensor([len(job.token_ids) for job in jobs]).cumsum(0).tolist()
        spans = [job.task.span for job in jobs if isinstance(job.task, PrecomputeTask)]
        chunk_layers: list[list[LayerKV]] = [[] for _ in jobs]

        def keep(_layer: int, _q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
            for layers, span, end in zip(chunk_layers, spans, ends, strict=True):
                rows = slice(end - (span.end - span.start), end)
                layers.append(LayerKV(_head_major(k[rows]), _head_major(v[rows]), span.start))

        self._subset.run(pieces, keep)
        self._source.store.put(zip(map(self._source.key, spans), chunk_layers, strict=True))

    def begin(self, job: Job, task: MeanTask) -> "Average":
        mean = _Mean(self._source.rotations, task.span.start, self._subset.dtype)
        return Average(job, task, mean, deque(task.others))

    def average(self, averages: Sequence["Average"]) -> list["Average"]:
        """Precompute each chunk behind the next of its contexts, all in one forward. Returns those that are complete.

        A context whose KV is no longer there is left out, and so is the average of a chunk whose own KV isn't. With
        fewer than two contexts the chunk's own KV counts too. Raises BadSpanError for the anchor's KV, and StoreError
        if there is no space.
        """
        unfinished = [average for average in averages if average.contexts]
        try:
            precomputed = self._precompute_after_contexts(unfinished) if unfinished else []
        except BadSpanError as error:
            concerned = [average for average in unfinished if average.contexts[0] == error.span]
            if not concerned:
                raise
            logger.warning("%s; left out of an average", error)
            for average in concerned:
                average.contexts.popleft()
            return []
        for average, layers in zip(unfinished, precomputed, strict=True):
            average.add(layers)
        complete = [average for average in averages if not average.contexts]
        for average in complete:
            if average.mean.count < 2:
                self._add_alone(average)
        made = [(self._source.key(a.task.span), a.mean.layers()) for a in complete if self._is_wanted(a)]
        if made:
            self._source.store.put(made)
        return complete

    def _is_wanted(self, average: "Average") -> bool:
        return average.mean.count > 0 and self._source.store.contains(self._source.key(average.task.alone))

    def _add_alone(self, average: "Average") -> None:
        alone, layers = average.task.alone, []
        try:
            with self._source.snapshot() as snapshot:
                for layer in range(len(self._subset.layers)):
                    with self._source.upload.within():
                        layers.append(self._source.read(snapshot, layer, alone).kv.map(torch.clone))
                self._source.check_still_there(snapshot, [alone])
        except BadSpanError as error:
            logger.warning("%s; left out of an average", error)
            self._source.discard_if_corrupt(error)
            return
        for layer, kv in enumerate(layers):
            average.mean.add(layer, *kv.decoded(), kv.base_position)
        average.mean.count += 1

    def _precompute_after_contexts(
        self, averages: Sequence["Average"]
    ) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
        """Each layer's K and V `[Hkv, T, D]` of each chunk, computed behind the anchor and its next context."""
        jobs = [average.behind_next() for average in averages]
        fills = [BlockFiller(self._source, job, Report()) for job in jobs]
        starts = [average.contexts[0].end for average in averages]
        positions = [torch.arange(start, len(job.token_ids)) for start, job in zip(starts, jobs, strict=True)]
        sizes = list(map(len, positions))
        precomputed: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in jobs]
        with self._source.snapshot() as snapshot:

            def before_layer(layer: int, _q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
                parts = zip(averages, fills, precomputed, torch.split(k, sizes), torch.split(v, sizes), strict=True)
                for average, fill, layers, k_part, v_part in parts:
                    for span in (average.task.anchor, average.contexts[0]):
                        fill.load(snapshot, layer, span)
                    layers.append((k_part.transpose(0, 1).clone(), v_part.transpose(0, 1).clone()))

            self._subset.run(list(map(piece, jobs, positions)), before_layer)
            self._source.check_still_there(snapshot, [s for a in averages for s in (a.task.anchor, a.contexts[0])])
        return precomputed


@dataclass(eq=False)
class Average:
    """A chunk's average in the making. contexts: what it is still to be precomputed behind, apart from the anchor."""

    job: Job
    task: MeanTask
    mean: "_Mean"
    contexts: deque[Span]
    num_computed: int = 0

    @property
    def num_tokens(self) -> int:
        """How many tokens its next precompute computes."""
        return self.task.span.end - self.task.span.start

    def behind_next(self) -> Job:
        """A prompt of the anchor, the next context and the chunk. The context's KV comes from the store, so it doesn't
        matter what its tokens are."""
        chunk = self.job.token_ids[self.task.span.start : self.task.span.end]
        return replace(self.job, token_ids=[*self.job.token_ids[: self.contexts[0].end], *chunk], num_prefix=0)

    def add(self, layers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        position = self.contexts.popleft().end
        for layer, (k, v) in enumerate(layers):
            self.mean.add(layer, k, v, position)
        self.mean.count += 1
        self.num_computed += self.num_tokens


class _Mean:
    """The mean of a chunk's contexts, keys moved to `position`. count: how many contexts all layers have."""

    def __init__(self, rotations: Sequence[Rotation | None], position: int, dtype: torch.dtype) -> None:
        self._rotations, self._position, self._dtype = rotations, position, dtype
        self._sums: list[list[torch.Tensor]] = []  # of k, v [Hkv, T, D] and ‖v‖² [T], float32
        self.count = 0

    def add(self, layer: int, k: torch.Tensor, v: torch.Tensor, position: int) -> None:
        rotation = self._rotations[layer]
        k = k.float() if rotation is None else rotation.rotate(k.float(), self._position - position)
        v = v.float()
        terms = [k, v, v.square().sum((0, 2))]
        if layer == len(self._sums):
            self._sums.append([term.clone() for term in terms])
        else:
            for total, term in zip(self._sums[layer], terms, strict=True):
                total += term

    def layers(self) -> list[LayerKV]:
        return [self._layer(*(total / self.count for total in sums)) for sums in self._sums]

    def _layer(self, k: torch.Tensor, v: torch.Tensor, square: torch.Tensor) -> LayerKV:
        v_std = (square - v.square().sum((0, 2))).clamp(min=0).sqrt()
        return LayerKV(k.to(self._dtype).cpu(), v.to(self._dtype).cpu(), self._position, v_std.cpu())


def _head_major(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1).contiguous().cpu()  # [Hkv, T, D]
