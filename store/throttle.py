"""A slower disk than there is, for evaluations."""

import time
from collections.abc import Hashable


class Throttle:
    """Reads what it is asked for one after the other, at `mib_s` MiB/s, while its caller does other things."""

    def __init__(self, mib_s: float) -> None:
        self._bytes_s = mib_s * (1 << 20)
        self._free_at = 0.0
        self._ready_at: dict[Hashable, float] = {}

    def ask(self, what: Hashable, num_bytes: int) -> None:
        """Begin to read it once all that was asked for before is read; returns at once."""
        if what not in self._ready_at:
            self._free_at = max(self._free_at, time.monotonic()) + num_bytes / self._bytes_s
            self._ready_at[what] = self._free_at

    def wait(self, what: Hashable, num_bytes: int) -> None:
        """Return when it is read."""
        self.ask(what, num_bytes)
        time.sleep(max(0.0, self._ready_at.pop(what) - time.monotonic()))
