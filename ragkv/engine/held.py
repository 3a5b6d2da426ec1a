"""Requests that vLLM preempts, the worker's side: copies of their blocks, until they come back."""

import logging
import time
from collections.abc import Generator
from dataclasses import dataclass

import torch

from ragkv.engine.forward import Forward
from ragkv.engine.fusion import StepBudget
from ragkv.engine.preemption import Hold
from ragkv.engine.task import Job, Report, StageReport, TokenReport
from ragkv.errors import StoreError

logger = logging.getLogger(__name__)

_SLICE_BYTES = 1 << 25  # written between two steps, while other requests are computed


@dataclass(frozen=True)
class _Copy:
    """layers: of each layer the blocks, in the order of the request's tokens. copy_ms: what it took."""

    layers: list[torch.Tensor]
    num_tokens: int
    copy_ms: float


class HeldKV:
    """One for each worker. Blocks are copied as they are, whatever their layout.

    num_blocks: that vLLM has.
    """

    def __init__(self, forward: Forward, num_blocks: int) -> None:
        self._forward = forward
        self._caches = [_by_block(layer.kv_cache, num_blocks) for layer in forward.layers]
        self._held: dict[str, _Copy] = {}

    @property
    def can_hold(self) -> bool:
        """Whether it is known where a block's KV is."""
        return all(cache is not None for cache in self._caches)

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, hold: Hold) -> None:
        """Copy a request's blocks. A failure costs the copy only."""
        begin = time.perf_counter()
        ids = torch.tensor(hold.block_ids, device=self._forward.device)
        try:
            layers = [cache[ids].cpu() for cache in self._caches if cache is not None]
        except (RuntimeError, MemoryError):
            logger.exception("the KV of the preempted request %s isn't kept", hold.request_id)
            return
        self._held[hold.request_id] = _Copy(layers, hold.num_tokens, 1e3 * (time.perf_counter() - begin))

    def drop(self, request_id: str) -> None:
        self._held.pop(request_id, None)

    def load(self, job: Job, budget: StepBudget) -> Generator[None, None, Report]:
        """Copy what is held into the job's blocks, from `num_prefix` on; yields where a step may end.

        The report has the tokens that were loaded, and what both copies took. Raises StoreError if nothing is held.
        """
        copy = self._held.pop(job.request_id, None)
        if copy is None or copy.num_tokens != job.held:
            raise StoreError("the KV of a preempted request wasn't kept")
        size = self._forward.block_size
        first, end = job.num_prefix // size, -(-copy.num_tokens // size)
        ids = torch.tensor(job.block_ids, device=self._forward.device)
        load_ms, num_bytes = 0.0, sum(layer[:1].nbytes for layer in copy.layers)
        step = end - first if budget.alone else max(1, _SLICE_BYTES // num_bytes)
        for start in range(first, end, step):
            begin, stop = time.perf_counter(), min(start + step, end)
            for cache, layer in zip(self._caches, copy.layers, strict=True):
                assert cache is not None
                cache[ids[start:stop]] = layer[start:stop].to(cache.device)
            load_ms += 1e3 * (time.perf_counter() - begin)
            if stop < end:
                yield
        copy_ms = copy.copy_ms + load_ms
        return Report(tokens=TokenReport(exact=copy.num_tokens - job.num_prefix), stages=StageReport(load_ms=copy_ms))


def _by_block(cache: torch.Tensor, num_blocks: int) -> torch.Tensor | None:
    """Return a view whose first dimension is vLLM's blocks; None if it has no such dimension, or two."""
    dims = [dim for dim in (0, 1) if cache.dim() > 1 and cache.shape[dim] == num_blocks]
    return cache.movedim(dims[0], 0) if len(dims) == 1 else None
