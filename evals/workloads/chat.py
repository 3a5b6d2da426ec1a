"""`ragkv eval chat`: real conversations, whose KV leaves vLLM's memory between two turns, next to vLLM and LMCache.

Users talk at the same time, each waiting a while between an answer and the next question. A group of conversations goes
to one engine after the other, so that all see the same arrivals. The history is what the data has, also its
answers: of these, KV was computed with the question after them only.
"""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from transformers import AutoTokenizer

from ragkv import models
from ragkv.config import Config
from ragkv.engine.engine import Engine
from ragkv.errors import ConfigError
from ragkv.evals.beside_vllm import VLLM, Timed, ask, beside_vllm, folder, in_turn, peers
from ragkv.evals.experiment import Progress, Row
from ragkv.evals.parameters import Chat

_FILE = Path("sharegpt/sharegpt_multiturn_en.json")
_BINS = ((0, 1024), (1024, 2048), (2048, 1 << 30))  # tokens of a prompt
_LEAST_TURNS = 3
_ROLES = {"human": "user", "gpt": "assistant"}
_COMMON = "You are a careful assistant. Answer truthfully, say what you don't know, and keep to what was asked. "


@dataclass(frozen=True)
class Turn:
    """One question, asked of each engine. is_later: not the first of its conversation."""

    token_ids: list[int]
    is_later: bool


async def run(config: Config, wanted: Chat, progress: Progress) -> AsyncIterator[Row]:
    """Yield a row for each engine and length of prompt, of the talks and of the first turns after a restart."""
    all_talks = talks(config, wanted)
    groups = [all_talks[i : i + wanted.users] for i in range(0, len(all_talks), wanted.users)]
    with folder() as temporary:
        async with peers(Path(temporary), uncached=wanted.uncached, lmcache=wanted.lmcache) as others:
            async with beside_vllm(config, Path(temporary), wanted.kv_tokens, others) as engines:
                asked: dict[str, list[Timed]] = {name: [] for name in engines}
                seconds = dict.fromkeys(engines, 0.0)
                for i, group in enumerate(groups):
                    progress.update("conversations", i * wanted.users, len(all_talks))
                    for name in in_turn(engines, i):
                        begin = time.perf_counter()
                        asked[name] += await _talk(engines[name], group, wanted, random.Random(i))
                        seconds[name] += time.perf_counter() - begin
            is_first = [i == 0 for talk in all_talks for i, _ in enumerate(talk)]
            for part, wants_first in (("first turns", True), ("later turns", False)):
                those = {
                    name: [t for t, first in zip(timed, is_first, strict=True) if first == wants_first]
                    for name, timed in asked.items()
                }
                for row in _rows(part, those, wanted):
                    # of all turns, with the pauses between them
                    took_s = seconds[row["engine"]]
                    yield row | {"seconds": round(took_s, 1), "turns_per_s": round(len(is_first) / took_s, 4)}
            progress.update("starting the engines again")
            async with beside_vllm(config, Path(temporary), wanted.kv_tokens, others) as engines:
                last: dict[str, list[Timed]] = {name: [] for name in engines}
                for engine in engines.values():  # the first forward of such a length is slow in itself
                    await ask(engine, [1] * 512, wanted.tokens, "once")
                for i, talk in enumerate(all_talks):
                    for name in in_turn(engines, i):
                        last[name].append(await ask(engines[name], talk[-1].token_ids, wanted.tokens, "session"))
            for row in _rows("after a restart", last, wanted):
                yield row


async def _talk(engine: Engine, group: Sequence[list[Turn]], wanted: Chat, rng: random.Random) -> list[Timed]:
    """Let a group of users talk at the same time. Returns all of their turns, in an order that is always the same."""
    pauses = [[rng.expovariate(1 / wanted.think_s) if wanted.think_s else 0.0 for _ in talk] for talk in group]

    async def one(talk: list[Turn], waits: list[float]) -> list[Timed]:
        timed = []
        for turn, wait in zip(talk, waits, strict=True):
            await asyncio.sleep(wait)
            keep = "session" if turn.is_later else None  # as the endpoint does
            timed.append(await ask(engine, turn.token_ids, wanted.tokens, keep))  # type: ignore[arg-type]
        return timed

    return [timed for talk in await asyncio.gather(*map(one, group, pauses)) for timed in talk]


def _rows(part: str, asked: dict[str, list[Timed]], wanted: Chat) -> list[Row]:
    rows: list[Row] = []
    for low, high in _BINS:
        for name, all_timed in asked.items():
            timed = [each for each in all_timed if low <= each.num_tokens < high]
            if not timed:
                continue
            ttfts = sorted(1e3 * each.ttft_s for each in timed)
            num_tokens = sum(each.num_tokens for each in timed)
            row: Row = {
                "part": part,
                "engine": name,
                "from_tokens": low,
                "turns": len(timed),
                "ttft_ms": round(median(ttfts), 1),
                "ttft_p90_ms": round(ttfts[int(0.9 * len(ttfts))], 1),
                "latency_ms": round(median(1e3 * each.total_s for each in timed), 1),
                "prefix_share": round(sum(each.prefix for each in timed) / num_tokens, 4),
                "stored_share": round(sum(each.stored for each in timed) / num_tokens, 4),
                "users": wanted.users,
                "answers_that_differ": sum(
                    a.token_ids != b.token_ids for a, b in zip(all_timed, asked[VLLM], strict=True)
                ),
                "answers": len(all_timed),
            }
            rows.append(row)
    return rows


def talks(config: Config, wanted: Chat) -> list[list[Turn]]:
    """Return the first conversations of at least three turns, each up to the last turn that fits.

    Raises ConfigError if there are none.
    """
    file = wanted.data / _FILE
    try:
        conversations = json.loads(file.read_text())
    except OSError as error:
        raise ConfigError(f"no conversations in {file}: {error.strerror}; name the folder by --data") from error
    tokenizer = AutoTokenizer.from_pretrained(models.resolve(config.model.name, config.home))
    most = min(config.model.max_model_len or wanted.kv_tokens, wanted.kv_tokens) - wanted.tokens - 1
    found: list[list[Turn]] = []
    for conversation in conversations:
        messages = [
            {"role": _ROLES[turn["from"]], "content": turn["value"]}
            for turn in conversation["conversations"]
            if turn["from"] in _ROLES
        ]
        if len(found) < wanted.shared * wanted.conversations:
            messages.insert(0, {"role": "system", "content": _COMMON * 20})
        talk: list[Turn] = []
        for i, message in enumerate(messages):
            if message["role"] != "user":
                continue
            text = tokenizer.apply_chat_template(messages[: i + 1], tokenize=False, add_generation_prompt=True)
            token_ids = tokenizer.encode(text, add_special_tokens=False)
            if len(token_ids) > most:
                break
            talk.append(Turn(token_ids, is_later=bool(talk)))
        if len(talk) >= _LEAST_TURNS and len(talk[-1].token_ids) >= wanted.least_tokens:
            found.append(talk if wanted.turns is None else talk[-wanted.turns :])
        if len(found) == wanted.conversations:
            break
    if not found:
        raise ConfigError(f"no conversation in {file} has {wanted.least_tokens} to {most} tokens; lower --least-tokens")
    return found
