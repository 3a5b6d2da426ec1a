"""A bucket or a shared folder in which machines share entries: an object for each, with the bytes of its file.

An object is named by its entry's key and the format, below a folder for each chunk, so that all that is of a chunk can
be listed and deleted. Nothing here checks what is read: `ragkv.store.tier` does.

Every call has a time-out and few retries. After an outage calls fail at once for `REST_S`; then one call tries again,
and once that works all do.
"""

import re
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import BaseError
from obstore.store import LocalStore, ObjectStore, from_url

from ragkv.errors import ConfigError, RemoteError
from ragkv.store.record import FORMAT_VERSION, PREFIX_BYTES, ChunkKey

REST_S, LONGEST_REST_S = 10.0, 60.0
PART_BYTES = 4 << 20  # of a larger object, read at a time
_SUFFIX = f".v{FORMAT_VERSION}"
_HASH_CHARS = 32  # of a chunk's hash in hexadecimal
_CONNECT_S, _SLOW_SENDING = 3.0, 6  # of the time-out: an object is sent in one piece
_RETRIES, _FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2, 0.1, 1.0
_PARTS = 8  # that are read at a time
_PAGE = 1000  # names in a reply
_LIST_TRIES = 3
_REMEMBERED_S = 10.0  # of reading


class Breaker:
    """Whether calls are worth a try: not for `REST_S` after one failed; then one of them finds out for the others, and
    if it fails too, they rest for twice as long, up to `LONGEST_REST_S`."""

    def __init__(self) -> None:
        self._lock, self._problem = threading.Lock(), ""
        self._rest_s, self._rests_until, self._is_trying = 0.0, 0.0, False

    def check(self) -> None:
        """Raise RemoteError if calls rest."""
        with self._lock:
            if not self._problem:
                return
            if time.monotonic() < self._rests_until:
                raise RemoteError(self._problem)
            self._is_trying = True
            self._rests_until = time.monotonic() + self._rest_s  # for the others, until this one has found out

    @property
    def rests(self) -> bool:
        return bool(self._problem) and time.monotonic() < self._rests_until

    def failed(self, problem: str) -> None:
        with self._lock:
            if not self._problem or self._is_trying:  # else it began before the calls rested
                self._rest_s = min(2 * self._rest_s, LONGEST_REST_S) if self._is_trying else REST_S
                self._rests_until, self._is_trying = time.monotonic() + self._rest_s, False
            self._problem = problem

    def succeeded(self) -> None:
        with self._lock:
            self._problem, self._is_trying = "", False


class Link:
    """How fast objects come, learned from those that came lately: seconds until the first byte, then bytes a second of
    all that are read at a time. None as long as it isn't known."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_reading, self._since, self._num_bytes, self._seconds = 0, 0.0, 0.0, 0.0
        self.latency_s: float | None = None

    @contextmanager
    def reading(self) -> Iterator[list[int]]:
        """Time what is read inside; the caller appends the bytes of each part to the list."""
        parts: list[int] = []
        self._count(0, 1)
        try:
            yield parts
        finally:
            self._count(sum(parts), -1)

    def _count(self, num_bytes: int, change: int) -> None:
        with self._lock:
            now = time.monotonic()
            if self._num_reading:
                self._seconds += now - self._since
            self._since = now
            self._num_reading += change
            self._num_bytes += num_bytes
            if self._seconds > _REMEMBERED_S:
                self._seconds, self._num_bytes = self._seconds / 2, self._num_bytes / 2

    @property
    def bytes_per_s(self) -> float | None:
        return self._num_bytes / self._seconds if self._num_bytes else None

    def answered(self, seconds: float) -> None:
        self.latency_s = seconds if self.latency_s is None else 0.5 * (self.latency_s + seconds)

    def expected_s(self, num_bytes: float) -> float:
        """Return how long so many bytes take to come; 0 as long as nothing is known."""
        rate = self.bytes_per_s
        return 0.0 if self.latency_s is None or rate is None else self.latency_s + num_bytes / rate


class Remote:
    """The entries in a bucket (s3://, gs://, az://) or a folder (file://), by key. Threads may share it.

    timeout_s: of each request. above: the place that this one is below. Raises ConfigError for a URL that means none;
    the methods raise RemoteError.
    """

    def __init__(self, url: str, timeout_s: float, above: "Remote | None" = None) -> None:
        self.url, self._timeout_s = url, timeout_s
        self.breaker: Breaker = Breaker() if above is None else above.breaker
        self.link: Link = Link() if above is None else above.link
        self._folder = Path(unquote(urlsplit(url).path)) if url.startswith("file:") else None
        self._store = _open(url, timeout_s)
        self._sink = _open(url, _SLOW_SENDING * timeout_s)
        self._parts = ThreadPoolExecutor(_PARTS, thread_name_prefix="ragkv-part")

    def below(self, name: str) -> "Remote":
        """Return a place of its own below this one, whose `sizes` don't tell of it. Both are away, and as fast, at the
        same time."""
        if self._folder is not None:
            with suppress(OSError):  # opening it says so
                (self._folder / name).mkdir(exist_ok=True)
        return Remote(f"{self.url.rstrip('/')}/{name}", self._timeout_s, self)

    def get(self, key: ChunkKey) -> bytes | None:
        """Return an object as it is, unchecked; None if there is none. Larger ones come in several parts at a time."""
        path = _path(key)
        with self._reaching("read"), self.link.reading() as sizes:
            begun_at = time.monotonic()
            try:
                first = obstore.get(self._store, path, options={"range": (0, PART_BYTES)})
            except FileNotFoundError:
                self.link.answered(time.monotonic() - begun_at)
                return None
            except BaseError as error:
                if "InvalidRange" in str(error):  # there is no first byte
                    return b""
                raise
            self.link.answered(time.monotonic() - begun_at)
            size = first.meta["size"]
            head = bytes(first.bytes())
            sizes.append(len(head))

            def read(start: int) -> bytes:
                part = bytes(obstore.get_range(self._store, path, start=start, end=min(start + PART_BYTES, size)))
                sizes.append(len(part))
                return part

            return head + b"".join(self._parts.map(read, range(len(head), size, PART_BYTES)))

    def has(self, key: ChunkKey) -> bool:
        with self._reaching("read"), suppress(FileNotFoundError):
            obstore.head(self._store, _path(key))
            return True
        return False

    def put(self, key: ChunkKey, file: bytes) -> None:
        """Publish an entry's file: all of it at once, in place of what had its name.

        In one request: of one in several parts, a bucket keeps the parts if the process is killed, out of sight.
        """
        with self._reaching("write"):
            obstore.put(self._sink, _path(key), file, use_multipart=False)

    def delete_key(self, key: ChunkKey) -> None:
        with self._reaching("delete from"), suppress(FileNotFoundError):
            obstore.delete(self._store, [_path(key)])

    def delete_chunk(self, chunk_hash: str) -> None:
        """Delete all that is of a chunk, in every format. None of it is listed when this returns."""
        with self._reaching("delete from"):
            self._delete_below(f"{chunk_hash}/")
            if self._folder is not None:  # what a killed process had begun to write isn't listed
                shutil.rmtree(self._folder / chunk_hash, ignore_errors=True)

    def delete_all(self) -> None:
        """Delete all that is here, in every format. None of it is listed when this returns."""
        with self._reaching("delete from"):
            self._delete_below("")
            for each in self._folder.iterdir() if self._folder is not None else ():
                shutil.rmtree(each, ignore_errors=True)

    def _delete_below(self, prefix: str) -> None:
        for _ in range(_LIST_TRIES):
            paths = [meta["path"] for page in obstore.list(self._store, prefix or None) for meta in page]
            if not paths:
                return
            with suppress(FileNotFoundError):  # another machine was quicker
                obstore.delete(self._store, paths)
        raise RemoteError(f"{self.url}/{prefix} still has objects after they were deleted")

    def sizes(self) -> Iterator[tuple[ChunkKey, int]]:
        """Yield the key and size of every entry in this format."""
        with self._reaching("list"):
            for page in obstore.list(self._store, chunk_size=_PAGE):
                for meta in page:
                    if (key := _key_of(meta["path"])) is not None:
                        yield key, meta["size"]

    def check(self) -> None:
        """Find out whether it answers, resting or not."""
        with self._reaching("list", resting=True):
            next(iter(obstore.list(self._store, chunk_size=1)), None)

    def close(self) -> None:
        self._parts.shutdown(cancel_futures=True)

    @contextmanager
    def _reaching(self, verb: str, *, resting: bool = False) -> Iterator[None]:
        if not resting:
            self.breaker.check()
        try:
            yield
        except (BaseError, OSError) as error:
            problem = f"can't {verb} {self.url}: {_first_line(error)}"
            self.breaker.failed(problem)
            raise RemoteError(problem) from error
        self.breaker.succeeded()


def _open(url: str, timeout_s: float) -> ObjectStore:
    try:
        scheme = urlsplit(url).scheme
        if scheme == "file":
            return LocalStore(unquote(urlsplit(url).path))
        if scheme not in ("s3", "gs", "az"):
            raise ValueError("it begins with none of s3://, gs://, az://, file://")
        return from_url(
            url,
            client_options={
                "allow_http": True,  # where an endpoint's address says so
                "connect_timeout": timedelta(seconds=min(_CONNECT_S, timeout_s)),
                "timeout": timedelta(seconds=timeout_s),
            },
            retry_config={
                "max_retries": _RETRIES,
                "retry_timeout": timedelta(seconds=timeout_s),
                "backoff": {
                    "init_backoff": timedelta(seconds=_FIRST_PAUSE_S),
                    "max_backoff": timedelta(seconds=_LONGEST_PAUSE_S),
                    "base": 2,
                },
            },
        )
    except (BaseError, OSError, ValueError) as error:
        raise ConfigError(
            f"store.remote = {url!r} can't be used: {_first_line(error)}. It is s3://BUCKET/PREFIX, gs://BUCKET/PREFIX "
            "or az://CONTAINER/PREFIX, with the provider's own variables in the environment, or file:///FOLDER, a "
            "folder that is there"
        ) from error


def _first_line(error: Exception) -> str:
    """Return an error's message without what is for developers, and without queries, which may be signatures."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return re.sub(r"\?\S*", "", lines[0])[:300].rstrip(" .:")


def _path(key: ChunkKey) -> str:
    name = key.prefix().hex()
    return f"{name[:_HASH_CHARS]}/{name[_HASH_CHARS:]}{_SUFFIX}"


def _key_of(path: str) -> ChunkKey | None:
    try:
        prefix = bytes.fromhex(path.removesuffix(_SUFFIX).replace("/", ""))
    except ValueError:
        return None
    key = ChunkKey.parse(prefix) if len(prefix) == PREFIX_BYTES else None
    return key if key is not None and _path(key) == path else None
