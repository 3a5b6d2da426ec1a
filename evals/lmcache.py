"""LMCache beside ragkv: its server in a process of its own, and vLLM's connector for it.

It is no dependency, and asks for other releases of what vLLM needs, so it goes into an environment of its own, together
with ragkv: `pip install 'ragkv[eval]'`, then `pip install lmcache==0.5.6`.
"""

import asyncio
import importlib.util
import os
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

from ragkv.errors import ConfigError, ModelError

_START_S = 120.0
_MEMORY_GB = 4  # of the server, for KV

CHUNK_TOKENS = 128  # as vLLM's blocks on CPU


def require() -> None:
    """Raises ConfigError if LMCache isn't installed here."""
    if importlib.util.find_spec("lmcache") is None:
        remedy = "make an environment with ragkv in which you `pip install lmcache==0.5.6`, and run the command of it"
        raise ConfigError(f"LMCache isn't installed beside {sys.executable}: {remedy}")


@asynccontextmanager
async def server(log: Path) -> AsyncGenerator[dict[str, Any]]:
    """Start LMCache's server. Yields vLLM's engine arguments to use it. Raises ModelError if it doesn't start.

    log: the file for what it prints.
    """
    ports = [_free_port() for _ in range(3)]
    command = [str(Path(sys.executable).parent / "lmcache"), "server", "--chunk-size", str(CHUNK_TOKENS)]
    command += ["--supported-transfer-mode", "auto", "--l1-size-gb", str(_MEMORY_GB), "--eviction-policy", "LRU"]
    for option, port in zip(("--port", "--http-port", "--prometheus-port"), ports, strict=True):
        command += [option, str(port)]
    environment = {**os.environ, "LMCACHE_DISABLE_BANNER": "1", "LMCACHE_TRACK_USAGE": "false"}
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
    try:
        await _until_listening(process, ports[0], log)
        yield {
            "kv_transfer_config": {
                "kv_connector": "LMCacheMPConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": ports[0]},
            }
        }
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait)


async def _until_listening(process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    end = asyncio.get_running_loop().time() + _START_S
    while asyncio.get_running_loop().time() < end and process.poll() is None:
        with closing(socket.socket()) as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        await asyncio.sleep(0.2)
    raise ModelError(f"LMCache's server doesn't start: {log.read_text()[-500:]}")


def _free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
