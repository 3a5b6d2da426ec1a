"""Engines on the same model and memory for requests that go to each: ragkv's, vLLM alone with and without its prefix
cache, and LMCache's."""

import os
import tempfile
import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from ragkv import models
from ragkv.config import Config
from ragkv.engine.engine import Engine
from ragkv.engine.task import FuseTask, Keep, PrefixUse
from ragkv.errors import ModelError
from ragkv.evals import lmcache as lmcache_server
from ragkv.policies import Policy

_BLOCK_TOKENS = 128  # of vLLM's blocks on CPU
RAGKV, VLLM, UNCACHED, LMCACHE = "ragkv", "vLLM", "vLLM, no prefix cache", "LMCache"

Arms = dict[str, dict[str, Any]]  # vLLM's arguments of engines, by their names


@dataclass(frozen=True)
class Timed:
    """A request. prefix: tokens from vLLM's prefix cache, or from LMCache; stored: from the disk; fused: of chunks, not
    computed; chunks, in_memory: tokens of the chunks that were loaded, and how many of these the store had in memory.
    gaps_s: between two pieces of the answer. Times in seconds."""

    ttft_s: float
    total_s: float
    num_tokens: int
    prefix: int
    stored: int
    token_ids: tuple[int, ...]
    fused: int = 0
    chunks: int = 0
    in_memory: int = 0
    gaps_s: tuple[float, ...] = ()


async def start(config: Config, folder: Path, kv_tokens: int, *, alone: bool, **more: Any) -> Engine:
    """Start an engine with memory for the KV of so many tokens; alone: vLLM without ragkv.

    folder: where ragkv keeps what it keeps. more: vLLM's arguments. Raises ModelError for a model that can't be fused.
    """
    # vLLM alone leaves a core to its other processes where there is more than one, and with a connector it doesn't.
    os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
    model, arguments = models.resolve(config.model.name, config.home), {**memory_for(config, kv_tokens), **more}
    prefixes = config.store.prefix_options(folder / "prefixes")
    engine = await Engine.start(model, config.model, folder / "kv", "0" * 32, {}, prefixes, alone=alone, **arguments)
    if engine.unsupported and not alone:
        await engine.close()
        raise ModelError(f"nothing to measure: {engine.unsupported}")
    return engine


def memory_for(config: Config, kv_tokens: int) -> dict[str, Any]:
    """Return vLLM's arguments for memory for the KV of so many tokens, and a context that isn't longer."""
    block_tokens = config.model.block_tokens or _BLOCK_TOKENS
    context = models.context_length(models.resolve(config.model.name, config.home))
    limits = (config.model.max_model_len, context, kv_tokens)
    return {
        "num_gpu_blocks_override": -(-kv_tokens // block_tokens) + 1,
        "max_model_len": min(limit for limit in limits if limit is not None),
    }


@asynccontextmanager
async def beside_vllm(config: Config, folder: Path, kv_tokens: int, others: Arms) -> AsyncGenerator[dict[str, Engine]]:
    """Start ragkv's engine, vLLM alone, and `others`, as of `peers`; the rest as of `start`."""
    arms: Arms = {RAGKV: {}, VLLM: {}, **others}
    async with AsyncExitStack() as stack:
        engines = {}
        for name, more in arms.items():
            engines[name] = await start(config, folder, kv_tokens, alone=name != RAGKV, **more)
            stack.push_async_callback(engines[name].close)
        yield engines


@asynccontextmanager
async def peers(folder: Path, *, uncached: bool, lmcache: bool) -> AsyncGenerator[Arms]:
    """Yield vLLM without its prefix cache and LMCache, those that are wanted. LMCache's server outlives the engines.

    Raises ConfigError if LMCache isn't installed, ModelError if its server doesn't start.
    """
    arms: Arms = {UNCACHED: {"enable_prefix_caching": False}} if uncached else {}
    if not lmcache:
        yield arms
        return
    lmcache_server.require()
    async with lmcache_server.server(folder / "lmcache.log") as arguments:
        yield arms | {LMCACHE: arguments}


def in_turn(engines: Iterable[str], number: int) -> list[str]:
    """Return the engines' names in an order that differs from one group of requests to the next."""
    names = list(engines)
    first = number % len(names)
    return names[first:] + names[:first]


def parts(count: int, size: int) -> list[range]:
    """Return the numbers below `count` in ranges of so many, the last of what is left."""
    return [range(start, min(start + size, count)) for start in range(0, count, size)]


async def ask(
    engine: Engine,
    token_ids: list[int],
    max_tokens: int,
    keep: Keep | None = None,
    salt: str | None = None,
    task: FuseTask | None = None,
    policy: Policy | None = None,
) -> Timed:
    """Ask greedily, and don't stop before `max_tokens`. policy: of plain vLLM with the connector."""
    begin, report, tokens, cached, times = time.perf_counter(), None, list[int](), 0, list[float]()
    outputs = engine.generate(
        token_ids, task, max_tokens=max_tokens, salt=salt, prefix=PrefixUse(keep), policy=policy, ignore_eos=True
    )
    async for output in outputs:
        times.append(time.perf_counter())
        tokens += output.token_ids
        report, cached = output.report or report, output.num_cached_tokens
    stored = report.tokens.exact if report else 0
    fused = report.tokens.reused if report else 0
    prefix = report.tokens.prefix if task and report else cached - stored
    loaded = [(end - start, warm) for start, end, warm in report.tokens.loaded if start] if report else []
    return Timed(
        times[0] - begin,
        time.perf_counter() - begin,
        len(token_ids),
        prefix,
        stored,
        tuple(tokens),
        fused,
        sum(size for size, _ in loaded),
        sum(size for size, warm in loaded if warm),
        tuple(after - before for before, after in pairwise(times)),
    )


def folder() -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(prefix="ragkv-eval-")


def kv_account() -> tuple[float, int]:
    """Return which share of its memory for KV vLLM uses, and how many requests it has preempted, as it counts them.

    Only of an engine with `disable_log_stats=False`.
    """
    from prometheus_client import REGISTRY

    found = {sample.name: sample.value for metric in REGISTRY.collect() for sample in metric.samples}
    return found.get("vllm:kv_cache_usage_perc", 0.0), int(found.get("vllm:num_preemptions_total", 0))
