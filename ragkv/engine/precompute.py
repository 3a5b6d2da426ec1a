"""Precomputes chunks' KV at index time: once after the anchor, or averaged over several contexts."""

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from ragkv.engine.blocks import pays, selective
from ragkv.engine.filler import BlockFiller, piece
from ragkv.engine.forward import Attend
from ragkv.engine.loader import BadSpanError, KVLoader
from ragkv.engine.task import Job, MeanTask, PrecomputeTask, Report, Span
from ragkv.store.difference import Difference, differences
from ragkv.store.record import LayerKV

logger = logging.getLogger(__name__)


class Precompute:
    """Turns jobs into records of the store. One for each worker; not thread-safe, like the model under it."""

    def __init__(self, loader: KVLoader) -> None:
        self._loader, self._forward = loader, loader.forward

    def precompute(self, jobs: Sequence[Job]) -> None:
        """Prefill the jobs' prompts in one forward and store the KV of their spans, all in one transaction.

        Each span is computed after what precedes it in its own prompt. Raises StoreError if there is no space.
        """
        pieces = [piece(job, torch.arange(len(job.token_ids))) for job in jobs]
        ends = torch.tensor([len(job.token_ids) for job in jobs]).cumsum(0).tolist()
        spans = [job.task.span for job in jobs if isinstance(job.task, PrecomputeTask)]
        chunk_layers: list[list[LayerKV]] = [[] for _ in jobs]

        def keep(_layer: int, _q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
            for layers, span, end in zip(chunk_layers, spans, ends, strict=True):
                rows = slice(end - (span.end - span.start), end)
                layers.append(LayerKV(_head_major(k[rows]), _head_major(v[rows]), span.start))

        self._forward.run(pieces, keep)
        self._loader.store.put(zip(map(self._loader.key, spans), chunk_layers, strict=True))

    def average(self, averages: Sequence["Average"]) -> list["Average"]:
        """Precompute each chunk after the next of its contexts, all in one forward. Returns those that are complete.

        A context whose KV the store no longer has is left out, and so is the average of a chunk whose own KV it hasn't.
        With fewer than two contexts the chunk's own KV counts too. Raises BadSpanError for the anchor's KV, and
        StoreError if there is no space.
        """
        unfinished = [average for average in averages if average.contexts]
        try:
            precomputed = self._precompute_after_contexts(unfinished) if unfinished else []
        except BadSpanError as error:
            affected = [average for average in unfinished if error.span in average.contexts[0]]
            if not affected:
                raise
            logger.warning("%s; left out of an average", error)
            for average in affected:
                average.contexts.popleft()
            return []
        for average, layers in zip(unfinished, precomputed, strict=True):
            average.add(layers, average.contexts.popleft()[-1].end)
            average.num_computed += average.num_tokens
        complete = [average for average in averages if not average.contexts]
        for average in complete:
            alone = self._alone(average.task.alone) if average.count < 2 or average.task.joins else None
            if alone is not None and average.count < 2:
                average.add((kv.decoded() for kv in alone), alone[0].base_position)
            if alone is not None and average.task.joins:
                average.join([kv.decoded() for kv in alone])
        made = [average for average in complete if self._is_usable(average)]
        if made:
            store, key = self._loader.store, self._loader.key
            store.put([(key(average.task.span), average.layers()) for average in made])
            store.delete_keys(key(average.task.alone) for average in made if average.task.joins)
        return complete

    def _is_usable(self, average: "Average") -> bool:
        """Return whether the mean can be stored: a chunk that was deleted meanwhile stays deleted."""
        is_whole = average.count > 0 and average.is_joined == average.task.joins
        return is_whole and self._loader.has(average.task.alone)

    def _alone(self, alone: Span) -> list[LayerKV] | None:
        """Return all layers of a chunk's KV directly after the anchor, None if the store hasn't got it."""
        layers = []
        try:
            with self._loader.snapshot() as snapshot:
                for layer in range(len(self._forward.layers)):
                    with self._loader.device_copy.in_use():
                        layers.append(self._loader.read(snapshot, layer, alone).kv.map(torch.clone))
        except BadSpanError as error:
            logger.warning("%s; left out of an average", error)
            self._loader.discard_if_corrupt(error)
            return None
        return layers

    def _precompute_after_contexts(
        self, averages: Sequence["Average"]
    ) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
        """Return each chunk's layers of K and V `[Hkv, T, D]`, computed after the anchor and its next context."""
        jobs = [average.next_job() for average in averages]
        fillers = [BlockFiller(self._loader, job, Report()) for job in jobs]
        starts = [average.contexts[0][-1].end for average in averages]
        positions = [torch.arange(start, len(job.token_ids)) for start, job in zip(starts, jobs, strict=True)]
        sizes = list(map(len, positions))
        precomputed: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in jobs]
        attend = self._attention(fillers, positions)
        with self._loader.snapshot() as snapshot:

            def before_layer(layer: int, _q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
                parts = zip(torch.split(k, sizes), torch.split(v, sizes), strict=True)
                for i, (k_part, v_part) in enumerate(parts):
                    spans = (averages[i].task.anchor, *averages[i].contexts[0])
                    fillers[i].load(snapshot, layer, spans, flush=attend is None)
                    if attend is not None:
                        fillers[i].blocks.put(layer, positions[i], k_part, v_part)
                    precomputed[i].append((k_part.transpose(0, 1).clone(), v_part.transpose(0, 1).clone()))

            self._forward.run(list(map(piece, jobs, positions)), before_layer, attend)
        return precomputed

    def _attention(self, fillers: Sequence[BlockFiller], positions: Sequence[torch.Tensor]) -> Attend | None:
        """Return the attention of all these positions by our kernel, each filler's over its own blocks.

        None where vLLM's own is used: our kernel is the faster one on CPU, over contexts that lie in order.
        """
        forward, kernels = self._loader.forward, self._loader.kernels
        parts = list(zip(fillers, positions, strict=True))
        if not self._loader.can_attend or not all(f.is_separate and pays(kernels, where) for f, where in parts):
            return None
        attends = [selective(forward, kernels, f.blocks, where.to(forward.device)) for f, where in parts]
        sizes = list(map(len, positions))

        def attend(layer: int, q: torch.Tensor) -> torch.Tensor:
            return torch.cat([each(layer, part) for each, part in zip(attends, torch.split(q, sizes), strict=True)])

        return attend


class Average:
    """A chunk's mean KV over contexts in the making, keys rotated to the position of the task's span.

    contexts: the chunks that it is still to be precomputed behind. count: in how many contexts it has been counted.
    num_computed: how many tokens have been computed for it.
    """

    def __init__(self, loader: KVLoader, job: Job) -> None:
        assert isinstance(job.task, MeanTask)
        self.job, self.task = job, job.task
        self.contexts = deque(self.task.contexts)
        self.count = self.num_computed = 0
        self._rotations, self._dtype = loader.rotations, loader.forward.dtype
        self._share = loader.store.codec.share
        self._sums: list[list[torch.Tensor]] = []  # of k, v [Hkv, T, D] and ‖v‖² [T], float32
        self._differences: list[Difference | None] = []

    @property
    def num_tokens(self) -> int:
        """How many tokens have to be computed for each of its contexts."""
        return self.task.span.end - self.task.span.start

    def next_job(self) -> Job:
        """Return a job for the anchor, the next context and the chunk.

        The context's KV comes from the store, so it doesn't matter what its tokens are.
        """
        chunk = self.job.token_ids[self.task.span.start : self.task.span.end]
        return replace(self.job, token_ids=[*self.job.token_ids[: self.contexts[0][-1].end], *chunk], num_prefix=0)

    def add(self, layers: Iterable[tuple[torch.Tensor, torch.Tensor]], position: int) -> None:
        """Count the chunk's K and V `[Hkv, T, D]`, layer by layer, computed from `position` on. Keeps these tensors."""
        for layer, (k, v) in enumerate(layers):
            rotation, k, v = self._rotations[layer], k.float(), v.float()
            k = k if rotation is None else rotation.rotate(k, self.task.span.start - position)
            terms = [k, v, v.square().sum((0, 2))]
            if self.count:
                for total, term in zip(self._sums[layer], terms, strict=True):
                    total += term
            else:
                self._sums.append(terms)
        self.count += 1

    def join(self, alone: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Give the mean, once all contexts are counted, the difference of K and V `[Hkv, T, D]` after the anchor alone,
        layer by layer."""
        means = [(k / self.count, v / self.count) for k, v, _ in self._sums]
        self._differences = differences(alone, means, self._share)

    @property
    def is_joined(self) -> bool:
        return bool(self._differences)

    def layers(self) -> list[LayerKV]:
        """Return the mean of each layer, on the host."""
        layers = []
        for sums, difference in zip(self._sums, self._differences or [None] * len(self._sums), strict=True):
            k, v, square = (total / self.count for total in sums)
            v_std = (square - v.square().sum((0, 2))).clamp(min=0).sqrt()
            kv = LayerKV(k.to(self._dtype), v.to(self._dtype), self.task.span.start, v_std, difference=difference)
            layers.append(kv.map(torch.Tensor.cpu))
        return layers


def _head_major(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1).contiguous().cpu()  # [Hkv, T, D]
