"""What stands before the app: who may ask, and how much. Nothing of a request is read before it has passed.

Keys are 256 random bits, so that a plain SHA-256 of them can't be searched; only these hashes are in the settings.
"""

import hashlib
import hmac
import ipaddress
import secrets
from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ragkv.server.wire import error_body

MAX_BODY_BYTES = 8 << 20
OPEN = {
    "/",
    "/healthz",
    "/readyz",
    "/docs",
    "/openapi.json",
}  # for probes that have no key; tells nothing of what is indexed
OPEN_BELOW = "/page/"
_PREFIX = "ragkv-"


def new_key() -> tuple[str, str]:
    """A key, and its hash for the settings."""
    key = _PREFIX + secrets.token_urlsafe(32)
    return key, hash_of(key)


def hash_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def is_loopback(address: str) -> bool:
    """Of a numeric address, as a socket has it."""
    return ipaddress.ip_address(address.split("%")[0]).is_loopback


class Gate:
    """ASGI middleware. keys: SHA-256 of each key, by the name of who has it; with none of them everybody may ask."""

    def __init__(self, app: ASGIApp, keys: Mapping[str, str], max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self._app, self._keys, self._max_body_bytes = app, dict(keys), max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        is_open = scope["path"] in OPEN or scope["path"].startswith(OPEN_BELOW)
        if self._keys and not is_open and self._holder(headers.get("authorization", "")) is None:
            message = "a key is missing or unknown; send it as 'Authorization: Bearer KEY'"
            response = JSONResponse(error_body("Unauthorized", message), 401, {"WWW-Authenticate": "Bearer"})
        elif (length := headers.get("content-length", "")).isdecimal() and int(length) > self._max_body_bytes:
            response = JSONResponse(error_body("ContentTooLarge", self._too_large), 413, {"Connection": "close"})
        else:
            await self._app(scope, self._measured(receive), send)
            return
        await response(scope, receive, send)

    def _holder(self, authorization: str) -> str | None:
        """Who has the key. All hashes are compared, each in constant time, so that time tells nothing of them."""
        scheme, _, key = authorization.partition(" ")
        given, found = hash_of(key.strip()), None
        for name, known in self._keys.items():
            if hmac.compare_digest(given, known):
                found = name
        return found if scheme.lower() == "bearer" else None

    @property
    def _too_large(self) -> str:
        return f"the request has more than {self._max_body_bytes} bytes; send less"

    def _measured(self, receive: Receive) -> Receive:
        """As `receive`, for bodies that don't say their length. Raises HTTPException."""
        num_bytes = 0

        async def measured() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_body_bytes:
                raise HTTPException(413, self._too_large)
            return message

        return measured
