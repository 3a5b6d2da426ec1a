"""What of a JSON body is decoded: only that can hold up the event loop."""

import asyncio
import json

import msgspec
import pytest

from ragkv.server.json_body import _decoded


def test_large_values_are_decoded_only_where_a_model_declares_them() -> None:
    many = list(range(10_000))
    body = json.dumps({"known": many, "unknown": many, "small": [1, {"a": None}]}).encode()
    found = asyncio.run(_decoded(body, {"known"}))
    assert found["known"] == many and found["small"] == [1, {"a": None}]
    assert isinstance(found["unknown"], msgspec.Raw)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b'{"a": NaN}', b'{"a": "\\ud800"}', b'{"a": 1}x'])
def test_what_is_no_json_object_is_an_error_for_fastapi(body) -> None:
    with pytest.raises(json.JSONDecodeError):
        asyncio.run(_decoded(body, {"a"}))


@pytest.mark.parametrize("body", [b"\xff", b'{"a": "\xff"}'])
def test_what_is_no_text_is_another(body) -> None:
    with pytest.raises(UnicodeDecodeError):
        asyncio.run(_decoded(body, {"a"}))
