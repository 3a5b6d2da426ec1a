"""`ragkv eval ttft`: time to first token from fused KV, next to vLLM's own prefill of the same prompt.

Everything runs on one engine, interleaved: in each round the baseline, then every policy. The baseline is a plain vLLM
request; nothing is taken from vLLM's prefix cache by either side. Medians over the rounds.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from statistics import median

from ragkv.config import Config
from ragkv.controller.profile import Bench, Timed
from ragkv.engine.task import FuseTask
from ragkv.evals.experiment import Progress, Row
from ragkv.evals.parameters import Ttft
from ragkv.evals.rig import rig
from ragkv.policies import Policy
from ragkv.prompt import Prompt


async def run(config: Config, wanted: Ttft, progress: Progress) -> AsyncIterator[Row]:
    """Yield one row for each prompt length and policy as soon as it is known.

    Prompts are cut from English text (the Python manual) in chunks of `index.chunk_tokens`, precomputed as an index is:
    in `index.num_contexts` contexts, after the text's other chunks. KV is stored in a temporary folder. Without the
    model's own weights times are the same, but other tokens are chosen. Raises ConfigError for a length that the
    model's context can't hold.
    """
    weights = {"load_format": "dummy"} if wanted.random_weights else {}
    async with rig(config, config.index.num_contexts, config.store.worker_options(), **weights) as on:
        bench = on.bench(config.index.chunk_tokens)

        def drop(task: FuseTask) -> None:
            spans = [*task.spans, *map(on.kv.averaged, task.spans)]  # the first chunk's may be in its mean's
            keys = [key for key in dict.fromkeys(map(on.kv.key, spans)) if on.store.contains(key)]
            for key in keys:  # the worker doesn't take from its memory what is written anew
                on.store.put_records(key, on.store.admin.records(key) or [])
            on.store.admin.drop_cached(keys)

        model = {"model": config.model.name, "random_weights": wanted.random_weights, "dtype": config.model.dtype}
        for num_tokens in wanted.tokens:
            prompt, chunk_hashes = await bench.prepare(num_tokens)
            tasks = [on.kv.task(prompt, chunk_hashes, policy, on.store) for policy in wanted.policies]
            for row in await _measure(bench, prompt, tasks, wanted.repeats, drop if wanted.cold else None):
                progress.note("{tokens} tokens, {policy} {budget:g}: {ttft_ms:.0f} ms".format(**row))
                yield {**row, "repeats": wanted.repeats, **model}


async def _measure(
    bench: Bench, prompt: Prompt, tasks: Sequence[FuseTask], repeats: int, drop: Callable[[FuseTask], None] | None
) -> list[Row]:
    """Return the rows of one prompt length. The first round warms up and isn't counted.

    drop: takes a task's KV out of the page cache; then each policy is also timed with KV from the disk.
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


def _row(prompt: Prompt, policy: Policy, samples: Sequence[Timed], baseline_ms: float) -> Row:
    ttft_ms = median(sample.ttft_ms for sample in samples)
    report = samples[-1].report
    stages = {
        name: round(median(getattr(sample.report.stages, name) for sample in samples), 1)
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
