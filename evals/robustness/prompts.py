"""`ragkv eval prompts`: random prompts of plain vLLM with ragkv's connector, token by token beside vLLM alone.

Passages are learnt first. Then prompts have them whole, cut, repeated, in any order, beside each other and with
characters of many bytes at their seams, or none of them; several are asked at once, and want more memory than there is.
Half ask for `full`. What isn't fused has to be vLLM's own, and in the end no block may be in use.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from transformers import AutoTokenizer

from ragkv import models
from ragkv.config import Config
from ragkv.engine.engine import Engine
from ragkv.evals.beside_vllm import Timed, ask, folder, kv_account, parts, start
from ragkv.evals.experiment import Progress, Row
from ragkv.evals.manual import TITLES, excerpt
from ragkv.evals.parameters import Prompts
from ragkv.evals.plain_vllm import connector, num_learnt
from ragkv.evals.robustness.faults import Part, Round
from ragkv.evals.robustness.victim import note
from ragkv.home import Home
from ragkv.policies import FULL

_PASSAGES, _PASSAGE_CHARACTERS = 24, 900
_SEAMS = ("", "\n\n", " ", "…", "🙂", "é\u0301", "\u200b", "漢字", "\t\t", "\u202e")
_LEARNING_S = 300.0  # at most


async def run(config: Config, wanted: Prompts, progress: Progress) -> AsyncIterator[Row]:
    """Yield a row for the prompts, and one for the blocks in the end."""
    drawn = _Drawn(config, wanted.seed)
    with folder() as temporary:
        home = Home(Path(temporary) / "home")
        plain = {"kv_transfer_config": connector(config, home), "disable_log_stats": False}
        engine = await start(config, Path(temporary), wanted.kv_tokens, alone=True, **plain)
        alone = await start(config, Path(temporary), wanted.kv_tokens, alone=True)
        try:
            progress.update("learning")
            await _teach(engine, drawn, home)
            part = Part("prompts")
            part.outcomes["passages learnt"] = num_learnt(home)
            for group in parts(wanted.requests, wanted.at_once):
                begin = time.monotonic()
                asked = [(drawn.prompt(), drawn.wants_full()) for _ in group]
                found = await _all(engine, asked, wanted.tokens)
                expected = await _all(alone, [(prompt, False) for prompt, _ in asked], wanted.tokens)
                part.seconds += time.monotonic() - begin
                for i, (_, is_full), a, b in zip(group, asked, found, expected, strict=True):
                    note(part, _compared(i, is_full, a, b))
                progress.update("prompts", group[-1] + 1, wanted.requests)
            part.outcomes["preemptions"] = kv_account()[1]
            yield part.row()
            yield (await _blocks(engine)).row()
        finally:
            await engine.close()
            await alone.close()


def _compared(seed: int, is_full: bool, found: Timed, expected: Timed) -> Round:
    if is_full and found.fused:
        return Round(seed, "full", f"{found.fused} tokens were fused though `full` was asked for")
    if found.fused:
        return Round(seed, "fused")
    is_same = found.token_ids == expected.token_ids
    problem = f"a prompt of {found.num_tokens} tokens: {found.token_ids} and not {expected.token_ids}"
    return Round(seed, "full" if is_full else "not fused", None if is_same else problem)


async def _all(engine: Engine, asked: Sequence[tuple[list[int], bool]], max_tokens: int) -> list[Timed]:
    each = (ask(engine, prompt, max_tokens, policy=FULL if is_full else None) for prompt, is_full in asked)
    return await asyncio.gather(*each)


async def _teach(engine: Engine, drawn: "_Drawn", home: Home) -> None:
    """Have every passage come twice, in contexts of its own, and wait until all are learnt."""
    for _ in range(2):
        for passage in drawn.passages:
            await ask(engine, drawn.tokens(f"{drawn.noise()}\n\n{passage}\n\n{drawn.noise()}"), 1)
    end = time.monotonic() + _LEARNING_S
    while num_learnt(home) < len(drawn.passages) and time.monotonic() < end:
        await asyncio.sleep(1)


async def _blocks(engine: Engine) -> Part:
    """Return whether vLLM can forget all blocks: it refuses while any is in use."""
    part, begin = Part("blocks in the end"), time.monotonic()
    await asyncio.sleep(5)  # for what is still being saved
    is_free = await engine.forget_prefixes()
    note(part, Round(0, "free" if is_free else "in use", None if is_free else "blocks are in use though nothing runs"))
    part.seconds = time.monotonic() - begin
    return part


class _Drawn:
    """Passages and prompts by a seed."""

    def __init__(self, config: Config, seed: int) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(models.resolve(config.model.name, config.home))
        self._drawing = random.Random(seed)
        self.passages = [self.noise(_PASSAGE_CHARACTERS) for _ in range(_PASSAGES)]

    def noise(self, characters: int = 200) -> str:
        return excerpt(self._drawing.choice(TITLES), self._drawing)[:characters]

    def wants_full(self) -> bool:
        return self._drawing.random() < 0.5

    def prompt(self) -> list[int]:
        draw = self._drawing
        parts = [self.noise(draw.randrange(1, 400)) for _ in range(draw.randrange(1, 4))]
        for _ in range(draw.choice((0, 1, 1, 2, 2, 3))):
            part = self._part(draw.choice(self.passages))
            parts.insert(draw.randrange(len(parts) + 1), part)
            if draw.random() < 0.2:
                parts.insert(draw.randrange(len(parts) + 1), part)
        return self.tokens("".join(f"{part}{draw.choice(_SEAMS)}" for part in parts))

    def _part(self, passage: str) -> str:
        """Return a passage, whole or cut at either end or both."""
        cuts = sorted(self._drawing.sample(range(len(passage)), 2))
        start, end = self._drawing.choice(((0, len(passage)), (0, cuts[1]), (cuts[0], len(passage)), tuple(cuts)))
        return passage[start:end]

    def tokens(self, text: str) -> list[int]:
        token_ids: list[int] = self._tokenizer.encode(text)
        return token_ids
