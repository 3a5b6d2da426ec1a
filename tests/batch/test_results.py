"""The file of a batch's answers: whole lines only, one writer, and nothing asked twice."""

import json
import resource

import pytest

from ragkv.batch.results import Results
from ragkv.errors import BusyError, ConfigError, StoreError


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_answers_are_appended_in_openais_format(tmp_path):
    file = tmp_path / "new" / "out.jsonl"
    with Results(file) as results:
        results.add("a", 200, {"answer": "ü"})
        results.add("b", 413, {"error": {"message": "too long"}})
    first, second = lines(file)
    assert (first["custom_id"], first["error"]) == ("a", None)
    assert (first["response"]["status_code"], first["response"]["body"]) == (200, {"answer": "ü"})
    assert second["response"]["status_code"] == 413
    with Results(file) as results:
        assert results.done == {"a", "b"}


def test_what_a_killed_run_left_of_a_line_goes(tmp_path):
    file = tmp_path / "out.jsonl"
    with Results(file) as results:
        results.add("a", 200, {})
        results.add("b", 200, {})
    whole = file.read_bytes()
    end = whole.index(b"\n") + 1
    for cut in range(end, len(whole)):
        file.write_bytes(whole[:cut])
        with Results(file) as results:
            assert results.done == {"a"}
            results.add("b", 200, {})
        assert [line["custom_id"] for line in lines(file)] == ["a", "b"]


def test_only_one_run_writes(tmp_path):
    file = tmp_path / "out.jsonl"
    with Results(file), pytest.raises(BusyError, match="another run"):
        Results(file)
    with Results(file):
        pass


@pytest.mark.parametrize("text", ["what I must not lose\n", "what I must not lose", '{"custom_id": "a"', "1\n"])
def test_another_file_is_not_written_to(tmp_path, text):
    file = tmp_path / "notes.txt"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"line 1 of .*notes\.txt isn't a batch's answer"):
        Results(file)
    assert file.read_text() == text
    with pytest.raises(StoreError, match="can't write"):
        Results(file / "out.jsonl")


def test_a_full_disk_is_an_error_that_says_so_and_loses_no_answer(tmp_path):
    file, limits = tmp_path / "out.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    with Results(file) as results:
        results.add("a", 200, {})
    size = file.stat().st_size
    try:
        with pytest.raises(StoreError, match="what is in it stays"), Results(file) as results:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, limits[1]))
            results.add("b", 200, {"answer": "x" * 100})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert file.stat().st_size == size + 20
    with Results(file) as results:
        assert results.done == {"a"}
