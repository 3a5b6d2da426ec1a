"""Two engines on the same model and memory, ragkv's and vLLM alone, for requests that go to each of them."""

import os
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragkv import models
from ragkv.config import Config
from ragkv.engine.engine import Engine
from ragkv.engine.task import Keep, PrefixUse
from ragkv.errors import ModelError

BLOCK_TOKENS = 128  # of vLLM's blocks on CPU
RAGKV, VLLM = "ragkv", "vLLM"


@dataclass(frozen=True)
class Timed:
    """A request. prefix: tokens from vLLM's prefix cache; stored: from the disk. Times in seconds."""

    ttft_s: float
    total_s: float
    num_tokens: int
    prefix: int
    stored: int
    token_ids: tuple[int, ...]


async def start(config: Config, folder: Path, kv_tokens: int, *, alone: bool) -> Engine:
    """Start an engine with memory for the KV of so many tokens; alone: vLLM without ragkv.

    folder: where ragkv keeps what it keeps. Raises ModelError for a model that can't be fused.
    """
    # vLLM alone leaves a core to its other processes where there is more than one, and with a connector it doesn't.
    os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
    model = models.resolve(config.model.name, config.home)
    limits = (config.model.max_model_len, models.context_length(model), kv_tokens)
    arguments: dict[str, Any] = {
        "num_gpu_blocks_override": -(-kv_tokens // BLOCK_TOKENS) + 1,
        "max_model_len": min(limit for limit in limits if limit is not None),
    }
    prefixes = config.store.prefix_options(folder / "prefixes")
    engine = await Engine.start(model, config.model, folder / "kv", "0" * 32, {}, prefixes, alone=alone, **arguments)
    if engine.unsupported and not alone:
        await engine.close()
        raise ModelError(f"nothing to measure: {engine.unsupported}")
    return engine


@asynccontextmanager
async def beside_vllm(config: Config, folder: Path, kv_tokens: int) -> AsyncGenerator[dict[str, Engine]]:
    """Start both engines; arguments as of `start`."""
    async with AsyncExitStack() as stack:
        engines = {}
        for name, alone in ((RAGKV, False), (VLLM, True)):
            engines[name] = await start(config, folder, kv_tokens, alone=alone)
            stack.push_async_callback(engines[name].close)
        yield engines


async def ask(
    engine: Engine, token_ids: list[int], max_tokens: int, keep: Keep | None = None, salt: str | None = None
) -> Timed:
    """Ask greedily, and don't stop before `max_tokens`."""
    begin, first, report, tokens, cached = time.perf_counter(), 0.0, None, list[int](), 0
    async for output in engine.generate(
        token_ids, max_tokens=max_tokens, salt=salt, prefix=PrefixUse(keep), ignore_eos=True
    ):
        first = first or time.perf_counter()
        tokens += output.token_ids
        report, cached = output.report or report, output.num_cached_tokens
    stored = report.tokens.exact if report else 0
    now = time.perf_counter()
    return Timed(first - begin, now - begin, len(token_ids), cached - stored, stored, tuple(tokens))


def folder() -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(prefix="ragkv-eval-")
