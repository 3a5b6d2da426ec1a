"""The server's process: its socket, its signals, its end."""

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Awaitable, Callable

import uvicorn

from ragkv.config import ServerConfig
from ragkv.errors import ConfigError
from ragkv.server.app import create_app
from ragkv.server.gate import is_loopback
from ragkv.server.wire import Pipeline

GRACE_S = 30  # how long a server that is told to stop lets answers in progress finish


def serve(config: ServerConfig, open_pipeline: Callable[[], Awaitable[Pipeline]]) -> None:
    """Open the pipeline and answer requests until SIGTERM or SIGINT; answers in progress get `GRACE_S` to finish.

    Raises ConfigError, before anything is loaded, where the address can't be used.
    """
    with _bind(config) as listener:
        # Also while the model loads: leave through every `finally`, so that no engine process is left behind.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        asyncio.run(_serve(listener, open_pipeline))


def _bind(config: ServerConfig) -> socket.socket:
    where = f"{config.host}:{config.port}"
    remedy = "choose another with --host and --port (RAGKV_SERVER__HOST, RAGKV_SERVER__PORT)"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"can't listen on {where}: {error.strerror}; {remedy}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ConfigError(f"can't listen on {where}: {error.strerror}; {remedy}") from error
    if not config.keys and not is_loopback(str(address[0])):
        listener.close()
        raise ConfigError(
            f"{where} can be reached from other machines, and no key is asked for; make one with `ragkv key NAME` and "
            "set it as server.keys (RAGKV_SERVER__KEYS), or listen on 127.0.0.1"
        )
    return listener


async def _serve(listener: socket.socket, open_pipeline: Callable[[], Awaitable[Pipeline]]) -> None:
    pipeline = await open_pipeline()
    try:
        settings = uvicorn.Config(create_app(pipeline), lifespan="off", timeout_graceful_shutdown=GRACE_S)
        host, port = listener.getsockname()[:2]
        logging.getLogger("uvicorn.error").info("Listening on http://%s:%d", f"[{host}]" if ":" in host else host, port)
        await uvicorn.Server(settings).serve(sockets=[listener])
    finally:
        await pipeline.close()
