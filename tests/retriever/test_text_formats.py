"""Formats that are text themselves."""

import pytest

from ragkv.errors import DocumentError
from ragkv.retriever.formats.text import decode, parse_csv, parse_json, parse_markdown, parse_rst


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("text\n\n## The `title` ##\n\n# Later\n", "The `title`"),
        ("```sh\n# a comment\n```\n# Title\n", "Title"),
        ("~~~\n```\n# a comment\n~~~\n# Title\n", "Title"),
        ("Title\n=====\n\n# Later\n", "Title"),
        ("#hashtag\n\n#\n\ntext", ""),
        ("    # code\n", ""),
    ],
)
def test_markdown_title_is_the_first_heading(text: str, title: str) -> None:
    assert parse_markdown(text.encode()) == (title, text)


@pytest.mark.parametrize(
    ("front", "title"),
    [
        ("---\ntitle: Real title\n# comment in yaml\n---\n", "Real title"),
        ("---\r\ntitle: 'It''s \"real\"'\r\ntags: [a, b]\r\n---\r\n", 'It\'s "real"'),
        ("\ufeff---\ntitle: >\n  over\n  lines\n...\n", "over lines\n"),
        ("---\ntitle: one: two\nauthor: me\n---\n", "one: two"),
        ("---\ntitle: 2024\n---\n", "2024"),
        ('+++\ntitle = "In TOML"\n[extra]\na = 1\n+++\n', "In TOML"),
        ("---\nlayout: post\n---   \n", "Heading"),
        ("---\ntitle:\n---\n", "Heading"),
    ],
)
def test_markdown_front_matter_gives_the_title_and_is_no_text(front: str, title: str) -> None:
    assert parse_markdown(f"{front}# Heading\n\ntext\n---\nmore".encode()) == (title, "\n# Heading\n\ntext\n---\nmore")


@pytest.mark.parametrize(
    "text",
    [
        "---\nA text between two rulers.\n---\nMore.",
        "---\n\n---\nMore.",
        "---\ntitle: never ends\n\ntext",
        "text\n---\ntitle: later\n---\n",
        "+++\nno toml\n+++\n",
        "---\n- a list\n- of points\n---\n",
    ],
)
def test_markdown_rulers_are_no_front_matter(text: str) -> None:
    assert parse_markdown(text.encode())[1] == text


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_text_in_every_encoding_with_a_mark(encoding: str) -> None:
    assert decode("Größe 日本 😀".encode(encoding)) == "Größe 日本 😀"


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ("Größe".encode("cp1252"), r"isn't UTF-8 \(byte 2\)"),
        (b"\xff\xfea", "isn't UTF-16"),
        (b"\xff\xfe\x00\xd8a\x00", "isn't UTF-16"),
        ("text".encode("utf-16-le"), "binary"),
    ],
)
def test_text_that_cannot_be_decoded(data: bytes, says: str) -> None:
    with pytest.raises(DocumentError, match=says):
        decode(data)


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("=====\nTitle\n=====\n\n.. note:: x\n\n   # comment\n", "Title"),
        ("..  a remark\n\n::\n\n  code\n\nTitle\n~~~~~\n", "Title"),
        ("====  ====\na     b\n====  ====\n\ntext\n", ""),
    ],
)
def test_rst_is_read_as_it_is_written(text: str, title: str) -> None:
    assert parse_rst(text.encode()) == (title, text)


def test_json_is_an_outline() -> None:
    title, text = parse_json(
        b'{"title": "Plans", "basic": {"price": 10, "tags": ["a", "b"]}, "pro": [{"k": 1, "l": null}, {"k": [[2]]}], '
        b'"none": [], "text": "one\\ntwo"}'
    )
    assert title == "Plans"
    assert text == (
        "title: Plans\nbasic:\n  price: 10\n  tags:\n    - a\n    - b\npro:\n  - k: 1\n    l: null\n"
        "  - k:\n      - - 2\nnone: []\ntext: one\ntwo"
    )
    assert parse_json(b'[{"a": 1, "b": true}, "x"]') == ("", "a: 1\nb: true\n\nx")


@pytest.mark.parametrize(
    "data", [b"", b"{", b'{"a": 1}\n{"a": 2}', b"[" * 100_000, b"[" * 900 + b"1" * 5000 + b"]" * 900]
)
def test_json_that_cannot_be_read(data: bytes) -> None:
    with pytest.raises(DocumentError, match=r"isn't JSON|\.jsonl"):
        parse_json(data)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ("Plan,Price\nBasic,10\n", "| Plan | Price |\n| --- | --- |\n| Basic | 10 |"),
        ("Plan;Price\r\nBasic;10,5\r\n", "| Plan | Price |\n| --- | --- |\n| Basic | 10,5 |"),
        ("Plan\tPrice\nA, B\t10", "| Plan | Price |\n| --- | --- |\n| A, B | 10 |"),
        ("sep=;\na,b;c", "| a,b | c |\n| --- | --- |"),
        ('a,"b\nb, ""c"""\n\n,,\n1|2,3\n', '| a | b b, "c" |\n| --- | --- |\n| 1\\|2 | 3 |'),
        ("alone\nstill\n", "| alone |\n| --- |\n| still |"),
        ("a,b\n1\n1,2,3", "| a | b |\n| --- | --- |\n| 1 |\n| 1 | 2 | 3 |"),
        ("", ""),
    ],
)
def test_csv_is_a_table(data: str, text: str) -> None:
    assert parse_csv(data.encode()) == ("", text)
    assert parse_csv(data.encode("utf-16")) == ("", text)
