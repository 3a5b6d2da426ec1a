"""`ragkv eval ttft`: time to first token by fused KV beside vLLM's own prefill of the same prompt.

Everything runs on one engine, interleaved: in each round the baseline, then every policy. The baseline is a plain vLLM
request; nothing is taken from vLLM's prefix cache by either side. Medians over the rounds.
"""

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from ragkv.config import Config
from ragkv.controller.requests import Bench, Timed
from ragkv.engine.task import FuseTask
from ragkv.evals.rig import rig
from ragkv.policies import Policy
from ragkv.prompt import Prompt


async def run(
    config: Config,
    tokens: Sequence[int],
    policies: Sequence[Policy],
    repeats: int,
    emit: Callable[[dict[str, Any]], None],
    *,
    cold: bool = False,
    random_weights: bool = False,
) -> None:
    """Measure, and `emit` one row for each prompt length and policy as soon as it is known.

    tokens: prompt lengths, cut from English text (the Python manual) in chunks of `index.chunk_tokens`, captured as an
    index is: `index.captures` times, behind the text's other chunks. KV is stored in a temporary folder. cold: time
    each policy also with KV that the system hasn't got in memory. random_weights: the model's own aren't read; times
    don't depend on them, but for which tokens are chosen. Raises ConfigError for a length that the model's context
    can't hold.
    """
    weights = {"load_format": "dummy"} if random_weights else {}
    async with rig(config, config.index.num_contexts, config.store.worker_options(), **weights) as on:
        bench = on.bench(config.index.chunk_tokens)

        def drop(task: FuseTask) -> None:
            keys = [key for key in map(on.kv.key, task.spans) if on.store.contains(key)]
            for key in keys:  # what is written anew, the worker doesn't take from its memory
                on.store.put_records(key, on.store.admin.records(key) or [])
            on.store.admin.drop_cached(keys)

        for num_tokens in tokens:
            prompt, digests = await bench.prepare(num_tokens)
            tasks = [on.kv.task(prompt, digests, policy, on.store) for policy in policies]
            for row in await _measure(bench, prompt, tasks, repeats, drop if cold else None):
                of_model = {"model": config.model.name, "random_weights": random_weights, "dtype": config.model.dtype}
                emit({**row, "repeats": repeats, **of_model})


async def _measure(
    bench: Bench, prompt: Prompt, tasks: Sequence[FuseTask], repeats: int, drop: Callable[[FuseTask], None] | None
) -> list[dict[str, Any]]:
    """Rows of one prompt length. The first round warms up and isn't counted.

    drop: has the system forget a task's KV; then each policy is also timed with KV from the disk.
    """
    arms = [(task, False) for task in tasks] + [(task, True) for task in tasks if drop]
    samples: list[list[Timed]] = [[] for _ in arms]
    baseline: list[Timed] = []
    for _ in range(1 + repeats):
        baseline.append(await bench.ask(prompt, None))
        for (task, is_cold), collected in zip(arms, samples, strict=True):
            if is_cold and drop:
                drop(task)
            collected.append(await bench.ask(prompt, task))
    baseline_ms = median(sample.ttft_ms for sample in baseline[1:])
    return [
        {**_row(prompt, task.policy, timed[1:], baseline_ms), "cold": is_cold}
        for (task, is_cold), timed in zip(arms, samples, strict=True)
    ]


def _row(prompt: Prompt, policy: Policy, samples: Sequence[Timed], baseline_ms: float) -> dict[str, Any]:
    ttft_ms = median(sample.ttft_ms for sample in samples)
    report = samples[-1].report
    stages = {
        name: round(median(getattr(sample.report, name) for sample in samples), 1)
        for name in ("load_ms", "probe_ms", "recompute_ms")
    }
    return {
        "tokens": len(prompt.token_ids),
        "policy": policy.name,
        "budget": {"none": 0.0, "full": 1.0}.get(policy.name, policy.budget),
        "ttft_ms": round(ttft_ms, 1),
        "baseline_ttft_ms": round(baseline_ms, 1),
        "speedup": round(baseline_ms / ttft_ms, 2),
        "reused_tokens": report.tokens.reused,
        "recomputed_tokens": report.tokens.recomputed + 1,  # vLLM computes the prompt's last token itself
        **stages,
    }
