"""An engine that is killed and started again, and what came of one round of that."""

import os
import signal
from pathlib import Path

import psutil

from ragkv.config import Config
from ragkv.engine.engine import Engine
from ragkv.evals.beside_vllm import Timed, ask, start
from ragkv.evals.robustness.faults import Part, Round


class Victim:
    """ragkv's engine, and its processes."""

    def __init__(self, config: Config, folder: Path, kv_tokens: int) -> None:
        self._config, self.folder, self._kv_tokens = config, folder, kv_tokens
        self._processes: list[psutil.Process] = []
        self.engine: Engine

    async def start(self) -> None:
        others = set(psutil.Process().children(recursive=True))
        self.engine = await start(self._config, self.folder, self._kv_tokens, alone=False)
        self._processes = [each for each in psutil.Process().children(recursive=True) if each not in others]

    async def restart(self) -> None:
        await self.engine.close()
        await self.start()

    def kill(self) -> None:
        for process in self._processes:
            try:
                os.kill(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    async def ask(self, token_ids: list[int], max_tokens: int, salt: str | None = None) -> Timed:
        return await ask(self.engine, token_ids, max_tokens, "session", salt)


def note(part: Part, played: Round) -> None:
    part.num_rounds += 1
    part.outcomes[played.outcome] += 1
    if played.problem is not None:
        part.failures.append(played)
