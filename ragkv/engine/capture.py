"""Captures chunks' KV at index time: once behind the anchor, or averaged over several contexts."""

import logging
from collections.abc import Generator, Sequence

import torch

from ragkv.engine.fill import BadSpanError, Fill, Loaded, Source, piece
from ragkv.engine.job import AverageTask, CaptureTask, Job, Report, Span
from ragkv.kernels.rotation import Rotation
from ragkv.store.record import LayerKV

logger = logging.getLogger(__name__)


class Capture:
    """Turns jobs into records of the store. One for each worker; not thread-safe, like the model under it."""

    def __init__(self, source: Source) -> None:
        self._source, self._subset = source, source.subset

    def capture(self, jobs: Sequence[Job]) -> None:
        """Prefill the jobs' prompts in one forward and store the KV of their spans, all in one transaction.

        Each span is computed behind what stands before it in its own prompt. Raises StoreError if there is no space.
        """
        pieces = [piece(job, torch.arange(len(job.token_ids))) for job in jobs]
        ends = torch.tensor([len(job.token_ids) for job in jobs]).cumsum(0).tolist()
        spans = [job.task.span for job in jobs if isinstance(job.task, CaptureTask)]
        chunk_layers: list[list[LayerKV]] = [[] for _ in jobs]

        def keep(_layer: int, _q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
            for layers, span, end in zip(chunk_layers, spans, ends, strict=True):
                rows = slice(end - (span.end - span.start), end)
                layers.append(LayerKV(_head_major(k[rows]), _head_major(v[rows]), span.start))

        self._subset.run(pieces, keep)
        self._source.store.put(zip(map(self._source.key, spans), chunk_layers, strict=True))

    def average(self, job: Job) -> Generator[None, None, Report]:
        """Capture the chunk behind the anchor and each other chunk, and store the mean; yields between captures.

        Another chunk whose KV is no longer there is left out. Raises BadSpanError for the chunk's own or the anchor's.
        """
        task = job.task
        assert isinstance(task, AverageTask)
        report = Report(policy="average")
        mean = _Mean(self._source.rotations, task.span.start)
        with self._source.store.snapshot() as snapshot:
            for layer in range(len(self._subset.layers)):
                kv = self._source.read(snapshot, layer, task.alone).kv
                mean.add(layer, kv.k, kv.v, task.alone.start)
        mean.count = 1
        for other in task.others:
            yield
            try:
                captured = self._capture_behind(job, task, other, report)
            except BadSpanError as error:
                if error.span == task.anchor:
                    raise
                logger.warning("%s; left out of an average", error)
                continue
            for layer, (k, v) in enumerate(captured):
                mean.add(layer, k, v, other.end)
            mean.count += 1
        self._source.store.put([(self._source.key(task.span), mean.layers())])
        return report

    def _capture_behind(
        self, job: Job, task: AverageTask, other: Span, report: Report
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each layer's K and V `[Hkv, T, D]` of the chunk, computed behind the anchor and one other chunk."""
        chunk = job.token_ids[task.span.start : task.span.end]
        behind = Job(job.request_id, task, [*job.token_ids[: other.end], *chunk], job.block_ids, num_prefix=0)
        captured: list[tuple[torch.Tensor, torch.Tensor]] = []

        def keep(_layer: int, _q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _loaded: list[Loaded]) -> None:
            captured.append((k.transpose(0, 1).clone(), v.transpose(0, 1).clone()))

        positions = torch.arange(other.end, other.end + len(chunk))
        Fill(self._source, behind, report).run(positions, lambda _layer: (task.anchor, other), keep)
        report.recomputed_tokens += len(chunk)
        return captured


class _Mean:
    """The mean of a chunk's captures, keys moved to `position`. count: how many captures all layers have."""

    def __init__(self, rotations: Sequence[Rotation | None], position: int) -> None:
        self._rotations, self._position = rotations, position
        self._sums: list[list[torch.Tensor]] = []  # of k, v [Hkv, T, D] and ‖v‖² [T], float32
        self._dtype = torch.float32
        self.count = 0

    def add(self, layer: int, k: torch.Tensor, v: torch.Tensor, position: int) -> None:
        self._dtype = v.dtype
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
        spread = (square - v.square().sum((0, 2))).clamp(min=0).sqrt()
        return LayerKV(k.to(self._dtype).cpu(), v.to(self._dtype).cpu(), self._position, spread.cpu())


def _head_major(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1).contiguous().cpu()  # [Hkv, T, D]
