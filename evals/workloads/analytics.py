"""`ragkv eval analytics`: many short texts behind one instruction, two tokens each, next to vLLM alone.

The instruction is a number of tweets with their sentiment. While both have it in memory, a batch goes to the one engine
and to the other in turns; then both are started again, and are asked once.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from statistics import median

from transformers import AutoTokenizer

from ragkv import models
from ragkv.config import Config
from ragkv.engine.engine import Engine
from ragkv.errors import ConfigError
from ragkv.evals.beside_vllm import RAGKV, VLLM, Timed, ask, beside_vllm, folder
from ragkv.evals.experiment import Progress, Row
from ragkv.evals.registry import Analytics

_LABELS = ("negative", "neutral", "positive")
_OUT = 2  # tokens of an answer
_KV_TOKENS = 16384


async def run(config: Config, wanted: Analytics, progress: Progress) -> AsyncIterator[Row]:
    """Yield a row for each length of the instruction."""
    prompts = {num_tokens: _prompts(config, wanted, num_tokens) for num_tokens in wanted.tokens}
    rows: dict[int, Row] = {}
    with folder() as temporary:
        async with beside_vllm(config, Path(temporary), _KV_TOKENS) as engines:
            for num_tokens, asked in prompts.items():
                progress.update(f"an instruction of {num_tokens} tokens")
                rates: dict[str, list[float]] = {RAGKV: [], VLLM: []}
                for engine in engines.values():  # so that both have it
                    await _throughput(engine, asked[:4])
                for i in range(wanted.repeats):
                    answers = {}
                    for name in (RAGKV, VLLM) if i % 2 else (VLLM, RAGKV):
                        rate, answers[name] = await _throughput(engines[name], asked)
                        rates[name].append(rate)
                ratios = sorted(a / b for a, b in zip(rates[RAGKV], rates[VLLM], strict=True))
                rows[num_tokens] = {
                    "instruction_tokens": num_tokens,
                    "requests": len(asked),
                    "repeats": wanted.repeats,
                    **{f"{name.lower()}_per_s": round(median(rates[name]), 2) for name in rates},
                    "throughput_ratio": round(median(ratios), 3),
                    "ratios": [round(ratio, 3) for ratio in ratios],
                    "answers_that_differ": sum(
                        a.token_ids != b.token_ids for a, b in zip(answers[RAGKV], answers[VLLM], strict=True)
                    ),
                }
        progress.update("starting both engines again")
        async with beside_vllm(config, Path(temporary), _KV_TOKENS) as engines:
            for engine in engines.values():
                await ask(engine, [1] * 512, _OUT, "once")  # the first forward of such a length is slow in itself
            for num_tokens, asked in prompts.items():
                first = {name: await ask(engine, asked[-1], _OUT, "once") for name, engine in engines.items()}
                times = {f"{name.lower()}_restarted_ttft_ms": 1e3 * each.ttft_s for name, each in first.items()}
                yield rows[num_tokens] | {
                    **{name: round(time_ms, 1) for name, time_ms in times.items()},
                    "stored_tokens": first[RAGKV].stored,
                    "restart_speedup": round(first[VLLM].ttft_s / first[RAGKV].ttft_s, 2),
                }


async def _throughput(engine: Engine, prompts: list[list[int]]) -> tuple[float, list[Timed]]:
    """Return how many of these prompts, all asked at once, are answered in a second, and the answers."""
    begin = time.perf_counter()
    answers = await asyncio.gather(*(ask(engine, prompt, _OUT) for prompt in prompts))
    return len(prompts) / (time.perf_counter() - begin), answers


def _prompts(config: Config, wanted: Analytics, num_tokens: int) -> list[list[int]]:
    """Return prompts that begin with the same `num_tokens` tokens."""
    folder = wanted.data / "tweeteval"
    try:
        shown = (folder / "val_text.txt").read_text().splitlines()
        labels = (folder / "val_labels.txt").read_text().split()
        asked = (folder / "test_text.txt").read_text().splitlines()[: wanted.requests]
    except OSError as error:
        raise ConfigError(f"no tweets in {folder}: {error.strerror}; name the folder by --data") from error
    tokenizer = AutoTokenizer.from_pretrained(models.resolve(config.model.name, config.home))
    examples = "".join(
        f"Tweet: {text}\nSentiment: {_LABELS[int(label)]}\n\n" for text, label in zip(shown, labels, strict=True)
    )
    examples = examples[40 * num_tokens :][: 12 * num_tokens]  # others for each length
    opening = f"{num_tokens} tokens of tweets, which are negative, neutral or positive.\n\n{examples}"
    instruction = tokenizer.encode(opening, add_special_tokens=False)[:num_tokens]
    texts = tokenizer([f"Tweet: {text}\nSentiment:" for text in asked], add_special_tokens=False)["input_ids"]
    return [[*instruction, *text] for text in texts]
