"""`ragkv eval analytics`: many short texts behind one instruction, two tokens each, next to vLLM alone.

The instruction is a number of tweets with their sentiment. While all have it in memory, a batch goes to one engine
after the other; then they are started again, and are asked once.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from operator import truediv
from pathlib import Path
from statistics import median

from transformers import AutoTokenizer

from ragkv import models
from ragkv.config import Config
from ragkv.engine.engine import Engine
from ragkv.errors import ConfigError
from ragkv.evals.beside_vllm import RAGKV, UNCACHED, VLLM, Timed, ask, beside_vllm, folder, in_turn, peers
from ragkv.evals.experiment import Progress, Row
from ragkv.evals.parameters import Analytics

_LABELS = ("negative", "neutral", "positive")
_OUT = 2  # tokens of an answer
_KV_TOKENS = 16384
_JOINED = 12  # tweets in a prompt without an instruction


async def run(config: Config, wanted: Analytics, progress: Progress) -> AsyncIterator[Row]:
    """Yield a row for each length of the instruction, at last one for texts without any, which share nothing."""
    tweets = _Tweets(config, wanted)
    rows: dict[int, Row] = {}
    with folder() as temporary:
        async with peers(Path(temporary), uncached=wanted.uncached, lmcache=wanted.lmcache) as others:
            async with beside_vllm(config, Path(temporary), _KV_TOKENS, others) as engines:
                for num_tokens in dict.fromkeys((*wanted.tokens, 0)):
                    progress.update(f"an instruction of {num_tokens} tokens")
                    rows[num_tokens] = await _compare(engines, tweets, num_tokens, wanted.repeats, progress)
            progress.update("starting the engines again")
            async with beside_vllm(config, Path(temporary), _KV_TOKENS, others) as engines:
                for engine in engines.values():
                    await ask(engine, [1] * 512, _OUT, "once")  # the first forward of such a length is slow in itself
                for num_tokens, row in rows.items():
                    prompt = tweets.prompts(num_tokens, wanted.repeats + 1)[0]
                    first = {name: await ask(engine, prompt, _OUT, "once") for name, engine in engines.items()}
                    times = {f"{_key(name)}_restarted_ttft_ms": 1e3 * each.ttft_s for name, each in first.items()}
                    yield row | {
                        **{name: round(time_ms, 1) for name, time_ms in times.items()},
                        "stored_tokens": first[RAGKV].stored,
                        "restart_speedup": round(first[VLLM].ttft_s / first[RAGKV].ttft_s, 2),
                    }


async def _compare(
    engines: dict[str, Engine], tweets: "_Tweets", num_tokens: int, repeats: int, progress: Progress
) -> Row:
    """Return how many requests a second each engine answers with the instruction in its memory."""
    rates: dict[str, list[float]] = {name: [] for name in engines}
    ttfts: dict[str, list[float]] = {name: [] for name in engines}
    differing = 0
    for engine in engines.values():  # so that all have it, and ragkv has seen it come back
        await _throughput(engine, tweets.prompts(num_tokens, repeats)[:4])
        await _throughput(engine, tweets.prompts(num_tokens, repeats)[4:8])
    for i in range(repeats):
        answers = {}
        prompts = tweets.prompts(num_tokens, i)
        for name in in_turn(engines, i):
            rate, answers[name] = await _throughput(engines[name], prompts)
            rates[name].append(rate)
            ttfts[name].append(median(each.ttft_s for each in answers[name]))
        differing += sum(a.token_ids != b.token_ids for a, b in zip(answers[RAGKV], answers[VLLM], strict=True))
    ratios = sorted(a / b for a, b in zip(rates[RAGKV], rates[VLLM], strict=True))
    others = [name for name in rates if name not in (RAGKV, VLLM)]
    return {
        "instruction_tokens": num_tokens,
        "requests": repeats * len(prompts),
        **{f"{_key(name)}_per_s": round(median(rates[name]), 2) for name in rates},
        "throughput_ratio": round(median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        **{f"{_key(name)}_ratio": round(median(map(truediv, rates[name], rates[VLLM])), 3) for name in others},
        "ttft_ratio": round(median(a / b for a, b in zip(ttfts[RAGKV], ttfts[VLLM], strict=True)), 3),
        "answers_that_differ": differing,
    }


def _key(name: str) -> str:
    return "uncached" if name == UNCACHED else name.lower()


async def _throughput(engine: Engine, prompts: list[list[int]]) -> tuple[float, list[Timed]]:
    """Return how many of these prompts, all asked at once, are answered in a second, and the answers."""
    begin = time.perf_counter()
    answers = await asyncio.gather(*(ask(engine, prompt, _OUT) for prompt in prompts))
    return len(prompts) / (time.perf_counter() - begin), answers


class _Tweets:
    """Prompts of tweets. Batches, by their number, have different ones."""

    def __init__(self, config: Config, wanted: Analytics) -> None:
        folder = wanted.data / "tweeteval"
        try:
            shown = (folder / "val_text.txt").read_text().splitlines()
            labels = (folder / "val_labels.txt").read_text().split()
            self._texts = (folder / "test_text.txt").read_text().splitlines()
        except OSError as error:
            raise ConfigError(f"no tweets in {folder}: {error.strerror}; name the folder by --data") from error
        self._examples = [
            f"Tweet: {text}\nSentiment: {_LABELS[int(label)]}\n\n" for text, label in zip(shown, labels, strict=True)
        ]
        self._tokenizer = AutoTokenizer.from_pretrained(models.resolve(config.model.name, config.home))
        self._wanted = wanted

    def prompts(self, num_tokens: int, batch: int) -> list[list[int]]:
        """Return prompts that begin with the same `num_tokens` tokens; with 0 ones that share nothing."""
        size = self._wanted.requests
        if not num_tokens:
            texts = self._texts[batch * size * _JOINED :][: size * _JOINED]
            joined = ["\n".join(texts[i * _JOINED : (i + 1) * _JOINED]) for i in range(size)]
            return self._tokens([f"{i} of {batch}\n{text}\nSentiment:" for i, text in enumerate(joined)])
        shown = "".join(self._examples[num_tokens % len(self._examples) :] + self._examples)
        opening = f"{num_tokens} tokens of tweets, which are negative, neutral or positive.\n\n{shown}"
        (instruction,) = self._tokens([opening[: 12 * num_tokens]])
        asked = self._tokens([f"Tweet: {text}\nSentiment:" for text in self._texts[batch * size :][:size]])
        return [[*instruction[:num_tokens], *tweet] for tweet in asked]

    def _tokens(self, texts: list[str]) -> list[list[int]]:
        found: list[list[int]] = self._tokenizer(texts, add_special_tokens=False)["input_ids"]
        return found
