"""A real S3 server (moto's) in a process of its own, and a proxy before it that slows it down or takes it away."""

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from contextlib import closing, contextmanager, suppress

import boto3

MIB = 1 << 20
_CREDENTIALS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
_PIECE = 1 << 16


@contextmanager
def s3_server():
    """Yield the port of a server without buckets."""
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(300):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/moto-api/", timeout=5).close()
                break
            except OSError:
                assert server.poll() is None
                time.sleep(0.1)
        yield port
    finally:
        server.terminate()
        server.wait()


class Proxy:
    """A way to the server that can be slow or closed.

    bytes_per_s: of all answers together; sent_per_s: of all that is sent; None: as fast as it goes.

    state: "open"; "closed": nobody listens to a connection; "silent": it is listened to, and never answered.
    """

    def __init__(self, target):
        self._target, self._writers, self.num_bytes = target, set(), 0
        self._free_at = {"answers": 0.0, "requests": 0.0}
        self.set()
        self._loop = asyncio.new_event_loop()
        ready = threading.Event()

        def run():
            asyncio.set_event_loop(self._loop)
            self._server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
            self.port = self._server.sockets[0].getsockname()[1]
            ready.set()
            self._loop.run_forever()

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        ready.wait()

    def set(self, state="open", bytes_per_s=None, sent_per_s=None):
        """Change it for all connections, those that are open too."""
        self.state, self._rates = state, {"answers": bytes_per_s, "requests": sent_per_s}
        if state == "closed":
            self._loop.call_soon_threadsafe(lambda: [writer.transport.abort() for writer in self._writers])

    async def _serve(self, reader, writer):
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

    async def _pass(self, reader, writer, what):
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

    def close(self):
        async def stop():
            self._server.close()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            await asyncio.sleep(0)

        asyncio.run_coroutine_threadsafe(stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Bucket:
    """One bucket behind a proxy, as an operator and as a thief see it."""

    def __init__(self, port):
        self.name = f"kv-{uuid.uuid4().hex[:8]}"
        self.proxy = Proxy(port)
        self.url = f"s3://{self.name}/some/prefix"
        self.environment = {**_CREDENTIALS, "AWS_ENDPOINT": f"http://127.0.0.1:{self.proxy.port}"}
        self._client = boto3.client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{port}",
            region_name="us-east-1",
            aws_access_key_id="key",
            aws_secret_access_key="secret",
        )
        self._client.create_bucket(Bucket=self.name)

    def objects(self):
        """Return all objects, by name."""
        names = [each["Key"] for each in self._client.list_objects_v2(Bucket=self.name).get("Contents", ())]
        found = {}
        for name in names:
            with suppress(self._client.exceptions.NoSuchKey):  # it is deleted just now
                found[name] = self._client.get_object(Bucket=self.name, Key=name)["Body"].read()
        return found

    def write(self, name, data):
        self._client.put_object(Bucket=self.name, Key=name, Body=data)

    def num_unfinished(self):
        """Count uploads whose parts are kept out of sight."""
        return len(self._client.list_multipart_uploads(Bucket=self.name).get("Uploads", ()))

    def close(self):
        self.proxy.close()
        self._client.close()


@contextmanager
def new_bucket(port, monkeypatch):
    bucket = Bucket(port)
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)
    for name in [name for name in os.environ if name.startswith("AWS_") and name not in bucket.environment]:
        monkeypatch.delenv(name)
    try:
        yield bucket
    finally:
        bucket.close()
