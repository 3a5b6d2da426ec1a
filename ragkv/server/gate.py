"""The gate in front of the app: checks keys, origins and sizes of requests before it reads their bodies, with timeouts.

Keys are 256 random bits, so that a plain SHA-256 of them can't be inverted; the settings have only the hashes.
"""

import asyncio
import hashlib
import hmac
import ipaddress
import secrets
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ragkv.config import MAIN
from ragkv.server.wire import error_body

MAX_BODY_BYTES = 8 << 20
MAX_HELD_BYTES = 512 << 20  # of all bodies of one tenant's requests in progress
MIN_BYTES_PER_S = 1024  # of a body, on average
UPLOADS = "/v1/documents"
OPERATORS_BELOW = "/v1/store/"
OPEN = {"/", "/healthz", "/readyz", "/docs", "/openapi.json"}  # without a key; they reveal nothing that is indexed
OPEN_BELOW = "/page/"
_OPERATORS_ONLY = "calls below /v1/store need one of server.operator_keys, as 'Authorization: Bearer KEY'"
_PREFIX = "ragkv-"
_SAFE = ("GET", "HEAD", "OPTIONS")
_OWN = ("same-origin", "none")  # of Sec-Fetch-Site


def new_key() -> tuple[str, str]:
    """Return a new key, and its hash for the settings."""
    key = _PREFIX + secrets.token_urlsafe(32)
    return key, hash_of(key)


def hash_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def is_loopback(address: str) -> bool:
    """Return whether a numeric address, as a socket has it, is loopback."""
    return ipaddress.ip_address(address.split("%")[0]).is_loopback


def _is_local(host: str) -> bool:
    """Return whether `host` is localhost or an address, with or without a port."""
    name = host.removeprefix("[").partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    if name.lower() in ("", "localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class Gate:
    """ASGI middleware that refuses requests, or lets them pass with `scope["tenant"]` set.

    holders: tenants by the SHA-256 of their keys; without any, everybody is the tenant `MAIN`. operators: operators by
    the SHA-256 of theirs, set as `scope["operator"]`: these keys, and no others, open what is below `OPERATORS_BELOW`,
    and nothing else. max_upload_bytes: of a body with documents. max_pause_s: how long a body may pause.

    A connection stays open after a refusal, and uvicorn discards the rest of the body (until `listen` closes silent
    ones): if it were closed with bytes unread, TCP would reset it, and a client still sending would see no answer.
    """

    def __init__(
        self,
        app: ASGIApp,
        holders: Mapping[str, str],
        operators: Mapping[str, str],
        max_upload_bytes: int,
        max_pause_s: float,
    ) -> None:
        self._app, self._holders, self._operators = app, dict(holders), dict(operators)
        self._max_upload_bytes, self._max_pause_s = max_upload_bytes, max_pause_s
        self._held_bytes: Counter[str | None] = Counter()  # by tenant

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        max_bytes = self._max_upload_bytes if scope["path"] == UPLOADS else MAX_BODY_BYTES
        authorization = headers.get("authorization", "")
        tenant = _holder(self._holders, authorization) if self._holders else MAIN
        operator = _holder(self._operators, authorization)
        scope["tenant"], scope["operator"] = tenant, operator
        is_open = scope["path"] in OPEN or scope["path"].startswith(OPEN_BELOW)
        is_operators = bool(self._operators) and scope["path"].startswith(OPERATORS_BELOW)
        if (problem := self._cross_site(scope["method"], headers)) is not None:
            response = JSONResponse(error_body("Forbidden", problem), 403)
        elif is_operators and operator is None and self._holders and tenant is not None:
            response = JSONResponse(error_body("Forbidden", f"the key is a tenant's; {_OPERATORS_ONLY}"), 403)
        elif is_operators and operator is None:
            message = f"an operator's key is missing or unknown; {_OPERATORS_ONLY}"
            response = JSONResponse(error_body("Unauthorized", message), 401, {"WWW-Authenticate": "Bearer"})
        elif tenant is None and not is_open and not is_operators:
            message = "a key is missing or unknown; send it as 'Authorization: Bearer KEY'"
            response = JSONResponse(error_body("Unauthorized", message), 401, {"WWW-Authenticate": "Bearer"})
        elif (length := headers.get("content-length", "")).isdecimal() and int(length) > max_bytes:
            response = JSONResponse(error_body("ContentTooLarge", _too_large(max_bytes)), 413)
        else:
            with self._guarded(receive, max_bytes, operator if is_operators else tenant) as guarded:
                await self._app(scope, guarded, send)
            return
        await response(scope, receive, send)

    @contextmanager
    def _guarded(self, receive: Receive, max_bytes: int, tenant: str | None) -> Iterator[Receive]:
        """Yield a `receive` that raises HTTPException for a body that is too large, alone or with all others of the
        tenant, that pauses for `max_pause_s`, or that is slower than `MIN_BYTES_PER_S` until it is as late."""
        num_bytes, held = 0, self._held_bytes
        left_s, is_whole = self._max_pause_s, False

        async def guarded() -> Message:
            nonlocal num_bytes, left_s, is_whole
            if is_whole:  # the next message is the client's disconnect
                return await receive()
            begin = time.monotonic()
            try:
                async with asyncio.timeout(left_s):
                    message = await receive()
            except TimeoutError:
                late = f"the request's body stopped coming, or came too slowly for {self._max_pause_s:g} s"
                raise HTTPException(408, f"{late}; send it again", {"Connection": "close"}) from None
            is_whole, more = not message.get("more_body", False), len(message.get("body", b""))
            left_s = min(self._max_pause_s, left_s + begin - time.monotonic() + more / MIN_BYTES_PER_S)
            num_bytes += more
            held[tenant] += more
            if num_bytes > max_bytes:
                raise HTTPException(413, _too_large(max_bytes))
            if MAX_HELD_BYTES < held[tenant] != num_bytes:  # a single body may be as large as an upload
                text = f"your requests at a time have more than {MAX_HELD_BYTES} bytes; send fewer"
                raise HTTPException(429, text, {"Retry-After": "1"})
            return message

        try:
            yield guarded
        finally:
            held[tenant] -= num_bytes

    def _cross_site(self, method: str, headers: Headers) -> str | None:
        """Return why a request is refused as cross-site: sent by a page of another site in a user's browser."""
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._holders and not _is_local(host):  # DNS rebinding: another site's name that resolves to here
            return (
                f"without keys only localhost and addresses are answered to, not {host!r}; set server.keys, or let the "
                "proxy send 'Host: localhost'"
            )
        site = headers.get("sec-fetch-site")  # browsers leave it out where the connection isn't secure
        is_ours = origin is None or origin.partition("://")[2] == host if site is None else site in _OWN
        if method not in _SAFE and not is_ours:
            return "pages of other sites may not change anything here; call the API from a server or from this page"
        return None


def _holder(holders: Mapping[str, str], authorization: str) -> str | None:
    """Return whose key it is. All hashes are compared, each in constant time: the time reveals nothing of them."""
    scheme, _, key = authorization.partition(" ")
    given, found = hash_of(key.strip()), None
    for known, holder in holders.items():
        if hmac.compare_digest(given, known):
            found = holder
    return found if scheme.lower() == "bearer" else None


def _too_large(max_bytes: int) -> str:
    return f"the request has more than {max_bytes} bytes; send less"
