"""The worker's side of exact prefixes: segments of a request's blocks, from the store into vLLM's cache and back.

Saving copies blocks to memory between two engine steps; a thread writes them. What can't be written is lost, which
costs time only.
"""

import logging
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from ragkv.engine.blocks import find_views
from ragkv.engine.fusion import StepBudget
from ragkv.engine.loader import BadSpanError, KVLoader
from ragkv.engine.task import Job, Span
from ragkv.errors import StoreError
from ragkv.store.record import ChunkKey, LayerKV

logger = logging.getLogger(__name__)

_MOST_WAITING_BYTES = 1 << 28  # of what is copied and not yet written; more isn't saved


class ExactKV:
    """One for each worker; not thread-safe, but for what its own thread writes."""

    def __init__(self, loader: KVLoader) -> None:
        self._loader, self._forward = loader, loader.forward
        self._views = find_views(loader.forward)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="ragkv-prefixes")
        self._waiting_bytes = 0

    @property
    def can_save(self) -> bool:
        """Whether the layout of vLLM's blocks is known."""
        return self._views is not None

    def load(self, job: Job, budget: StepBudget) -> Generator[None, None, bool]:
        """Write the job's stored segments into its blocks, from `num_prefix` on; yields where a step may end.

        Returns False if a segment turned out to be missing or damaged: the blocks are as good as empty then.
        """
        slots = self._forward.slots(torch.arange(job.stored[-1].end), torch.tensor(job.block_ids))
        slots = slots.to(self._forward.device)
        self._loader.store.touch(map(self._loader.key, job.stored))
        try:
            for span in job.stored:
                self._load(span, job.num_prefix, slots)
                if not budget.alone:
                    yield
        except BadSpanError as error:
            logger.warning("%s; the prefix is computed anew", error)
            self._loader.discard_if_corrupt(error)
            return False
        return True

    def _load(self, span: Span, num_prefix: int, slots: torch.Tensor) -> None:
        first = max(span.start, num_prefix)
        with self._loader.snapshot() as snapshot:
            for layer in range(len(self._forward.layers)):
                self._loader.prefetch(snapshot, layer + 1, span) if layer + 1 < len(self._forward.layers) else None
                with self._loader.device_copy.in_use():
                    kv = self._loader.read(snapshot, layer, span).kv
                    k, v = (x[:, first - span.start :].transpose(0, 1) for x in (kv.k, kv.v))
                    self._forward.write(layer, k, v, slots[first : span.end])

    def save(self, spans: Sequence[Span], block_ids: Sequence[int]) -> Generator[None, None, None]:
        """Copy segments of a finished request and have them written; yields where a step may end."""
        if self._waiting_bytes > _MOST_WAITING_BYTES:
            logger.warning("prefixes come faster than the disk takes them: %d segments aren't saved", len(spans))
            return
        copied = []
        for span in spans:
            copied.append((self._loader.key(span), self._copied(span, torch.tensor(block_ids))))
            yield
        num_bytes = sum(kv.size_bytes for _, layers in copied for kv in layers)
        self._waiting_bytes += num_bytes
        self._writer.submit(self._write, copied, num_bytes)

    def _copied(self, span: Span, block_ids: torch.Tensor) -> list[LayerKV]:
        assert self._views is not None
        size = self._forward.block_size
        ids = block_ids[span.start // size : span.end // size].to(self._forward.device)
        layers = []
        for pair in self._views:
            k, v = (cache[ids].flatten(0, 1).transpose(0, 1).contiguous().cpu() for cache in pair)
            layers.append(LayerKV(k, v, span.start))
        return layers

    def _write(self, copied: Sequence[tuple[ChunkKey, list[LayerKV]]], num_bytes: int) -> None:
        try:
            self._loader.store.put(copied, "raw")
        except StoreError as error:
            logger.warning("a prefix isn't saved: %s", error)
        except Exception:
            logger.exception("a prefix isn't saved")
        finally:
            self._waiting_bytes -= num_bytes

    def close(self) -> None:
        """Wait until what was copied is written."""
        self._writer.shutdown()
