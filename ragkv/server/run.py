"""The server's process: socket, signals, shutdown, and the engine's restarts."""

import asyncio
import gc
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, ExitStack
from typing import TYPE_CHECKING, Any

import uvicorn

from ragkv.config import Config, ServerConfig
from ragkv.errors import ConfigError
from ragkv.machine import return_large_blocks
from ragkv.server.app import create_app
from ragkv.server.gate import is_loopback
from ragkv.server.telemetry import export_traces, log_as
from ragkv.server.tenants import Tenants

if TYPE_CHECKING:
    from ragkv.pipeline import Pipeline

logger = logging.getLogger(__name__)

_CHECK_S, _RETRY_S = 1, 10  # between checks of the engine; after a failed start
GRACE_S = 30  # how long answers in progress may take to finish after SIGTERM


def serve(config: Config, open_tenants: Callable[[], AbstractAsyncContextManager[Tenants]]) -> None:
    """Open the pipelines and answer requests until SIGTERM or SIGINT; answers in progress get `GRACE_S` to finish.

    Raises ConfigError, before anything is loaded, for an address or a key that can't be used.
    """
    has_keys = bool(config.holders())
    config.operators()
    log_as(config.server.log)
    export_traces()
    return_large_blocks()
    with bind(config.server, has_keys=has_keys) as listener:
        # Also while the model loads: run every `finally`, so that no engine process outlives this one.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        asyncio.run(_serve(listener, open_tenants))


def bind(config: ServerConfig, *, has_keys: bool) -> socket.socket:
    where = f"{config.host}:{config.port}"
    remedy = "choose another with --host and --port (RAGKV_SERVER__HOST, RAGKV_SERVER__PORT)"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
        with ExitStack() as opened:
            listener = opened.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            if not has_keys and not is_loopback(str(address[0])):
                raise ConfigError(
                    f"{where} can be reached from other machines, and no key is asked for; make one with `ragkv key "
                    "NAME` and set it as server.keys (RAGKV_SERVER__KEYS), or listen on 127.0.0.1"
                )
            opened.pop_all()  # it stays open
            return listener
    except OSError as error:
        raise ConfigError(f"can't listen on {where}: {error.strerror}; {remedy}") from error


async def _serve(listener: socket.socket, open_tenants: Callable[[], AbstractAsyncContextManager[Tenants]]) -> None:
    async with open_tenants() as tenants:
        settings = uvicorn.Config(
            create_app(tenants), lifespan="off", timeout_graceful_shutdown=GRACE_S, log_config=None, access_log=False
        )
        gc.collect()
        gc.freeze()  # what lives as long as the server: to look through it takes seconds, in which no stream goes on
        host, port = listener.getsockname()[:2]
        logging.getLogger("uvicorn.error").info("Listening on http://%s:%d", f"[{host}]" if ":" in host else host, port)
        tenants.start()
        keeper = asyncio.create_task(_keep_running(tenants.main.pipeline))
        try:
            await listen(uvicorn.Server(settings), listener, tenants.config.server.max_pause_s)
        finally:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)
            await tenants.close()


async def listen(server: uvicorn.Server, listener: socket.socket, max_pause_s: float) -> None:
    """Serve at `listener` until `server` is stopped. Close connections whose client, for `max_pause_s`, hasn't
    completed a request's headers, or has received nothing of an answer."""
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * max_pause_s))
    closer = asyncio.create_task(_close_silent(server, max_pause_s))
    try:
        await server.serve(sockets=[listener])
    finally:
        closer.cancel()
        await asyncio.gather(closer, return_exceptions=True)


async def _close_silent(server: uvicorn.Server, max_pause_s: float) -> None:
    """Close silent connections: uvicorn itself waits for the rest of a request's headers without end."""
    since: dict[tuple[Any, object], float] = {}
    while True:
        now = time.monotonic()
        last_requests = [(each, getattr(each, "cycle", None)) for each in server.server_state.connections]
        silent = [(each, last) for each, last in last_requests if last is None or last.response_complete]
        since = {key: since.get(key, now) for key in silent}
        for (connection, _), begin in since.items():
            if now - begin >= max_pause_s:
                connection.transport.close()
        await asyncio.sleep(min(1.0, max_pause_s))


async def _keep_running(pipeline: "Pipeline") -> None:
    """Restart the engine whenever it has ended."""
    while True:
        await asyncio.sleep(_CHECK_S)
        if not pipeline.is_ready:
            try:
                await pipeline.start()
                logger.warning("the engine runs again")
            except Exception:  # it may be temporary; ragkv_ready is 0 meanwhile
                logger.exception("the engine can't be started; trying again in %d s", _RETRY_S)
                await asyncio.sleep(_RETRY_S)
