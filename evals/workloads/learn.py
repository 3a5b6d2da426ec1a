"""`ragkv eval learn`: an application that knows nothing of ragkv asks plain vLLM, which learns its passages.

Requests have passages of English text (the Python manual), drawn by a Zipf law, in any order, each between the same
words of the application's and before another question. The same request goes to vLLM with the connector, which learns,
and to vLLM alone. Between two requests is a pause, in which the former may learn. It would learn on while the latter
answers, on the same cores, so it is stopped then.
"""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import nullcontext
from itertools import accumulate
from pathlib import Path
from statistics import median

import psutil
from transformers import AutoTokenizer

from ragkv import models
from ragkv.config import Config
from ragkv.errors import ConfigError
from ragkv.evals.beside_vllm import RAGKV, VLLM, Timed, ask, folder, in_turn, parts, start
from ragkv.evals.experiment import Progress, Row
from ragkv.evals.manual import TITLES, excerpt
from ragkv.evals.parameters import Learn
from ragkv.evals.plain_vllm import connector, num_learnt
from ragkv.evals.watched import at_rest
from ragkv.home import Home

_PASSAGE_TOKENS, _TOKENS_OUT = 512, 4
_ROWS = 4
_QUIET_S = 1.5  # vLLM's worker looks for work for a second after it had some, without sleeping
_OPENING = "You answer by the notes below, and say so if they don't tell.\n\n"


async def run(config: Config, wanted: Learn, progress: Progress) -> AsyncIterator[Row]:
    """Yield a row for each group of requests, in the order in which they come. Raises ConfigError if they're too long.

    Times are the medians of a group. reused: the share of the prompts' tokens whose KV was fused.
    """
    application = _Application(config, wanted)
    kv_tokens = wanted.tokens + 1024
    with folder() as temporary:
        home = Home(Path(temporary) / "home")
        plain = connector(config, home)
        before = set(psutil.Process().children(recursive=True))
        learning = await start(config, Path(temporary), kv_tokens, alone=True, kv_transfer_config=plain)
        of_learning = set(psutil.Process().children(recursive=True)) - before
        alone = await start(config, Path(temporary), kv_tokens, alone=True)
        engines = {RAGKV: learning, VLLM: alone}
        try:
            if learning.max_model_len < wanted.tokens + 64:
                raise ConfigError(f"prompts of {wanted.tokens} tokens don't fit into the model's context; see --tokens")
            for engine in engines.values():
                await ask(engine, [1] * wanted.tokens, 2)  # the first forward of such a length is slow in itself
            for group in parts(wanted.requests, -(-wanted.requests // _ROWS)):
                answers: dict[str, list[Timed]] = {name: [] for name in engines}
                for i in group:
                    progress.update(f"request {i + 1} of {wanted.requests}")
                    prompt = application.prompt()
                    for name in in_turn(engines, i):
                        with at_rest(of_learning) if name == VLLM else nullcontext():
                            await asyncio.sleep(_QUIET_S)
                            answers[name].append(await ask(engines[name], prompt, _TOKENS_OUT))
                    await asyncio.sleep(wanted.pause_s)
                yield _row(group, answers) | {"learnt": num_learnt(home), "passages": wanted.passages}
        finally:
            for engine in engines.values():
                await engine.close()


def _row(group: range, answers: dict[str, list[Timed]]) -> Row:
    ttft = {name: 1e3 * median(each.ttft_s for each in answers[name]) for name in answers}
    fused = [each for each in answers[RAGKV] if each.fused]
    return {
        "first": group[0] + 1,
        "last": group[-1] + 1,
        "prompt_tokens": round(median(each.num_tokens for each in answers[RAGKV])),
        "ragkv_ttft_ms": round(ttft[RAGKV], 1),
        "vllm_ttft_ms": round(ttft[VLLM], 1),
        "speedup": round(ttft[VLLM] / ttft[RAGKV], 2),
        "fused_requests": len(fused),
        "reused_share": round(
            sum(each.fused for each in fused) / sum(each.num_tokens for each in answers[RAGKV]),
            3,
        ),
    }


class _Application:
    """Prompts as somebody writes them who has passages and a vLLM."""

    def __init__(self, config: Config, wanted: Learn) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(models.resolve(config.model.name, config.home))
        self._drawing = random.Random(0)
        titles = [self._drawing.choice(TITLES) for _ in range(wanted.passages)]
        self._passages = [self._cut(excerpt(title, self._drawing)) for title in titles]
        self._weights = list(accumulate(1 / rank**wanted.zipf for rank in range(1, wanted.passages + 1)))
        self._in_prompt = max(1, wanted.tokens // (_PASSAGE_TOKENS + 8))
        self._num = 0
        if self._in_prompt > wanted.passages:
            raise ConfigError(f"prompts of {wanted.tokens} tokens have {self._in_prompt} passages; set --passages")

    def prompt(self) -> list[int]:
        """Return the next request's tokens: its passages, each once, in the order in which they were drawn."""
        drawn: dict[int, None] = {}
        while len(drawn) < self._in_prompt:
            drawn |= dict.fromkeys(self._drawing.choices(range(len(self._passages)), cum_weights=self._weights))
        self._num += 1
        notes = "\n\n".join(f"Note {i}:\n{self._passages[chosen]}" for i, chosen in enumerate(drawn, 1))
        text = f"{_OPENING}{notes}\n\nQuestion {self._num}: what do the notes have in common?\nAnswer:"
        token_ids: list[int] = self._tokenizer.encode(text)
        return token_ids

    def _cut(self, text: str) -> str:
        token_ids = self._tokenizer.encode(text, add_special_tokens=False)[:_PASSAGE_TOKENS]
        return str(self._tokenizer.decode(token_ids)).strip()
