"""`python -m ragkv.evals.watched_loop …`: the command `ragkv …`, which writes its event loop's pauses into its home.

A line for each: when it ended, by the clock of all processes (`time.monotonic`), and how many seconds nothing ran but
one step. It also grows where the machine has no core left for the loop.
"""

import asyncio
import os
import time
from pathlib import Path
from typing import TextIO

from ragkv.cli import main

PAUSES = "pauses"  # in the home
_EVERY_S, _SHORT_S = 0.002, 0.005  # between looks; pauses that aren't written


class WatchedLoops(asyncio.DefaultEventLoopPolicy):
    """Makes event loops that write their pauses to `out`."""

    def __init__(self, out: TextIO) -> None:
        super().__init__()
        self._out = out

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        loop = super().new_event_loop()
        loop.create_task(self._watch())  # it ends with the loop
        return loop

    async def _watch(self) -> None:
        while True:
            begin = time.monotonic()
            await asyncio.sleep(_EVERY_S)
            pause_s = (now := time.monotonic()) - begin - _EVERY_S
            if pause_s > _SHORT_S:
                self._out.write(f"{now} {pause_s}\n")


def longest_pause_ms(file: Path, begin: float, end: float) -> float:
    """Return the longest pause that overlaps a time, by `time.monotonic`; 0 if there was none worth a line."""
    pauses = [tuple(map(float, line.split())) for line in file.read_text().splitlines()]
    return 1000 * max((pause_s for ended, pause_s in pauses if ended > begin and ended - pause_s < end), default=0.0)


if __name__ == "__main__":
    with Path(os.environ["RAGKV_HOME"], PAUSES).open("w", buffering=1) as out:
        asyncio.set_event_loop_policy(WatchedLoops(out))
        main()
