"""`ragkv eval swap`: recompute or load? TTFT by prompt length, share of the prompt that is stored, and bandwidth.

For each combination three ways on one engine, interleaved: vLLM's own prefill, fusion of all that is stored, and what
the controller chooses. Bandwidth is that of the store's reads, throttled. Medians over the rounds.
"""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from ragkv import models
from ragkv.bench import Bench, without
from ragkv.chunk_kv import ChunkKV
from ragkv.config import Config
from ragkv.controller import Plan, Profile
from ragkv.engine.engine import Engine
from ragkv.engine.job import FuseTask
from ragkv.errors import ModelError
from ragkv.planning import planned
from ragkv.policies import Policy
from ragkv.profiling import load_of, measure
from ragkv.prompt import Prompt, PromptLayout
from ragkv.store.segment_store import SegmentStore


async def run(
    config: Config,
    tokens: Sequence[int],
    shares: Sequence[float],
    bandwidths: Sequence[float | None],
    repeats: int,
    emit: Callable[[dict[str, Any]], None],
) -> None:
    """`emit` a row for each combination as soon as it is known. bandwidths: in MiB/s, None for the disk's own."""
    folder = models.resolve(config.model.name, config.home)
    layout = PromptLayout(folder)
    policy = Policy.of(config.answer.policy, config.answer.budget)
    for bandwidth in bandwidths:
        with tempfile.TemporaryDirectory(prefix="ragkv-swap-") as store_folder:
            options = {**config.store.options(), "read_mib_s": bandwidth}
            engine = await Engine.start(folder, config.model, Path(store_folder), "0" * 32, options)
            try:
                if engine.unsupported:
                    raise ModelError(f"nothing to measure, {config.model.name} can't be fused: {engine.unsupported}")
                store = SegmentStore(Path(store_folder))
                kv = ChunkKV(layout.anchor, "0" * 32, engine.kv_heads, captures=1)
                bench = Bench(engine, layout, folder, kv, store, config.index.chunk_tokens)
                profile = await measure(bench, kv, policy, store, engine.max_model_len)
                for num_tokens in tokens:
                    prompt, digests = await bench.prepare(max(num_tokens, bench.shortest))
                    whole = kv.task(prompt, digests, policy, store)
                    for share in shares:
                        missing = range(1, 1 + round((1 - share) * len(digests)))
                        task = without(whole, missing)
                        row = await _measure(bench, prompt, task, profile, kv, store, repeats)
                        emit({"mib_s": bandwidth, "share": share, "model": config.model.name, **row})
            finally:
                await engine.close()


async def _measure(
    bench: Bench,
    prompt: Prompt,
    task: FuseTask,
    profile: Profile,
    kv: ChunkKV,
    store: SegmentStore,
    repeats: int,
) -> dict[str, Any]:
    times: dict[str, list[float]] = {"prefill": [], "fuse": [], "controller": []}
    found: Plan | None = None
    for _ in range(1 + repeats):
        for name, collected in times.items():
            request: FuseTask | None = task if name == "fuse" else None
            if name == "controller":
                found, request = planned(profile, len(prompt.token_ids), task, kv, store)
            collected.append((await bench.ask(prompt, request)).ttft_ms)
    assert found is not None
    medians = {name: median(collected[1:]) for name, collected in times.items()}  # the first round warms up
    best = min(medians["prefill"], medians["fuse"])
    return {
        "tokens": len(prompt.token_ids),
        "policy": task.policy.label,
        **{f"{name}_ms": round(ms, 1) for name, ms in medians.items()},
        "way": found.way,
        "predicted_prefill_ms": round(found.prefill_ms, 1),
        "predicted_fuse_ms": round(profile.fused_ms(load_of(len(prompt.token_ids), task)), 1),
        "over_prefill_ms": round(medians["controller"] - medians["prefill"], 1),
        "over_best_ms": round(medians["controller"] - best, 1),
        "repeats": repeats,
    }
