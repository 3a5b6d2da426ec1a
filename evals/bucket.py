"""A real S3 server (moto's) in a process of its own, and a proxy before it that slows it down or takes it away."""

import asyncio
import importlib.util
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

import obstore
from obstore.store import S3Store

from ragkv.errors import ModelError

_KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
_PIECE = 1 << 16
_START_S = 60.0


def is_installed() -> bool:
    return importlib.util.find_spec("moto") is not None


@contextmanager
def s3_server() -> Iterator[int]:
    """Yield the port of a server without buckets. Raises ModelError if it doesn't start."""
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + _START_S
        while not _answers(port):
            if server.poll() is not None or time.monotonic() > end:
                raise ModelError(f"the S3 server doesn't start: {' '.join(command)}")
            time.sleep(0.1)
        yield port
    finally:
        server.terminate()
        server.wait()


def _answers(port: int) -> bool:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/moto-api/", timeout=5).close()
    except OSError:
        return False
    return True


class Proxy:
    """A way to the server that can be slow or closed.

    bytes_per_s: of all answers together; sent_per_s: of all that is sent; None: as fast as it goes.

    state: "open"; "closed": nobody listens to a connection; "silent": it is listened to, and never answered.
    """

    def __init__(self, target: int) -> None:
        self._target, self._writers, self.num_bytes = target, set[asyncio.StreamWriter](), 0
        self._free_at = {"answers": 0.0, "requests": 0.0}
        self.set()
        self._loop = asyncio.new_event_loop()
        ready = threading.Event()

        def run() -> None:
            asyncio.set_event_loop(self._loop)
            self._server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
            self.port: int = self._server.sockets[0].getsockname()[1]
            ready.set()
            self._loop.run_forever()

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        ready.wait()

    def set(self, state: str = "open", bytes_per_s: float | None = None, sent_per_s: float | None = None) -> None:
        """Change it for all connections, those that are open too."""
        self.state = state
        self._rates = {"answers": bytes_per_s, "requests": sent_per_s}
        if state == "closed":
            self._loop.call_soon_threadsafe(self._abort)

    def _abort(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.state == "closed":
            writer.transport.abort()
            return
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._target)
        both = {writer, there_writer}
        self._writers |= both
        with suppress(asyncio.CancelledError):  # at the end; it has no other
            await asyncio.gather(
                self._pass(reader, there_writer, "requests"), self._pass(there_reader, writer, "answers")
            )
        self._writers -= both

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, what: str) -> None:
        try:
            while data := await reader.read(_PIECE):
                while self.state == "silent":
                    await asyncio.sleep(0.05)
                if rate := self._rates[what]:
                    now = asyncio.get_running_loop().time()
                    self._free_at[what] = max(self._free_at[what], now) + len(data) / rate
                    await asyncio.sleep(self._free_at[what] - now)
                self.num_bytes += len(data)
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    def close(self) -> None:
        async def stop() -> None:
            self._server.close()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            await asyncio.sleep(0)

        asyncio.run_coroutine_threadsafe(stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Bucket:
    """One bucket behind a proxy, as an operator and as a thief see it.

    port: of the server. environment: the variables with which a process finds the bucket, by `url`.
    """

    def __init__(self, port: int) -> None:
        self.name = f"kv-{uuid.uuid4().hex[:8]}"
        self.proxy, self._address = Proxy(port), f"http://127.0.0.1:{port}"
        self.url = f"s3://{self.name}/some/prefix"
        self.environment = {**_KEYS, "AWS_ENDPOINT": f"http://127.0.0.1:{self.proxy.port}"}
        _call(urllib.request.Request(f"{self._address}/{self.name}", method="PUT"))
        self._store = S3Store(
            self.name,
            endpoint=self._address,
            region="us-east-1",
            access_key_id="key",
            secret_access_key="secret",
            client_options={"allow_http": True},
        )

    def objects(self) -> dict[str, bytes]:
        """Return all objects, by name."""
        names = [each["path"] for page in obstore.list(self._store) for each in page]
        found = {}
        for name in names:
            with suppress(FileNotFoundError):  # it is deleted just now
                found[name] = bytes(obstore.get(self._store, name).bytes())
        return found

    def write(self, name: str, data: bytes) -> None:
        obstore.put(self._store, name, data)

    def num_unfinished(self) -> int:
        """Count uploads whose parts are kept out of sight."""
        return _call(urllib.request.Request(f"{self._address}/{self.name}?uploads")).count(b"<Upload>")

    def close(self) -> None:
        self.proxy.close()


def _call(request: urllib.request.Request) -> bytes:
    with urllib.request.urlopen(request, timeout=30) as answer:
        data: bytes = answer.read()
        return data


@contextmanager
def new_bucket(port: int) -> Iterator[Bucket]:
    """Make a bucket, to which this process and those that it starts have the keys."""
    bucket = Bucket(port)
    before = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    for name in before:
        del os.environ[name]
    os.environ.update(bucket.environment)
    try:
        yield bucket
    finally:
        for name in bucket.environment:
            os.environ.pop(name, None)
        os.environ.update(before)
        bucket.close()
