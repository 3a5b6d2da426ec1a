import json
import os
from pathlib import Path

import pytest

from ragkv.errors import DocumentError
from ragkv.retriever.documents import SUFFIXES, Document, find_files, is_visible
from ragkv.retriever.loading import load_file


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


def test_find_files_takes_no_pipes(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    assert find_files([tmp_path]) == []
    with pytest.raises(DocumentError, match="regular file"):
        find_files([tmp_path / "pipe.txt"])


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
        ("invisible.txt", "\u200b\u200c\u200d\u00ad\ufeff\u2060\ufe0f\n".encode(), "empty"),
        ("controls.md", b"\x01\x0c\x7f", "empty"),
        ("front.md", b"---\ntitle: only\n---\n", "empty"),
        ("empty.json", b'""', "empty"),
        ("empty.csv", b",,\n", "empty"),
        ("junk.docx", b"junk", "damaged"),
        ("junk.xlsx", b"PK\x03\x04junk", "damaged"),
        ("junk.epub", b"", "damaged"),
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


def test_every_kind_is_read(tmp_path: Path) -> None:
    """One of each that is text; the packed ones have tests of their own."""
    texts = {
        ".txt": "text", ".md": "# T\n\ntext", ".markdown": "text", ".rst": "T\n=\n\ntext", ".html": "<h1>T</h1>text",
        ".htm": "text", ".csv": "a,b", ".json": '{"a": "text"}', ".jsonl": '{"text": "text"}',
    }  # fmt: skip
    for suffix, text in texts.items():
        path = tmp_path / f"a{suffix.upper()}"
        path.write_text(text)
        document = load_one(path)
        assert document.markdown == (suffix not in (".txt", ".json", ".jsonl")), suffix
        assert "text" in document.text or suffix == ".csv"


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("soft\u00adhyphen zero\u200bwidth word\u2060joiner mark\ufeffed", "softhyphen zerowidth wordjoiner marked"),
        ("می\u200cخواهم क्\u200dष 👩\u200d🚀 ❤\ufe0f", "می\u200cخواهم क्\u200dष 👩\u200d🚀 ❤\ufe0f"),
        ("10\u00a0000\u202f€", "10\u00a0000\u202f€"),
    ],
)
def test_invisible_characters_stay_where_they_matter(tmp_path: Path, text: str, kept: str) -> None:
    (tmp_path / "a.txt").write_text(text)
    assert load_one(tmp_path / "a.txt").text == kept
    assert is_visible(text)


def test_a_name_has_one_form(tmp_path: Path) -> None:
    (tmp_path / "re\u0301sume\u0301.txt").write_text("text")
    document = load_one(tmp_path / "re\u0301sume\u0301.txt")
    assert (document.id, document.title) == (f"{tmp_path.resolve()}/r\u00e9sum\u00e9.txt", "r\u00e9sum\u00e9.txt")


def test_jsonl_keeps_the_good_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    good = {
        b'\xef\xbb\xbf{"text": "one", "id": "x", "title": "First"}': ("x", "First", "one"),
        b'{"text": "four", "id": 4}': ("4", "a.jsonl#4", "four"),
        b'{"text": "a", "id": null}': ("7", "a.jsonl#7", "a"),
        b'{"text": "a", "id": null, "title": null}': ("8", "a.jsonl#8", "a"),
        b'{"text": "a", "id": ""}': ("9", "a.jsonl#9", "a"),
        b'{"text": "a", "id": 1.5}': ("1.5", "a.jsonl#1.5", "a"),
        '{"text": "still\u2028one"}'.encode(): ("11", "a.jsonl#11", "still\u2028one"),
        b'{"text": "\\ud83d\\ude00 \\ud83d \\u0000z", "id": "nine"}': ("nine", "a.jsonl#nine", "\U0001f600 \ufffd z"),
    }
    bad = {
        b'{"text": "two"': "JSON",
        b'{"title": "no text"}': '"text"',
        b'["text"]': '"text"',
        b'{"text": "sev\xffen"}': "UTF-8",
        b'{"text": " ", "id": "nine"}': "empty",
        '{"text": "\u200b"}'.encode(): "empty",
        b'{"text": "ten", "id": "x"}': "line 1;",
        b'{"text": "ten", "id": ["x"]}': '["x"]',
        b'{"text": 12}': '"text"',
        b"[" * 100_000: "JSON",
    }
    lines = [*[*good][:2], b"", *[*bad][:3], *[*good][2:], *[*bad][3:]]
    path.write_bytes(b"\n".join(lines))
    results = list(load_file(path))
    name = str(path.resolve())
    assert [item for item in results if isinstance(item, Document)] == [
        Document(f"{name}#{id}", title, text, False) for id, title, text in good.values()
    ]
    errors = [str(item) for item in results if isinstance(item, DocumentError)]
    assert [int(error.split("line ")[1].split(":")[0]) for error in errors] == [4, 5, 6, *range(13, 20)]
    assert all(says in error for error, says in zip(errors, bad.values(), strict=True)), errors
    path.write_text('{"text": "ä"}\n{"text": "\u0a0a"}\n', encoding="utf-16")  # whose bytes are newlines
    assert [document.text for document in load_file(path)] == ["ä", "\u0a0a"]


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
