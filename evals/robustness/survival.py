"""`ragkv eval survival`: conversations whose stored KV has to outlive restarts, kills, eviction and damage.

Each answer is compared with that of vLLM alone, greedily and token by token; in float32 no two may differ. Several
users talk at a time and want more memory than there is. Between two turns the engine is left alone (others evict what
it has), closed and started again, or killed while it answers; what it hadn't answered is asked again.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from ragkv.config import Config
from ragkv.engine.engine import Engine
from ragkv.errors import ConfigError, EngineStoppedError
from ragkv.evals.beside_vllm import Timed, ask, folder, start
from ragkv.evals.experiment import Progress, Row
from ragkv.evals.parameters import Chat, Survival
from ragkv.evals.robustness.faults import Part, Round
from ragkv.evals.robustness.prefix_damage import damage
from ragkv.evals.robustness.victim import Victim, note
from ragkv.evals.workloads.chat import Turn, talks

_EVENTS = ("nothing", "restart", "nothing", "kill")
_LONGEST_S = 1.5  # from the first question of a group until the engine is killed
_LEAST_TOKENS, _MOST_TOKENS = 390, 640  # of a prompt whose stored KV is damaged
_NUM_DAMAGED = 10  # prompts
_UNLIMITED_GIB = 1e6  # so that all that is worth it is stored


async def run(config: Config, wanted: Survival, progress: Progress) -> AsyncIterator[Row]:
    """Yield a row for what happens between turns, and one for each kind of damage."""
    unlimited = config.store.model_copy(update={"prefix_gib_per_hour": _UNLIMITED_GIB})
    config = config.model_copy(update={"store": unlimited})
    chat = Chat(wanted.data, wanted.conversations or _NUM_DAMAGED, tokens=wanted.tokens, kv_tokens=wanted.kv_tokens)
    found = [talk[: wanted.turns] for talk in talks(config, chat)]
    with folder() as temporary:
        alone = await start(config, Path(temporary), wanted.kv_tokens, alone=True)
        try:
            if wanted.conversations:
                for part in await _converse(config, wanted, found, alone, Path(temporary), progress):
                    yield part.row()
            if wanted.damages:
                prompts = [
                    turn.token_ids
                    for talk in found
                    for turn in talk
                    if _LEAST_TOKENS < len(turn.token_ids) < _MOST_TOKENS
                ]
                if not prompts:
                    limits = f"{_LEAST_TOKENS} to {_MOST_TOKENS} tokens"
                    raise ConfigError(f"no turn of {limits} among --conversations {wanted.conversations}")
                async for row in damage(config, wanted, prompts[:_NUM_DAMAGED], alone, Path(temporary), progress):
                    yield row
        finally:
            await alone.close()


async def _converse(
    config: Config,
    wanted: Survival,
    conversations: Sequence[list[Turn]],
    alone: Engine,
    folder: Path,
    progress: Progress,
) -> list[Part]:
    rng = random.Random(wanted.seed)
    parts = {event: Part(f"between turns: {event}") for event in dict.fromkeys(_EVENTS)}
    groups = [conversations[i : i + wanted.users] for i in range(0, len(conversations), wanted.users)]
    victim = Victim(config, folder, wanted.kv_tokens)
    await victim.start()
    try:
        num_events = 0
        for i, group in enumerate(groups):
            for number in range(wanted.turns):
                turns = [talk[number].token_ids for talk in group if len(talk) > number]
                event = _EVENTS[num_events % len(_EVENTS)] if number else "nothing"
                num_events += bool(number)
                begin = time.monotonic()
                expected = [await ask(alone, turn, wanted.tokens) for turn in turns]
                found = await _survive(victim, turns, wanted.tokens, event, rng)
                part = parts[event]
                part.seconds += time.monotonic() - begin
                for j, (a, b) in enumerate(zip(found, expected, strict=True)):
                    is_same = a.token_ids == b.token_ids
                    problem = f"turn {number + 1} of {a.num_tokens} tokens: {a.token_ids} and not {b.token_ids}"
                    outcome = "from the disk" if a.stored else "from memory" if a.prefix else "computed"
                    note(part, Round(i * wanted.users + j, outcome, None if is_same else problem))
            progress.update("conversations", min(len(conversations), (i + 1) * wanted.users), len(conversations))
    finally:
        await victim.engine.close()
    return list(parts.values())


async def _survive(
    victim: Victim, turns: Sequence[list[int]], max_tokens: int, event: str, rng: random.Random
) -> list[Timed]:
    """Ask these at once after the event, or with it."""
    if event == "restart":
        await victim.restart()
    asked = [asyncio.ensure_future(victim.ask(turn, max_tokens)) for turn in turns]
    if event == "kill":
        await asyncio.sleep(rng.uniform(0, _LONGEST_S))
        victim.kill()
    answers = await asyncio.gather(*asked, return_exceptions=True)
    lost = [answer for answer in answers if isinstance(answer, BaseException)]
    if others := [error for error in lost if event != "kill" or not isinstance(error, EngineStoppedError)]:
        raise others[0]
    if event == "kill":
        await victim.restart()
    again = await asyncio.gather(
        *(victim.ask(turn, max_tokens) for turn, answer in zip(turns, answers, strict=True) if answer in lost)
    )
    anew = iter(again)
    return [next(anew) if isinstance(answer, BaseException) else answer for answer in answers]
