"""`ragkv eval pressure`: more requests at once than vLLM's memory holds, so that it preempts some of them.

Each engine has the machine to itself: vLLM alone, then ragkv for each way in which preempted requests come back. What
is drawn is vLLM's own account of its memory and its preemptions, which it tells after each step.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from ragkv import models
from ragkv.config import Config
from ragkv.controller.profile import text_tokens
from ragkv.engine.engine import Engine
from ragkv.errors import ConfigError, ModelError
from ragkv.evals.beside_vllm import VLLM, folder, kv_account
from ragkv.evals.experiment import Progress, Row
from ragkv.evals.parameters import Pressure

_SAMPLED_S = 0.2
_POINTS = 120  # of a curve in a row
_COLORS = {VLLM: "tab:gray", "recompute": "tab:red", "load": "tab:blue", "auto": "tab:green"}


@dataclass
class _Course:
    """What happened from when the requests were sent: at which second, and what it was then."""

    seconds: list[float] = field(default_factory=list)
    kv_use: list[float] = field(default_factory=list)
    preemptions: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    answers: list[tuple[int, ...]] = field(default_factory=list)
    num_resumed: int = 0

    def row(self) -> Row:
        total, seconds = sum(map(len, self.answers)), self.seconds[-1]
        kept = np.unique(np.linspace(0, len(self.seconds) - 1, _POINTS).astype(int))
        curves = {name: getattr(self, name) for name in ("seconds", "kv_use", "preemptions", "tokens")}
        return {
            "seconds": round(seconds, 2),
            "tokens_per_s": round(total / seconds, 2),
            "preemptions": self.preemptions[-1],
            "resumed_tokens": self.num_resumed,
            "kv_use": round(float(np.mean(self.kv_use)), 3),
            "course": {name: [round(values[i], 3) for i in kept] for name, values in curves.items()},
        }


async def run(config: Config, wanted: Pressure, progress: Progress) -> AsyncIterator[Row]:
    """Yield a row for each share of memory and each way. Raises ConfigError for memory that is too small for one."""
    # vLLM alone leaves a core to its other processes where there is more than one, and with a connector it doesn't.
    os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
    model = models.resolve(config.model.name, config.home)
    text = text_tokens(model, wanted.requests * max(wanted.tokens_in))
    for block_tokens, tokens_in, share in product(wanted.block_tokens, wanted.tokens_in, wanted.shares):
        prompts = [text[i * tokens_in :][:tokens_in] for i in range(wanted.requests)]
        longest = tokens_in + wanted.tokens_out
        num_blocks = int(share * wanted.requests * longest) // block_tokens
        if num_blocks * block_tokens < longest + 1:
            raise ConfigError(f"{share:.0%} of what {wanted.requests} requests take isn't enough for one of them")
        ways = (VLLM, *wanted.ways)
        courses: dict[str, list[_Course]] = {way: [] for way in ways}
        for i in range(wanted.repeats):  # to and fro: a machine may get slower meanwhile
            for way in ways if i % 2 == 0 else reversed(ways):
                progress.update(f"{share:.0%} of the memory, {tokens_in} tokens, {way}")
                courses[way].append(await _measure(config, model, way, (num_blocks, block_tokens), prompts, wanted))
        right = courses[VLLM][0].answers
        for way in ways:
            found = min(courses[way], key=lambda course: course.seconds[-1])
            yield {
                "share": share,
                "way": way,
                "kv_tokens": num_blocks * block_tokens,
                "block_tokens": block_tokens,
                "requests": wanted.requests,
                "tokens_in": tokens_in,
                "tokens_out": wanted.tokens_out,
                **found.row(),
                "all_seconds": [round(course.seconds[-1], 2) for course in courses[way]],
                "answers_that_differ": sum(
                    a != b for course in courses[way] for a, b in zip(course.answers, right, strict=True)
                ),
                "model": config.model.name,
                "dtype": config.model.dtype,
            }


async def _measure(
    config: Config, model: Path, way: str, blocks: tuple[int, int], prompts: list[list[int]], wanted: Pressure
) -> _Course:
    """Return the course on a new engine. blocks: how many there are, and their size in tokens."""
    num_blocks, block_tokens = blocks
    own = config.model if way == VLLM else config.model.model_copy(update={"preemption": way})
    arguments: dict[str, Any] = {
        "num_gpu_blocks_override": num_blocks + 1,  # vLLM keeps one for itself
        "block_size": block_tokens,
        "max_model_len": len(prompts[0]) + wanted.tokens_out + 1,
        "disable_log_stats": False,
    }
    with folder() as temporary:
        engine = await Engine.start(model, own, Path(temporary), "0" * 32, alone=way == VLLM, **arguments)
        try:
            if way != VLLM and engine.unsupported:
                raise ModelError(f"nothing to measure: {engine.unsupported}")
            await _answer(engine, prompts[0][::-1], "warm", 8, _Course())
            return await _course(engine, prompts, wanted.tokens_out)
        finally:
            await engine.close()


async def _course(engine: Engine, prompts: list[list[int]], num_tokens: int) -> _Course:
    """Ask all at once, and watch."""
    course, (_, before), begin = _Course(), kv_account(), time.perf_counter()
    progress: list[int] = [0]

    def sample() -> None:
        kv_use, preemptions = kv_account()
        course.seconds.append(time.perf_counter() - begin)
        course.kv_use.append(kv_use)
        course.preemptions.append(preemptions - before)
        course.tokens.append(progress[0])

    async def watch() -> None:
        while True:
            sample()
            await asyncio.sleep(_SAMPLED_S)

    watching = asyncio.create_task(watch())
    asked = (_answer(engine, prompt, f"{i}", num_tokens, course, progress) for i, prompt in enumerate(prompts))
    course.answers = await asyncio.gather(*asked)
    watching.cancel()
    sample()
    return course


async def _answer(
    engine: Engine, prompt: list[int], salt: str, num_tokens: int, course: _Course, progress: list[int] | None = None
) -> tuple[int, ...]:
    tokens: list[int] = []
    async for output in engine.generate(prompt, max_tokens=num_tokens, salt=salt, ignore_eos=True):
        tokens += output.token_ids
        course.num_resumed += output.num_resumed_tokens
        if progress is not None:
            progress[0] += len(output.token_ids)
    return tuple(tokens)


def _cell(row: Row) -> tuple[int, int, float]:
    return row["block_tokens"], row["tokens_in"], row["share"]


def draw(rows: Sequence[Row], out: Path) -> None:
    """Draw KV use, preemptions and tokens over time: a column for each size of blocks, of prompts, and of memory."""
    cells = list(dict.fromkeys(_cell(row) for row in rows))
    names = (("kv_use", "KV in use, %"), ("preemptions", "preemptions"), ("tokens", "tokens of answers"))
    size = (4.5 * len(cells), 8)
    figure, axes = plt.subplots(3, len(cells), figsize=size, squeeze=False, sharex="col", layout="constrained")
    for column, cell in zip(axes.T, cells, strict=True):
        for row in (row for row in rows if _cell(row) == cell):
            course = row["course"]
            for ax, (name, _) in zip(column, names, strict=True):
                values = np.array(course[name]) * (100 if name == "kv_use" else 1)
                label = f"{row['way']}, {row['tokens_per_s']:.0f} tokens/s"
                ax.plot(course["seconds"], values, color=_COLORS[row["way"]], label=label)
        block_tokens, tokens_in, share = cell
        title = f"memory for {share:.0%} of the KV\nprompts of {tokens_in} tokens, blocks of {block_tokens}"
        column[0].set_title(title, fontsize=10)
        column[-1].set_xlabel("seconds")
        column[-1].legend(fontsize=8)
    for ax, (_, label) in zip(axes[:, 0], names, strict=True):
        ax.set_ylabel(label)
    for ax in axes.flat:
        ax.grid(alpha=0.3)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)
    plt.close(figure)
