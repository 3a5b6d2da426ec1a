"""Timeouts for clients that stall, while they send a request or while they receive the answer."""

import asyncio
import socket
import time
from typing import Any

import uvicorn
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive

MIN_BYTES_PER_S = 1024  # of a body, on average


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


def in_time(receive: Receive, max_pause_s: float) -> Receive:
    """Return `receive` with a timeout: it raises HTTPException for a body that pauses for `max_pause_s`, or that is
    slower than `MIN_BYTES_PER_S` until it is as late."""
    left_s, is_whole = max_pause_s, False

    async def timed() -> Message:
        nonlocal left_s, is_whole
        if is_whole:  # the next message is the client's disconnect
            return await receive()
        begin = time.monotonic()
        try:
            async with asyncio.timeout(left_s):
                message = await receive()
        except TimeoutError:
            text = f"the request's body stopped coming, or came too slowly for {max_pause_s:g} s; send it again"
            raise HTTPException(408, text, {"Connection": "close"}) from None
        is_whole = not message.get("more_body", False)
        left_s += begin - time.monotonic() + len(message.get("body", b"")) / MIN_BYTES_PER_S
        left_s = min(left_s, max_pause_s)
        return message

    return timed
