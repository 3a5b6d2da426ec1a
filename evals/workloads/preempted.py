"""`ragkv eval preempted`: what it costs a preempted request to come back, by copies of its KV or by vLLM's prefill.

By the size of vLLM's blocks, the length of the sequence, and how many of its last tokens have lost their KV, as in
studies of recomputing against swapping. Nothing else runs in the engine (`ragkv eval pressure` is for that).
"""

import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from statistics import median

from ragkv import models
from ragkv.config import Config
from ragkv.controller.profile import text_tokens
from ragkv.engine.engine import Engine
from ragkv.engine.task import PrefixUse
from ragkv.evals.beside_vllm import folder, start
from ragkv.evals.experiment import Progress, Row
from ragkv.evals.parameters import Preempted

_WORKER = "ragkv.evals.swapping_worker.SwappingWorker"


async def run(config: Config, wanted: Preempted, progress: Progress) -> AsyncIterator[Row]:
    """Yield a row for each size of blocks, length, and number of tokens; a number that is too large is the length."""
    text = text_tokens(models.resolve(config.model.name, config.home), max(wanted.tokens))
    for block_tokens in wanted.block_tokens:
        model = config.model.model_copy(update={"block_tokens": block_tokens})
        with folder() as temporary:
            progress.update(f"starting an engine with blocks of {block_tokens} tokens")
            own, room = config.model_copy(update={"model": model}), 2 * max(wanted.tokens)
            engine = await start(own, Path(temporary), room, alone=False, worker_extension_cls=_WORKER)
            try:
                for length in wanted.tokens:
                    for swapped in dict.fromkeys(min(length, each) for each in wanted.swapped):
                        progress.update(f"blocks of {block_tokens}: {swapped} of {length} tokens")
                        yield await _measure(engine, text[:length], swapped, wanted.repeats)
            finally:
                await engine.close()


async def _measure(engine: Engine, tokens: list[int], swapped: int, repeats: int) -> Row:
    times: dict[str, list[float]] = {"out": [], "in": [], "prefill": []}
    num_blocks = engine.kv_tokens // engine.block_size + 1
    for _ in range(1 + repeats):
        out_ms, in_ms = await engine.call_worker("ragkv_swap_ms", num_blocks, swapped)
        prefill_ms, num_computed = await _prefill_ms(engine, tokens, swapped)
        for name, ms in zip(times, (out_ms, in_ms, prefill_ms), strict=True):
            times[name].append(ms)
    medians = {name: median(each[1:]) for name, each in times.items()}  # the first round warms up
    return {
        "block_tokens": engine.block_size,
        "tokens": len(tokens),
        "swapped": swapped,
        "computed": num_computed,
        **{f"{name}_ms": round(ms, 2) for name, ms in medians.items()},
        "speedup": round(medians["prefill"] / (medians["out"] + medians["in"]), 1),
        "repeats": repeats,
    }


async def _prefill_ms(engine: Engine, tokens: list[int], swapped: int) -> tuple[float, int]:
    """Return how long vLLM takes to its first token when the last tokens have no KV, and how many it computes: whole
    blocks."""
    salt = uuid.uuid4().hex
    if swapped < len(tokens):
        async for _ in engine.generate(tokens[:-swapped], max_tokens=1, salt=salt, prefix=PrefixUse("once")):
            pass
    begin, first, num_cached = time.perf_counter(), 0.0, 0
    async for output in engine.generate(tokens, max_tokens=1, salt=salt, prefix=PrefixUse("once")):
        first = first or time.perf_counter()
        num_cached = output.num_cached_tokens or num_cached
    return 1e3 * (first - begin), len(tokens) - num_cached
