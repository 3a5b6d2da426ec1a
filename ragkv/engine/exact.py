"""The worker's side of exact prefixes: segments of a request's blocks, from their store into vLLM's cache and back.

Storing copies blocks to memory between two engine steps; a thread writes them. What can't be written is lost, which
costs time only.
"""

import logging
import threading
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from ragkv.engine.blocks import find_views
from ragkv.engine.fusion import StepBudget
from ragkv.engine.loader import BadSpanError, KVLoader
from ragkv.engine.task import Job, Span
from ragkv.errors import ConfigError, StoreError
from ragkv.store.disk_store import DiskStore
from ragkv.store.prefixes import generation
from ragkv.store.record import ChunkKey, LayerKV

if TYPE_CHECKING:
    from ragkv.engine.scheduler import Save

logger = logging.getLogger(__name__)

_MOST_WAITING_BYTES = 1 << 28  # of what is copied and not yet written; more isn't stored


class ExactKV:
    """One for each worker; not thread-safe, but for what its own thread writes.

    loader: of the prefixes' store. disk_bytes: the limit of that store. num_lost: the prefixes so far that were to be
    stored, and of which something isn't.
    """

    def __init__(self, loader: KVLoader, store: DiskStore, disk_bytes: int) -> None:
        self._loader, self._forward = loader, loader.forward
        self._store, self._disk_bytes = store, disk_bytes
        self._views = find_views(loader.forward)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="ragkv-prefixes")
        self._waiting_bytes = 0
        self._lock = threading.Lock()
        self.num_lost = 0

    @property
    def can_save(self) -> bool:
        """Whether the layout of vLLM's blocks is known."""
        return self._views is not None

    def load(self, job: Job, budget: StepBudget) -> Generator[None, None, float | None]:
        """Write the job's stored segments into its blocks, from `num_prefix` on; yields where a step may end.

        Returns how many milliseconds that took, without what others did between the steps. None if a segment turned out
        to be missing or damaged: the blocks are as good as empty then.
        """
        slots = self._forward.slots(torch.arange(job.stored[-1].end), torch.tensor(job.block_ids))
        slots = slots.to(self._forward.device)
        self._store.touch(map(self._loader.key, job.stored))
        seconds = 0.0
        try:
            for span in job.stored:
                begin = time.perf_counter()
                self._load(span, job.num_prefix, slots)
                seconds += time.perf_counter() - begin
                if not budget.alone and span is not job.stored[-1]:
                    yield
        except BadSpanError as error:
            logger.warning("%s; the prefix is computed anew", error)
            self._loader.discard_if_corrupt(error)
            return None
        return 1e3 * seconds

    def _load(self, span: Span, num_prefix: int, slots: torch.Tensor) -> None:
        first, num_layers = max(span.start, num_prefix), len(self._forward.layers)
        with self._loader.snapshot() as snapshot:
            for layer in range(num_layers):
                if layer + 1 < num_layers:
                    self._loader.prefetch(snapshot, layer + 1, span)
                with self._loader.device_copy.in_use():
                    kv = self._loader.read(snapshot, layer, span).kv
                    k, v = (x[:, first - span.start :].transpose(0, 1) for x in (kv.k, kv.v))
                    self._forward.write(layer, k, v, slots[first : span.end])

    def save(self, save: "Save") -> Generator[None, None, None]:
        """Copy segments of a finished request and have them written; yields where a step may end."""
        if self._waiting_bytes > _MOST_WAITING_BYTES:
            logger.warning("prefixes come faster than the disk takes them: %d segments aren't stored", len(save.spans))
            self.lose()
            return
        copied = []
        for span in save.spans:
            copied.append((self._loader.key(span), self._copied(span, torch.tensor(save.block_ids))))
            yield
        num_bytes = sum(kv.size_bytes for _, layers in copied for kv in layers)
        with self._lock:
            self._waiting_bytes += num_bytes
        self._writer.submit(self._write, copied, save, num_bytes)

    def _copied(self, span: Span, block_ids: torch.Tensor) -> list[LayerKV]:
        assert self._views is not None
        size = self._forward.block_size
        ids = block_ids[span.start // size : -(-span.end // size)].to(self._forward.device)
        num_tokens, layers = span.end - span.start, []
        for pair in self._views:
            k, v = (cache[ids].flatten(0, 1)[:num_tokens].transpose(0, 1).contiguous().cpu() for cache in pair)
            layers.append(LayerKV(k, v, span.start))
        return layers

    def _write(self, copied: Sequence[tuple[ChunkKey, list[LayerKV]]], save: "Save", num_bytes: int) -> None:
        try:
            self._store.put(copied, is_wanted=lambda: generation(self._store.path) == save.generation)
            if save.keep == "shared":
                self._store.control.hint([key.chunk_hash for key, _ in copied], "pin", self._disk_bytes)
        except (StoreError, ConfigError) as error:
            logger.warning("a prefix isn't kept: %s", error)
            self.lose()
        except Exception:
            logger.exception("a prefix isn't kept")
            self.lose()
        finally:
            with self._lock:
                self._waiting_bytes -= num_bytes

    def lose(self) -> None:
        """Count a prefix that isn't stored as it was to be."""
        with self._lock:
            self.num_lost += 1

    def close(self) -> None:
        """Wait until what was copied is written."""
        self._writer.shutdown()
        self._store.close()
