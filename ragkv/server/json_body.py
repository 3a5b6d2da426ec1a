"""JSON bodies of requests, read without holding up the event loop, whatever megabytes of them are made of.

No decoder lets other threads run meanwhile. So only what a request's model declares is decoded.
"""

import asyncio
import json
from collections.abc import Callable, Container, Coroutine
from typing import Any

import msgspec
from fastapi import Request, Response
from fastapi.routing import APIRoute

_SMALL = 1 << 12  # bytes of a field's value that are decoded though no model declares the field

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class JsonRoute(APIRoute):
    """A route whose body is a JSON object. Large values of fields that its model lacks stay `msgspec.Raw`."""

    def get_route_handler(self) -> Handler:
        handler, field = super().get_route_handler(), self.body_field
        declared: Container[str] = field.field_info.annotation.model_fields if field else ()  # type: ignore[union-attr]

        class JsonRequest(Request):
            async def json(self) -> Any:
                return await _decoded(await self.body(), declared)

        async def handle(request: Request) -> Response:
            return await handler(JsonRequest(request.scope, request.receive))

        return handle


async def _decoded(body: bytes, declared: Container[str]) -> dict[str, Any]:
    """Decode a JSON object. Raises json.JSONDecodeError if it is none, UnicodeDecodeError if it is no text."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        await asyncio.sleep(0)  # between steps that may take tens of milliseconds each: others first
        decoded = {
            name: msgspec.json.decode(value) if name in declared or len(bytes(value)) <= _SMALL else value
            for name, value in fields.items()
        }
        await asyncio.sleep(0)
        return decoded
    except msgspec.DecodeError as error:
        body.decode()
        raise json.JSONDecodeError(str(error), "", 0) from error
