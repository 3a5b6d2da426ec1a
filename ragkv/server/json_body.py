"""JSON bodies of requests, read without holding up the event loop, whatever megabytes of them are made of.

No decoder lets other threads run meanwhile, nor does pydantic. So only what a request's model declares is decoded, a
piece at a time, and not if it is made of too many values: each becomes an object. Items that have a model are validated
in the same pieces.
"""

import asyncio
import json
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, get_args, get_origin

import msgspec
import numpy as np
from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

_SMALL = 1 << 12  # bytes of a field's value that are decoded though no model declares the field
_PIECE = 1 << 18  # bytes that are decoded at a time: a few milliseconds
_ITEM = 1 << 8  # bytes that are decoded in the time that it takes to make the object of an item
_MOST_FIELDS, _MOST_VALUES = 1000, 100_000  # of the object itself; names in it at any depth, and values of a field
_NAME, _VALUE = ord(":"), ord(",")  # what each but the first comes with

Model = type[BaseModel]
Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class JsonRoute(APIRoute):
    """A route whose body is a JSON object. Large values of fields that its model lacks stay `msgspec.Raw`."""

    def get_route_handler(self) -> Handler:
        handler, field = super().get_route_handler(), self.body_field
        fields = field.field_info.annotation.model_fields if field else {}  # type: ignore[union-attr]
        declared = {name: _item_model(declaration.annotation) for name, declaration in fields.items()}

        class JsonRequest(Request):
            async def json(self) -> Any:
                return await _decoded(await self.body(), declared)

        async def handle(request: Request) -> Response:
            return await handler(JsonRequest(request.scope, request.receive))

        return handle


def _item_model(annotation: Any) -> Model | None:
    """Return what the items of a list are validated by, if it is a model."""
    items = get_args(annotation) if get_origin(annotation) is list else ()
    return items[0] if items and isinstance(items[0], type) and issubclass(items[0], BaseModel) else None


async def _decoded(body: bytes, declared: Mapping[str, Model | None]) -> dict[str, Any]:
    """Decode a JSON object.

    declared: its fields, and the models of their items. Raises json.JSONDecodeError if it is none or made of too much,
    UnicodeDecodeError if it is no text.
    """
    try:
        await _check_number(body, _NAME, "names of fields")
        await asyncio.sleep(0)  # between steps that take up to ten milliseconds each: others first
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        await asyncio.sleep(0)
        if len(fields) > _MOST_FIELDS:
            raise json.JSONDecodeError(f"it has more than {_MOST_FIELDS} fields; leave out those without effect", "", 0)
        decoded: dict[str, Any] = {}
        for name, raw in fields.items():
            value = bytes(raw)
            if len(value) <= _SMALL:
                decoded[name] = msgspec.json.decode(value)
            elif name in declared:
                await _check_number(value, _VALUE, f"values in {name!r}")
                decoded[name] = await _in_pieces(value, declared[name])
            else:
                decoded[name] = raw
        return decoded
    except msgspec.DecodeError as error:
        body.decode()
        raise json.JSONDecodeError(f"no JSON object: {error}", "", 0) from error


async def _check_number(raw: bytes, mark: int, what: str) -> None:
    """Raise json.JSONDecodeError if a mark stands too often in what is decoded, whose texts don't count."""
    if raw.count(mark) > _MOST_VALUES and await asyncio.to_thread(_count, raw, mark) > _MOST_VALUES:
        raise json.JSONDecodeError(f"it has more than {_MOST_VALUES} {what}; send fewer, or join their texts", "", 0)


def _count(raw: bytes, mark: int) -> int:
    """Count a character outside of strings. NumPy lets other threads run meanwhile."""
    text = np.frombuffer(raw.replace(rb"\\", b""), np.uint8)
    quotes = text == ord('"')
    quotes[1:] &= text[:-1] != ord("\\")
    is_outside = np.cumsum(quotes, dtype=np.uint8) & 1 == 0  # overflows, and stays even or odd
    return int(np.count_nonzero(is_outside & (text == mark)))


async def _in_pieces(value: bytes, model: Model | None) -> Any:
    """Decode a value; an array item by item, with others' turns in between.

    Items before the first that isn't valid become models; FastAPI, which validates the whole, tells what is wrong.
    """
    await asyncio.sleep(0)
    if not value.startswith(b"["):
        return msgspec.json.decode(value)
    items, size = [], 0
    raws = msgspec.json.decode(value, type=list[msgspec.Raw])
    await asyncio.sleep(0)
    for item in raws:
        size += max(_ITEM, len(memoryview(item)))
        if size > _PIECE:
            await asyncio.sleep(0)
            size = 0
        items.append(msgspec.json.decode(item))
        if len(memoryview(item)) > _PIECE:
            await asyncio.sleep(0)
        if model is not None:
            try:
                items[-1] = model.model_validate(items[-1])
            except ValidationError:
                model = None
    await asyncio.sleep(0)
    return items
