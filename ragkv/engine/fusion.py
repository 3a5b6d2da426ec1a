"""Fuses chunks' KV into a request's paged cache, and captures it at index time.

The life of a fused request, in order: load every cached chunk's KV, layer by layer, inside the forward that runs the
tokens without cached KV (the question above all); let the question vote for cached tokens in passing; recompute those.
"""

import logging
import time
from collections.abc import Callable, Generator, Sequence
from functools import partial

import torch

from ragkv.engine.job import CaptureTask, FuseTask, Job, Report, Span
from ragkv.engine.subset import Piece, SubsetForward
from ragkv.kernels.query_scores import query_scores, visibility
from ragkv.kernels.rotation import Rotation
from ragkv.policies import Policy, top_voted
from ragkv.store.base import KVStore, Snapshot
from ragkv.store.record import ChunkKey, CorruptRecordError, LayerKV

logger = logging.getLogger(__name__)


class _BadSpanError(Exception):
    """A span whose KV turned out to be missing or damaged after the load had begun."""

    def __init__(self, span: Span, reason: str) -> None:
        super().__init__(f"chunk {span.chunk_hash}: {reason}")
        self.span = span


class Fusion:
    """Turns jobs into filled blocks. One for each worker; not thread-safe, like the model under it."""

    def __init__(
        self, subset: SubsetForward, rotations: Sequence[Rotation | None], store: KVStore, fingerprint: str
    ) -> None:
        self.subset, self.rotations, self.store, self.fingerprint = subset, rotations, store, fingerprint
        heads = subset.layers[0].num_kv_heads
        self._heads = (0, heads)

    def key(self, span: Span) -> ChunkKey:
        return ChunkKey(span.chunk_hash, span.anchor_hash, self.fingerprint, self._heads)

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

        self.subset.run(pieces, keep)
        self.store.put(zip(map(self.key, spans), chunk_layers, strict=True))

    def fuse(self, job: Job, slice_tokens: Callable[[], int]) -> Generator[None, None, Report]:
        """Fill the job's blocks; yields between slices of at most `slice_tokens()` tokens, returns the report.

        A chunk whose KV is missing or damaged is computed like any other text: that costs time, not correctness.
        """
        assert isinstance(job.task, FuseTask)
        report = Report(prefix_tokens=job.num_prefix)
        wanted = job.task.spans if job.task.policy.name != "full" else ()
        present = [span for span in wanted if self.store.contains(self.key(span))]
        report.missing_chunks = len(wanted) - len(present)
        while True:
            try:
                yield from self._fuse_present(job, present, job.task.policy, slice_tokens, report)
                break
            except _BadSpanError as error:
                present = [span for span in present if span != error.span]
                report.corrupt_chunks += 1
                logger.warning("%s; computed anew", error)
        num_unusable = report.missing_chunks + report.corrupt_chunks
        if num_unusable:
            report.problem = f"{num_unusable} of {len(job.task.spans)} chunks had no usable KV in the store"
        elif report.policy != job.task.policy.label:
            report.problem = "less than half of the prompt is cached"
        return report

    def read(self, snapshot: Snapshot, layer: int, span: Span) -> LayerKV:
        """One layer of a span. Raises _BadSpanError unless it is there, verifies and fits."""
        try:
            kv = snapshot.get(self.key(span), layer)
        except CorruptRecordError as error:
            raise _BadSpanError(span, f"layer {layer}: {error}") from error
        if kv is None:
            raise _BadSpanError(span, f"layer {layer} is missing")
        attention = self.subset.layers[layer]
        expected = (attention.num_kv_heads, span.end - span.start, attention.head_size)
        if tuple(kv.k.shape) != expected:
            raise _BadSpanError(span, f"layer {layer} has shape {tuple(kv.k.shape)}, expected {expected}")
        return kv

    def _fuse_present(
        self, job: Job, spans: list[Span], policy: Policy, slice_tokens: Callable[[], int], report: Report
    ) -> Generator[None, None, None]:
        positions = torch.arange(len(job.token_ids))
        cached = torch.zeros(len(positions), dtype=torch.bool)
        for span in spans:
            cached[span.start : span.end] = True
        writable = positions >= job.num_prefix
        uncached = positions[~cached & writable]
        # Two passes over the uncached tokens cost more than one over everything once they are half of it.
        if policy.probes and 2 * len(uncached) >= int(writable.sum()):
            policy = Policy("full")
        report.policy = policy.label
        if policy.name == "full" or not spans:
            report.recomputed_tokens, report.reused_tokens = int(writable.sum()), 0
            yield from self._recompute(job, positions[writable], None, slice_tokens, report)
            return
        load = _Load(self, job, spans, uncached, policy.probes, report)
        load.run()
        chosen = positions[:0]
        if policy.probes:
            eligible = cached.clone()
            eligible[: _exact_until(spans)] = False
            chosen = top_voted(load.votes, eligible, int(policy.budget * int(cached.sum())))
            chosen = chosen[chosen >= job.num_prefix]
        report.recomputed_tokens = len(uncached) + len(chosen)
        report.reused_tokens = int(writable.sum()) - report.recomputed_tokens
        if policy.probes:
            selected = torch.cat([uncached, chosen]).sort().values
            yield from self._recompute(job, selected, load, slice_tokens, report)

    def _recompute(
        self, job: Job, selected: torch.Tensor, load: "_Load | None", slice_tokens: Callable[[], int], report: Report
    ) -> Generator[None, None, None]:
        """Slices in order of position, each over the KV that the earlier ones left: exact, like chunked prefill.

        The first one loads the layers that the probe didn't reach.
        """
        done = 0
        while done < len(selected):
            if done:
                yield
            part = selected[done : done + slice_tokens()]
            if load is not None and done == 0:
                load.finish(part)
            else:
                begin = time.perf_counter()
                self.subset.run([piece(job, part)])
                report.recompute_ms += 1e3 * (time.perf_counter() - begin)
            done += len(part)


class _Load:
    """Puts the spans' KV into a request's blocks, as part of the forward passes over other tokens of the request.

    A layer's KV is read, checked, rotated and written just before that layer attends, and dropped after it: no more
    than one layer is held. The first pass runs the uncached tokens, the question above all; when it probes, the layers
    from L/3 to 2L/3 vote, and it stops there: `finish` loads the rest in the next pass.
    """

    def __init__(
        self, fusion: Fusion, job: Job, spans: list[Span], uncached: torch.Tensor, probes: bool, report: Report
    ) -> None:
        self._fusion, self._subset, self._job, self._spans = fusion, fusion.subset, job, spans
        self._uncached, self._report = uncached, report
        num_layers = len(self._subset.layers)
        voters = uncached >= spans[-1].end
        self._voters = voters.nonzero().flatten() if probes else uncached[:0]
        self._voting_layers = range(num_layers // 3, 2 * num_layers // 3 or 1) if len(self._voters) else range(0)
        self._first_pass = range(self._voting_layers.stop if len(self._voters) else num_layers)
        self.votes = torch.zeros(len(job.token_ids))
        self._prepare()

    def _prepare(self) -> None:
        """What is the same in every layer: positions, slots, and what the voters can't see."""
        self._positions = torch.cat([torch.arange(span.start, span.end) for span in self._spans])
        slots = self._subset.slots(self._positions, torch.tensor(self._job.block_ids))
        self._slots = slots.to(self._subset.device)
        self._hidden: dict[int | None, torch.Tensor | None] = {}

    def run(self) -> None:
        """The first pass: afterwards the votes are in, and without a probe everything is loaded and computed."""
        begin, loaded_before = time.perf_counter(), self._report.load_ms
        with self._fusion.store.snapshot() as snapshot:
            if len(self._uncached):
                hook = partial(self._before_layer, snapshot, self._first_pass)
                self._subset.run([piece(self._job, self._uncached)], hook, stop_at=self._first_pass.stop)
            else:  # everything is cached: there is nothing to run, only to write
                for layer in self._first_pass:
                    self._write(snapshot, layer)
        self._report.probe_ms += 1e3 * (time.perf_counter() - begin) - (self._report.load_ms - loaded_before)

    def finish(self, selected: torch.Tensor) -> None:
        """Run `selected` positions, loading the layers that the first pass didn't reach."""
        begin, loaded_before = time.perf_counter(), self._report.load_ms
        rest = range(self._first_pass.stop, len(self._subset.layers))
        with self._fusion.store.snapshot() as snapshot:
            self._subset.run([piece(self._job, selected)], partial(self._before_layer, snapshot, rest))
        self._report.recompute_ms += 1e3 * (time.perf_counter() - begin) - (self._report.load_ms - loaded_before)

    def _before_layer(
        self, snapshot: Snapshot, layers: range, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        if layer not in layers:
            return
        keys = self._write(snapshot, layer)
        if layer in self._voting_layers:
            self._vote(layer, q, torch.cat([*keys, k.transpose(0, 1)], dim=1))

    def _vote(self, layer: int, q: torch.Tensor, keys: torch.Tensor) -> None:
        attention = self._subset.layers[layer]
        window = attention.sliding_window
        if window not in self._hidden:
            seen = torch.cat([self._positions, self._uncached])
            hidden = visibility(self._uncached[self._voters], seen, window)
            self._hidden[window] = hidden if hidden is None else hidden.to(self._subset.device)
        soft_cap = getattr(attention.impl, "logits_soft_cap", None) or 0.0
        scores = query_scores(q[self._voters], keys, self._hidden[window], attention.impl.scale, soft_cap)
        self.votes[self._positions] += scores[: len(self._positions)].cpu()

    def _write(self, snapshot: Snapshot, layer: int) -> list[torch.Tensor]:
        """Write one layer of all spans into the blocks. Returns their keys `[Hkv, T, D]`, moved to their positions."""
        begin = time.perf_counter()
        rotation, keys, end = self._fusion.rotations[layer], [], 0
        for span in self._spans:
            kv = self._fusion.read(snapshot, layer, span)
            start, end = end, end + span.end - span.start
            k, v = kv.k.to(self._subset.device), kv.v.to(self._subset.device)
            if rotation is not None and span.start != kv.base_position:
                k = rotation.rotate(k, span.start - kv.base_position)
            first = max(0, self._job.num_prefix - span.start)
            if first < span.end - span.start:
                self._subset.write(layer, k[:, first:], v[:, first:], self._slots[start + first : end])
            keys.append(k)
        self._report.load_ms += 1e3 * (time.perf_counter() - begin)
        return keys


def piece(job: Job, positions: torch.Tensor) -> Piece:
    return Piece(torch.tensor(job.token_ids)[positions], positions, torch.tensor(job.block_ids))


def _head_major(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1).contiguous().cpu()  # [Hkv, T, D]


def _exact_until(spans: list[Span]) -> int:
    """Where exactness ends: the KV of the anchor, and of a chunk directly behind it, is what prefill would compute."""
    end = 0
    for span in spans[:2]:
        if span.start == end:
            end = span.end
    return end
