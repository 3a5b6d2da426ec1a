"""What of a JSON body is decoded: only that can hold up the event loop."""

import asyncio
import json

import msgspec
import pytest

from ragkv.server.chat_request import Message
from ragkv.server.json_body import _count, _decoded, _item_model


def test_large_values_are_decoded_only_where_a_model_declares_them() -> None:
    many = list(range(10_000))
    body = json.dumps({"known": many, "unknown": many, "small": [1, {"a": None}]}).encode()
    found = asyncio.run(_decoded(body, {"known": None}))
    assert found["known"] == many and found["small"] == [1, {"a": None}]
    assert isinstance(found["unknown"], msgspec.Raw)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b'{"a": NaN}', b'{"a": "\\ud800"}', b'{"a": 1}x'])
def test_what_is_no_json_object_is_an_error_for_fastapi(body) -> None:
    with pytest.raises(json.JSONDecodeError):
        asyncio.run(_decoded(body, {"a": None}))


@pytest.mark.parametrize("body", [b"\xff", b'{"a": "\xff"}'])
def test_what_is_no_text_is_another(body) -> None:
    with pytest.raises(UnicodeDecodeError):
        asyncio.run(_decoded(body, {"a": None}))


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b'{"known": [' + b"1," * 100_001 + b"1]}", "it has more than 100000 values in 'known'; send fewer"),
        (b'{"known": [' + b'{"a":0},' * 99_999 + b"1]}", None),
        (b'{"known": [' + b'{"a":0},' * 100_001 + b"1]}", "it has more than 100000 names of fields; send fewer"),
        (b'{"unknown": [' + b"1," * 100_001 + b"1]}", None),
        (b"{" + b",".join(b'"%d":1' % i for i in range(1001)) + b"}", "it has more than 1000 fields; leave out"),
        (json.dumps({"known": ':,\\"\\\\' * 100_001, "other": "," * 100_001}).encode(), None),
    ],
)
def test_what_is_made_of_too_many_values_is_refused_before_they_are(body, problem) -> None:
    if problem is None:
        assert asyncio.run(_decoded(body, {"known": None, "other": None}))["known" if b'"known"' in body else "unknown"]
    else:
        with pytest.raises(json.JSONDecodeError, match=problem):
            asyncio.run(_decoded(body, {"known": None}))


@pytest.mark.parametrize("text", ['a,"b":[]', "\\", '\\"', '"', "\\\\", '\\\\",:'])
def test_marks_count_outside_of_strings_only(text) -> None:
    raw = json.dumps([{text: [text, 1]}, "", text]).encode()
    assert (_count(raw, ord(",")), _count(raw, ord(":"))) == (3, 1)


def test_others_have_turns_between_the_messages_of_a_large_chat() -> None:
    messages = [{"role": "user", "content": chr(0x4E00 + i) * 10_000} for i in range(100)]  # 6 MB

    async def turns() -> int:
        num_turns = 0

        async def count() -> None:
            nonlocal num_turns
            while True:
                num_turns += 1
                await asyncio.sleep(0)

        other = asyncio.create_task(count())
        found = await _decoded(json.dumps({"messages": messages}).encode(), {"messages": Message})
        other.cancel()
        assert [message.model_dump(exclude_unset=True) for message in found["messages"]] == messages
        return num_turns

    assert asyncio.run(turns()) > 20


def test_others_have_turns_between_the_messages_of_a_long_chat() -> None:
    messages = [{"role": "user", "content": "a"}] * 10_000

    async def turns() -> int:
        body = json.dumps({"messages": messages}).encode()
        decoding, num_turns = asyncio.create_task(_decoded(body, {"messages": Message})), 0
        while not decoding.done():
            num_turns += 1
            await asyncio.sleep(0)
        return num_turns

    assert asyncio.run(turns()) > 10


def test_what_follows_an_invalid_item_is_left_to_fastapi() -> None:
    said, wrong = {"role": "user", "content": "a" * 5000}, {"role": "nobody", "content": "b"}
    found = asyncio.run(_decoded(json.dumps({"messages": [said, wrong, said]}).encode(), {"messages": Message}))
    assert found["messages"] == [Message(role="user", content="a" * 5000), wrong, said]


def test_the_models_of_items_are_found_in_the_requests_fields() -> None:
    assert _item_model(list[Message]) is Message
    assert all(
        _item_model(other) is None for other in (list[str], Message, list, list[str | Message], dict[str, Message])
    )
