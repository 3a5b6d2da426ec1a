"""Files are read in a process of its own, which a file may end."""

import threading
import time
from pathlib import Path

import openpyxl
import pytest

from ragkv.retriever import parse
from ragkv.retriever.documents import Document
from ragkv.retriever.parse import Reader, read_documents, write_documents


@pytest.fixture
def bomb(tmp_path: Path) -> Path:
    """A workbook of two cells that are so far apart that all between them take more memory than there is."""
    book = openpyxl.Workbook()
    book.active["A1"] = book.active["XFD1048576"] = 1
    book.save(tmp_path / "bomb.xlsx")
    return tmp_path / "bomb.xlsx"


def read(reader: Reader, path: Path) -> list[str]:
    return [each.text if isinstance(each, Document) else f"error: {each}" for each in reader.read(path)]


def test_one_process_reads_many_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\u2028ä")
    (tmp_path / "b.jsonl").write_text('{"text": "two"}\n{}\n{"text": "three"}')
    with Reader() as reader:
        assert read(reader, tmp_path / "a.txt") == ["one\u2028ä"]
        process = reader._process
        two, error, three = read(reader, tmp_path / "b.jsonl")
        assert (two, three) == ("two", "three") and "line 2" in error
        assert "No such file" in read(reader, tmp_path / "gone.txt")[0]
        (named,) = reader.read(tmp_path / "b.jsonl", "re\u0301sume\u0301.txt")
        assert isinstance(named, Document) and named.id == "r\u00e9sum\u00e9.txt" and "three" in named.text
        assert reader._process is process
        process.kill()  # whoever does it: no file is to blame
        process.wait()
        assert read(reader, tmp_path / "a.txt") == ["one\u2028ä"]
        process = reader._process
    assert process.poll() is not None


def test_a_file_that_ends_the_process_costs_itself_only(tmp_path: Path, bomb: Path, caplog) -> None:
    (tmp_path / "a.txt").write_text("text")
    with Reader() as reader:
        assert read(reader, tmp_path / "a.txt") == ["text"]
        (error,) = read(reader, bomb)
        assert "bomb.xlsx" in error and "2 GiB" in error and "convert" in error
        assert read(reader, tmp_path / "a.txt") == ["text"]
    assert "memory allocation" in caplog.text


def test_a_file_takes_only_so_much_room(tmp_path: Path, monkeypatch) -> None:
    swollen = tmp_path / "swollen.txt"
    swollen.write_text("\x01x" * 100_000)  # a control character is written as six
    monkeypatch.setattr(parse, "_LEAST_OUTPUT", 0)
    monkeypatch.setattr(parse, "_SWELLING", 2)
    with Reader() as reader:
        assert "8 times its size" in read(reader, swollen)[0]
        monkeypatch.setattr(parse, "_LEAST_OUTPUT", 1000)
        (tmp_path / "a.txt").write_text("text")
        assert read(reader, tmp_path / "a.txt") == ["text"]


def test_reading_can_be_stopped_from_another_thread(tmp_path: Path) -> None:
    (tmp_path / "slow.html").write_text("<div>" * 300_000 + "x")
    with Reader() as reader:
        start = time.monotonic()
        threading.Timer(1, reader.stop).start()
        (error,) = read(reader, tmp_path / "slow.html")
        assert "slow.html" in error and time.monotonic() - start < 5
        assert "slow.html" in read(reader, tmp_path / "slow.html")[0]  # it stays stopped


def test_documents_on_their_way(tmp_path: Path) -> None:
    documents = [Document("a", "A", "one\n\u2028two", True), Document("b", "B", "\x01", False)]
    write_documents(tmp_path / "out", documents)
    assert list(read_documents(tmp_path / "out")) == documents
