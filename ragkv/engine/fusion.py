"""Fuses chunks' KV into a request's paged cache, and captures it at index time.

The life of a fused request, in order: load every cached chunk's KV, layer by layer, inside the forward that runs the
tokens without cached KV (the question above all); let the question vote for cached tokens in passing; recompute those.
"""

import logging
import time
from collections.abc import Callable, Generator, Sequence

import torch

from ragkv.engine.job import CaptureTask, FuseTask, Job, Report, Span
from ragkv.engine.subset import Piece, SubsetForward
from ragkv.kernels.query_scores import query_scores
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
        self._first_voter = len(subset.layers) // 3

    def key(self, span: Span) -> ChunkKey:
        return ChunkKey(span.chunk_hash, span.anchor_hash, self.fingerprint, self._heads)

    def capture(self, jobs: Sequence[Job]) -> None:
        """Prefill the jobs' prompts in one forward and store the KV of their spans, all in one transaction.

        Each span is computed behind what stands before it in its own prompt. Raises StoreError if there is no space.
        """
        pieces = [_piece(job, torch.arange(len(job.token_ids))) for job in jobs]
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
        spans = list(job.task.spans)
        while True:
            present = [span for span in spans if self.store.contains(self.key(span))]
            report.missing_chunks = len(job.task.spans) - len(present)
            try:
                yield from self._fuse_present(job, present, job.task.policy, slice_tokens, report)
                break
            except _BadSpanError as error:
                spans = [span for span in present if span != error.span]
                report.corrupt_chunks += 1
                logger.warning("%s; computed anew", error)
        if report.missing_chunks:
            report.problem = f"{report.missing_chunks} chunks had no usable KV in the store"
        return report

    def _fuse_present(
        self, job: Job, spans: list[Span], policy: Policy, slice_tokens: Callable[[], int], report: Report
    ) -> Generator[None, None, None]:
        num_tokens = len(job.token_ids)
        positions = torch.arange(num_tokens)
        cached = torch.zeros(num_tokens, dtype=torch.bool)
        for span in spans:
            cached[span.start : span.end] = True
        writable = positions >= job.num_prefix
        uncached = positions[~cached & writable]
        # Two passes over the uncached tokens cost more than one over everything once they are half of it.
        if policy.probes and 2 * len(uncached) >= num_tokens - job.num_prefix:
            policy = Policy("full")
        report.policy = policy.label
        chosen = positions[:0]
        if policy.name == "full" or not spans:
            selected = positions[writable]
        else:
            votes = self._load(job, spans, uncached, policy.probes, report)
            if policy.probes:
                eligible = cached.clone()
                eligible[: _exact_until(spans)] = False
                chosen = top_voted(votes, eligible, int(policy.budget * int(cached.sum())))
                chosen = chosen[chosen >= job.num_prefix]
            selected = torch.cat([uncached, chosen]).sort().values if len(chosen) else positions[:0]
        report.recomputed_tokens = (
            len(uncached) + len(chosen) if len(spans) and policy.name != "full" else len(selected)
        )
        report.reused_tokens = num_tokens - job.num_prefix - report.recomputed_tokens
        yield from self._recompute(job, selected, slice_tokens, report)
        report.recomputed_positions = chosen.tolist()

    def _load(self, job: Job, spans: list[Span], uncached: torch.Tensor, probe: bool, report: Report) -> torch.Tensor:
        """Put the spans' KV into the request's blocks, and compute the uncached tokens over it, in one pass.

        Loading is part of the forward: a layer's KV is read, checked, rotated and written just before that layer
        attends, and dropped after it. Returns the votes `[N]` of the uncached tokens behind the last span.
        """
        votes = torch.zeros(len(job.token_ids))
        cached_positions = torch.cat([torch.arange(span.start, span.end) for span in spans])
        voters = uncached > spans[-1].end - 1
        block_ids = torch.tensor(job.block_ids)
        begin, load_s = time.perf_counter(), 0.0
        with self.store.snapshot() as snapshot:

            def load_layer(layer: int, q: torch.Tensor, k: torch.Tensor, _v: torch.Tensor) -> None:
                nonlocal load_s
                at = time.perf_counter()
                voting = probe and layer >= self._first_voter and bool(voters.any())
                keys = self._write_layer(snapshot, layer, spans, block_ids, job.num_prefix, voting)
                load_s += time.perf_counter() - at
                if voting:
                    attention = self.subset.layers[layer]
                    visible = torch.cat([*keys, k.transpose(0, 1)], dim=1)
                    scores = query_scores(
                        q[voters],
                        visible,
                        uncached[voters],
                        torch.cat([cached_positions, uncached]),
                        attention.impl.scale,
                        getattr(attention.impl, "logits_soft_cap", None) or 0.0,
                        attention.sliding_window,
                    )
                    votes[cached_positions] += scores[: len(cached_positions)].cpu()

            if len(uncached):
                self.subset.run([_piece(job, uncached)], load_layer)
            else:  # everything is cached: there is nothing to run, only to write
                for layer in range(len(self.subset.layers)):
                    self._write_layer(snapshot, layer, spans, block_ids, job.num_prefix, keep_keys=False)
        report.load_ms += 1e3 * load_s
        report.probe_ms += 1e3 * (time.perf_counter() - begin - load_s)
        return votes

    def _write_layer(
        self,
        snapshot: Snapshot,
        layer: int,
        spans: list[Span],
        block_ids: torch.Tensor,
        num_prefix: int,
        keep_keys: bool,
    ) -> list[torch.Tensor]:
        """Write one layer of all spans. Returns their keys `[Hkv, T, D]`, moved to their positions, if asked."""
        keys, rotation = [], self.rotations[layer]
        shape = (self.subset.layers[layer].num_kv_heads, self.subset.layers[layer].head_size)
        for span in spans:
            if span.end <= num_prefix and not keep_keys:
                continue
            kv = self._read(snapshot, layer, span, shape)
            k = rotation.shift(kv.k, span.start - kv.base_position) if rotation else kv.k
            if span.end > num_prefix:
                first = max(span.start, num_prefix)
                slots = self.subset.slots(torch.arange(first, span.end), block_ids).to(self.subset.device)
                self.subset.write(layer, k[:, first - span.start :], kv.v[:, first - span.start :], slots)
            if keep_keys:
                keys.append(k)
        return keys

    def _read(self, snapshot: Snapshot, layer: int, span: Span, shape: tuple[int, int]) -> LayerKV:
        try:
            kv = snapshot.get(self.key(span), layer)
        except CorruptRecordError as error:
            raise _BadSpanError(span, f"layer {layer}: {error}") from error
        if kv is None:
            raise _BadSpanError(span, f"layer {layer} is missing")
        expected = (shape[0], span.end - span.start, shape[1])
        if tuple(kv.k.shape) != expected:
            raise _BadSpanError(span, f"layer {layer} has shape {tuple(kv.k.shape)}, expected {expected}")
        device = self.subset.device
        return kv if device.type == "cpu" else LayerKV(kv.k.to(device), kv.v.to(device), kv.base_position)

    def _recompute(
        self, job: Job, selected: torch.Tensor, slice_tokens: Callable[[], int], report: Report
    ) -> Generator[None, None, None]:
        """Slices in order of position, each over the KV that the earlier ones left: exact, like chunked prefill."""
        done = 0
        while done < len(selected):
            if done:
                yield
            begin = time.perf_counter()
            part = selected[done : done + slice_tokens()]
            self.subset.run([_piece(job, part)])
            done += len(part)
            report.recompute_ms += 1e3 * (time.perf_counter() - begin)


def _piece(job: Job, positions: torch.Tensor) -> Piece:
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
