"""The test rig: an engine on an empty store, for experiments that time single requests."""

import tempfile
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragkv import models
from ragkv.chunk_kv import ChunkKV
from ragkv.config import Config
from ragkv.controller.profile import Bench
from ragkv.engine.engine import Engine
from ragkv.errors import ModelError
from ragkv.prompt import PromptLayout
from ragkv.store.disk_store import DiskStore


@dataclass(frozen=True)
class Rig:
    """A running engine, its store, and what lays out prompts for them."""

    engine: Engine
    store: DiskStore
    kv: ChunkKV
    layout: PromptLayout
    model: Path

    def bench(self, chunk_tokens: int) -> Bench:
        return Bench(self.engine, self.layout, self.model, self.kv, self.store, chunk_tokens)


@asynccontextmanager
async def rig(
    config: Config, num_contexts: int, store_options: Mapping[str, Any], **engine_args: Any
) -> AsyncGenerator[Rig, None]:
    """Start the configured model on a store in a temporary folder; both are deleted afterwards. engine_args go to vLLM.

    Raises ModelError for a model that can't be loaded or fused.
    """
    model, fingerprint = models.resolve(config.model.name, config.home), "0" * 32
    layout = PromptLayout(model)
    with tempfile.TemporaryDirectory(prefix="ragkv-eval-") as folder:
        engine = await Engine.start(model, config.model, Path(folder), fingerprint, store_options, **engine_args)
        try:
            if engine.unsupported:
                raise ModelError(f"nothing to measure, {config.model.name} can't be fused: {engine.unsupported}")
            with closing(DiskStore(Path(folder))) as store:
                joins = config.store.joins
                kv = ChunkKV(layout.anchor, fingerprint, engine.kv_heads, num_contexts, joins=joins)
                yield Rig(engine, store, kv, layout, model)
        finally:
            await engine.close()
