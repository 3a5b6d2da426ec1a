"""What SQLite doesn't wait for by itself."""

import sqlite3
import time
from collections.abc import Callable

USE_WAL = "PRAGMA journal_mode = WAL"
_PAUSE_S = 0.01


def when_free(action: Callable[[], object], wait_s: float) -> None:
    """Do it, and again for as long as another connection is in the way. Raises sqlite3.Error, of those after `wait_s`.

    For `USE_WAL`: while another connection does the same to a new file, SQLite refuses at once, whatever the timeout.
    """
    end = time.monotonic() + wait_s
    while True:
        try:
            action()
            return
        except sqlite3.OperationalError as error:
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)  # Python's own errors have none
            if code & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() >= end:
                raise
        time.sleep(_PAUSE_S)
