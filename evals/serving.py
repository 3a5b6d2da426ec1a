"""A server of its own for an evaluation, over real sockets: started, filled, and always ended."""

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from ragkv.config import Config
from ragkv.errors import RagKVError
from ragkv.evals.watched import as_environment, watched, with_models

_LOG_LINES = 40  # of a server that failed
START_S, FINISH_S = 600, 600  # what the server may take to begin, and to index what was uploaded


@dataclass(frozen=True)
class Served:
    url: str
    process: subprocess.Popen[bytes]
    home: Path

    @property
    def log(self) -> Path:
        return self.home / "serve.log"


@contextmanager
def served(config: Config, module: str = "ragkv", **variables: str) -> Iterator[Served]:
    """Run `ragkv serve` in a new home, with `config`'s models. module: the one that is run as the command.

    The end of the server's log is added to what is raised within.
    """
    with tempfile.TemporaryDirectory(prefix="ragkv-serve-") as name, socket.create_server(("127.0.0.1", 0)) as free:
        home, port = with_models(Path(name), config.home), free.getsockname()[1]
        free.close()
        command = [sys.executable, "-m", module, "serve", "--port", str(port)]
        environment = {**os.environ, **as_environment(config, home), **variables}
        with (home / "serve.log").open("wb") as log, watched(command, environment, log) as process:
            server = Served(f"http://127.0.0.1:{port}", process, home)
            try:
                yield server
            except RagKVError as error:
                lines = server.log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
                raise RagKVError("\n".join([f"{error}; the server's log ends with", *lines])) from error


async def until_ready(client: httpx.AsyncClient) -> None:
    """Wait until questions can be answered. Raises TimeoutError after `START_S`."""
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        try:
            if (await client.get("/readyz")).status_code == 200:
                return
        except httpx.TransportError:
            pass
        await asyncio.sleep(0.5)
    raise TimeoutError(f"the server isn't ready after {START_S} s")


async def index(client: httpx.AsyncClient, texts: dict[str, str]) -> None:
    """Upload documents by name, and wait until they are indexed. Raises RagKVError if one can't be."""
    files = [("files", (name, text.encode())) for name, text in texts.items()]
    accepted = await client.post("/v1/documents", files=files)
    accepted.raise_for_status()
    while (job := (await client.get(accepted.headers["location"])).json())["status"] != "done":
        if job["error"]:
            raise RagKVError(f"what is to be asked about can't be indexed: {job['error']}")
        await asyncio.sleep(0.1)
