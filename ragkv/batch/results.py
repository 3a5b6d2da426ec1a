"""The answers of a batch, in OpenAI's format: appended to a file as they come, so that a new run goes on from there."""

import fcntl
import json
import os
import uuid
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from ragkv.errors import BusyError, ConfigError, StoreError
from ragkv.files import sync_folder

_HEAD = b'{"id": "batch_req_'  # how each line begins
_SYNC_LINES = 64  # as many answers are computed again after a loss of power


class Results:
    """The file, open for one run at a time.

    done: the custom_ids that it has already. What a killed run left of a line is cut off. Raises BusyError if another
    run writes it, ConfigError for a file that holds something else, StoreError if it can't be written.
    """

    def __init__(self, file: Path) -> None:
        self.path = file
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            self._file = file.open("a+b")
            sync_folder(file.parent)
        except OSError as error:
            raise StoreError(f"can't write {file}: {error.strerror}; choose another --out") from error
        self._unsynced = 0
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.done = self._read()
        except BlockingIOError:
            self._file.close()
            raise BusyError(f"another run is writing {file}; wait for it, or choose another --out") from None
        except (ConfigError, OSError):
            self._file.close()
            raise

    def _read(self) -> set[str]:
        done, end = set[str](), 0
        self._file.seek(0)
        for number, line in enumerate(self._file, 1):
            try:
                if line[: len(_HEAD)] != _HEAD[: len(line)]:
                    raise ValueError("it is something else")
                if not line.endswith(b"\n"):  # a run was killed while it wrote
                    break
                done.add(str(json.loads(line)["custom_id"]))
            except (ValueError, KeyError, TypeError):
                raise ConfigError(
                    f"line {number} of {self.path} isn't a batch's answer; choose another --out, or move the file away"
                ) from None
            end += len(line)
        self._file.truncate(end)
        return done

    def add(self, custom_id: str, status: int, body: Mapping[str, Any]) -> None:
        """Append an answer, or with another status than 200 the error in its place. Raises StoreError."""
        response = {"status_code": status, "request_id": f"req-{uuid.uuid4().hex}", "body": body}
        fields = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id, "response": response, "error": None}
        try:
            self._file.write(json.dumps(fields, ensure_ascii=False).encode() + b"\n")
            self._file.flush()
            self._unsynced += 1
            if self._unsynced >= _SYNC_LINES:
                self._sync()
        except OSError as error:
            raise StoreError(f"can't write {self.path}: {error.strerror}; what is in it stays, run it again") from error
        self.done.add(custom_id)

    def _sync(self) -> None:
        os.fsync(self._file.fileno())
        self._unsynced = 0

    def __enter__(self) -> "Results":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError) if error else nullcontext(), self._file:  # a full disk was reported already
            self._sync()
