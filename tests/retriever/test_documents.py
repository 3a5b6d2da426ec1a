import json
import os
from pathlib import Path

import pytest

from ragkv.errors import DocumentError
from ragkv.retriever.documents import SUFFIXES, Document, find_files, load_file


def load_one(path: Path) -> Document:
    (document,) = load_file(path)
    assert isinstance(document, Document), document
    return document


def load_error(path: Path) -> str:
    (error,) = load_file(path)
    assert isinstance(error, DocumentError)
    assert path.name in str(error)
    return str(error)


def test_find_files_walks_sorted_and_skips_hidden_and_foreign(tmp_path: Path) -> None:
    for name in ("b.txt", "a.MD", "sub/c.pdf", ".hidden.txt", ".git/d.txt", "e.png", "sub/f.jsonl", "g.html"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "broken.txt").symlink_to(tmp_path / "gone.txt")
    (tmp_path / "again.txt").symlink_to(tmp_path / "b.txt")
    found = find_files([tmp_path, tmp_path / "sub", str(tmp_path / "b.txt")])
    assert [str(path.relative_to(tmp_path)) for path in found] == [
        "a.MD", "again.txt", "g.html", "sub/c.pdf", "sub/f.jsonl",
    ]  # fmt: skip


def test_find_files_takes_a_named_hidden_file(tmp_path: Path) -> None:
    (tmp_path / ".notes.txt").write_text("x")
    assert find_files([tmp_path / ".notes.txt"]) == [tmp_path / ".notes.txt"]


@pytest.mark.parametrize("name", ["missing.txt", "image.png", "no_suffix"])
def test_find_files_names_what_it_cannot_take(tmp_path: Path, name: str) -> None:
    if name != "missing.txt":
        (tmp_path / name).write_text("x")
    with pytest.raises(DocumentError) as error:
        find_files([tmp_path / name])
    assert name in str(error.value)
    assert all(suffix in str(error.value) for suffix in SUFFIXES)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_rights_are_reported(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0)
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "a.txt").chmod(0)
    with pytest.raises(DocumentError, match="locked"):
        find_files([tmp_path])
    assert "rights" in load_error(tmp_path / "a.txt")


def test_text_is_normalised(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf\r\n  one\r\ntwo\rcafe\xcc\x81  \n\n")
    document = load_one(tmp_path / "a.txt")
    assert document == Document(str((tmp_path / "a.txt").resolve()), "a.txt", "  one\ntwo\ncaf\u00e9", False)


def test_id_is_the_resolved_path_and_the_kind_that_of_the_link(tmp_path: Path) -> None:
    (tmp_path / "blob").write_text("# Title\n\ntext")
    (tmp_path / "a.md").symlink_to(tmp_path / "blob")
    document = load_one(tmp_path / "a.md")
    assert (document.id, document.title, document.markdown) == (str((tmp_path / "blob").resolve()), "Title", True)


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("empty.txt", b"", "empty"),
        ("blank.md", b" \n\t\n\xc2\xa0", "empty"),
        ("latin.txt", "café".encode("latin-1"), "UTF-8"),
        ("binary.txt", b"abc\x00def", "binary"),
        ("utf16.txt", "text".encode("utf-16"), "binary"),
        ("empty.html", b"<html><head><title>Only a title</title></head></html>", "empty"),
        ("empty.jsonl", b"\n \n", "empty"),
        ("a.png", b"x", ".jsonl"),
    ],
)
def test_bad_files_are_named_with_a_remedy(tmp_path: Path, name: str, data: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(data)
    assert says in load_error(tmp_path / name)


def test_unreadable_paths_are_named(tmp_path: Path) -> None:
    (tmp_path / "folder.txt").mkdir()
    assert "directory" in load_error(tmp_path / "folder.txt")
    assert "No such file" in load_error(tmp_path / "missing.jsonl")


def test_file_name_that_is_not_utf8(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/\xff.txt"
    Path(os.fsdecode(path)).write_text("text")
    (error,) = load_file(os.fsdecode(path))
    assert "rename" in str(error)
    str(error).encode()


def test_jsonl_keeps_the_good_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = [
        b'{"text": "one", "id": "x", "title": "First"}',
        b'{"text": "two"',
        b"",
        b'{"text": "four", "id": 4}',
        b'{"title": "no text"}',
        b'["text"]',
        b'{"text": "sev\xffen"}',
        '{"text": "eight\u2028still eight"}'.encode(),
        b'{"text": " ", "id": "nine"}',
        b'{"text": "ten", "id": "x"}',
        b'{"text": "\\ud83d\\ude00 \\ud83d \\u0000eleven", "id": "nine"}',
        b'{"text": 12}',
        b"[" * 100_000,
    ]
    path.write_bytes(b"\n".join(lines))
    results = list(load_file(path))
    documents = [item for item in results if isinstance(item, Document)]
    errors = [str(item) for item in results if isinstance(item, DocumentError)]
    name = str(path.resolve())
    assert documents == [
        Document(f"{name}#x", "First", "one", False),
        Document(f"{name}#4", "a.jsonl#4", "four", False),
        Document(f"{name}#8", "a.jsonl#8", "eight\u2028still eight", False),
        Document(f"{name}#nine", "a.jsonl#nine", "\U0001f600 \ufffd eleven", False),
    ]
    assert [int(error.split("line ")[1].split(":")[0]) for error in errors] == [2, 5, 6, 7, 9, 10, 12, 13]
    assert "JSON" in errors[0] and '"text"' in errors[1] and "UTF-8" in errors[3] and "line 1;" in errors[5]


def test_jsonl_is_read_lazily(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"t{i}"}) + "\n" for i in range(100_000)))
    first = next(load_file(path))
    assert isinstance(first, Document) and first.text == "t0"


def test_digest_names_the_content_whatever_the_id() -> None:
    document = Document("a", "title", "text", False)
    assert document.digest == Document("b", "title", "text", False).digest
    others = [
        Document("a", "titlet", "ext", False),
        Document("a", "t", "text", False),
        Document("a", "title", "text", True),
    ]
    assert len({document.digest, *(other.digest for other in others)}) == 4
