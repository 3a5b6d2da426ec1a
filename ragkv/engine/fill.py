"""Puts stored KV into a request's blocks, inside the forward passes over other tokens of the request.

A layer's KV is read, checked, rotated and written just before that layer attends, and dropped after it: no more than
one layer is held. Knows nothing about policies.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from ragkv.engine.job import Job, Report, Span
from ragkv.engine.subset import Piece, SubsetForward
from ragkv.errors import StoreError
from ragkv.kernels.rotation import Rotation
from ragkv.kernels.shift import shift_weights, shifted
from ragkv.store.base import KVStore, Snapshot
from ragkv.store.record import ChunkKey, CorruptRecordError, LayerKV

logger = logging.getLogger(__name__)


class BadSpanError(Exception):
    """A span whose KV turned out to be missing or damaged after the load had begun. is_corrupt: it is there, and of no
    use to anybody."""

    def __init__(self, span: Span, reason: str, *, is_corrupt: bool = False) -> None:
        super().__init__(f"chunk {span.chunk_hash}: {reason}")
        self.span, self.is_corrupt = span, is_corrupt


@dataclass(frozen=True)
class Loaded:
    """One layer of a span, for as long as that layer is being computed. keys: moved to the span's place, `[Hkv, T, D]`;
    kv: as stored."""

    span: Span
    keys: torch.Tensor
    kv: LayerKV


# Called before each layer attends, with q, k and v `[T, H, D]` of the tokens in the pass; True ends the pass.
See = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, list[Loaded]], bool | None]

# Recomputed tokens of a span: their offsets in it `[c]`, and their fresh K and V `[Hkv, c, D]`.
Taught = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Source:
    """Where a worker's chunk KV comes from, and how it is moved. rotations: one for each layer (`find_rotations`)."""

    def __init__(
        self, subset: SubsetForward, rotations: Sequence[Rotation | None], store: KVStore, fingerprint: str
    ) -> None:
        self.subset, self.rotations, self.store, self._fingerprint = subset, rotations, store, fingerprint

    def key(self, span: Span) -> ChunkKey:
        return ChunkKey(span.chunk_hash, span.anchor_hash, self._fingerprint, (0, self.subset.layers[0].num_kv_heads))

    def read(self, snapshot: Snapshot, layer: int, span: Span) -> Loaded:
        """One layer of a span, moved to its place. Raises BadSpanError unless it is there, verifies and fits."""
        try:
            kv = snapshot.get(self.key(span), layer)
        except CorruptRecordError as error:
            raise BadSpanError(span, f"layer {layer}: {error}", is_corrupt=True) from error
        if kv is None:
            raise BadSpanError(span, f"layer {layer} is missing")
        attention = self.subset.layers[layer]
        expected = (attention.num_kv_heads, span.end - span.start, attention.head_size)
        if tuple(kv.k.shape) != expected:
            reason = f"layer {layer} has shape {tuple(kv.k.shape)}, expected {expected}"
            raise BadSpanError(span, reason, is_corrupt=True)
        device, rotation = self.subset.device, self.rotations[layer]
        kv = LayerKV(kv.k.to(device), kv.v.to(device), kv.base_position, kv.spread)
        if rotation is None or span.start == kv.base_position:
            return Loaded(span, kv.k, kv)
        return Loaded(span, rotation.rotate(kv.k, span.start - kv.base_position), kv)

    def discard_if_corrupt(self, error: BadSpanError) -> None:
        """So that nobody reads it again, and it is captured anew."""
        if error.is_corrupt:
            try:
                self.store.discard(self.key(error.span))
            except StoreError as problem:
                logger.warning("bad KV stays in the store: %s", problem)

    def check_still_there(self, snapshot: Snapshot, spans: Iterable[Span]) -> None:
        """Raise BadSpanError if one of these spans was deleted or replaced since it was first read."""
        lost = set(snapshot.lost())
        for span in spans if lost else ():
            if self.key(span) in lost:
                raise BadSpanError(span, "was deleted while it was read")


class Fill:
    """The blocks of one request being filled."""

    def __init__(self, source: Source, job: Job, report: Report) -> None:
        self._source, self._subset, self._job, self._report = source, source.subset, job, report
        positions = torch.arange(len(job.token_ids))
        self._slots = self._subset.slots(positions, torch.tensor(job.block_ids)).to(self._subset.device)

    def run(
        self,
        positions: torch.Tensor,
        spans_at: Callable[[int], Sequence[Span]],
        see: See | None = None,
        *,
        shift: bool = False,
        stage: Literal["probe_ms", "recompute_ms"] = "recompute_ms",
    ) -> None:
        """Compute `positions`, loading `spans_at(layer)` just before each layer attends.

        shift: what the tokens computed here teach about a loaded span is carried over to the span's other tokens.
        Time goes to the report's `stage`, apart from the load's. Raises BadSpanError, with some layers written.
        """
        begin, loaded_before = time.perf_counter(), self._report.load_ms
        taught = _taught_by(positions, self._subset.device) if shift else None
        with self._source.store.snapshot() as snapshot:

            def before_layer(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool | None:
                if layer + 1 < len(self._subset.layers):  # is read while this one is computed
                    for span in spans_at(layer + 1):
                        snapshot.prefetch(self._source.key(span), layer + 1)
                load_begin = time.perf_counter()
                loaded = [self.load(snapshot, layer, s, taught(s, k, v) if taught else None) for s in spans_at(layer)]
                if self._report.trace is not None:
                    self._report.trace.append((stage, layer, load_begin, time.perf_counter()))
                return see(layer, q, k, v, loaded) if see else None

            if len(positions):
                self._subset.run([piece(self._job, positions)], before_layer)
            else:  # everything is cached: there is nothing to run, only to write
                nothing = torch.empty(0, device=self._subset.device)
                for layer in range(len(self._subset.layers)):
                    before_layer(layer, nothing, nothing, nothing)
            self._source.check_still_there(snapshot, spans_at(len(self._subset.layers) - 1))
        elapsed_ms = 1e3 * (time.perf_counter() - begin) - (self._report.load_ms - loaded_before)
        setattr(self._report, stage, getattr(self._report, stage) + elapsed_ms)

    def load(
        self,
        snapshot: Snapshot,
        layer: int,
        span: Span,
        taught: Taught | None = None,
    ) -> Loaded:
        """Write one layer of a span into the blocks, shifted by what its recomputed tokens have `taught`."""
        begin = time.perf_counter()
        loaded = self._source.read(snapshot, layer, span)
        k, v = loaded.keys, loaded.kv.v
        if taught is not None and len(taught[0]):
            offsets, fresh_k, fresh_v = taught
            weights = shift_weights(loaded.kv.spread, offsets, k.shape[1])
            k, v = shifted(k, v, fresh_k, fresh_v, offsets, weights, span.start, self._source.rotations[layer])
        first = max(0, self._job.num_prefix - span.start)  # what vLLM's prefix cache has must not be written
        if first < span.end - span.start:
            self._subset.write(layer, k[:, first:], v[:, first:], self._slots[span.start + first : span.end])
        self._report.load_ms += 1e3 * (time.perf_counter() - begin)
        return loaded


def rows_in(positions: torch.Tensor, span: Span) -> torch.Tensor:
    """Which of these positions `[T]` lie in the span."""
    return ((positions >= span.start) & (positions < span.end)).nonzero().flatten()


def _taught_by(positions: torch.Tensor, device: torch.device) -> Callable[[Span, torch.Tensor, torch.Tensor], Taught]:
    """From K and V `[T, Hkv, D]` of a pass over `positions`, those of the tokens that lie in a span."""
    span_to_rows: dict[Span, tuple[torch.Tensor, torch.Tensor]] = {}

    def taught(span: Span, k: torch.Tensor, v: torch.Tensor) -> Taught:
        if span not in span_to_rows:
            inside = rows_in(positions, span)
            span_to_rows[span] = (inside.to(device), (positions[inside] - span.start).to(device))
        rows, offsets = span_to_rows[span]
        return offsets, k[rows].transpose(0, 1), v[rows].transpose(0, 1)

    return taught


def piece(job: Job, positions: torch.Tensor) -> Piece:
    return Piece(torch.tensor(job.token_ids)[positions], positions, torch.tensor(job.block_ids))
