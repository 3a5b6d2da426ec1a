"""Which conversation goes on from whose KV."""

import pytest

from ragkv.answer import Turn
from ragkv.salts import ConversationSalts


def test_only_the_first_that_goes_on_takes_the_thread():
    threads, turns = ConversationSalts(size=2), [Turn("a", "b")]
    threads.keep("salt", turns, "query:0.1", inherited=False)
    assert threads.take(turns, "query:0.2") is None
    assert threads.take([Turn("a", "c")], "query:0.1") is None
    assert threads.take([Turn(" a", "b\n")], "query:0.1") == "salt"
    assert threads.take(turns, "query:0.1") is None
    for i in range(3):
        threads.keep(f"salt {i}", [Turn(f"{i}", "b")], inherited=False)
    assert [threads.take([Turn(f"{i}", "b")]) for i in range(3)] == [None, "salt 1", "salt 2"]


def test_the_salts_of_conversations_outlive_the_process(tmp_path):
    file, turns = tmp_path / "conversations.sqlite", [Turn("a", "b")]
    for salt, taken in (("first", None), ("second", "first"), ("third", "second")):
        threads = ConversationSalts(file)
        assert threads.take(turns) == taken
        threads.keep(salt, turns, inherited=False)
        threads.keep("first", turns, inherited=False)  # which was taken, in an earlier process too
        threads.close() if salt != "second" else None  # killed
    assert ConversationSalts(file).take(turns) == "third"


@pytest.mark.parametrize("damage", [b"no database", b""])
def test_a_damaged_file_of_salts_is_made_anew(damage, tmp_path):
    file, turns = tmp_path / "conversations.sqlite", [Turn("a", "b")]
    threads = ConversationSalts(file)
    threads.keep("salt", turns, inherited=False)
    threads.close()
    file.write_bytes(damage)
    threads = ConversationSalts(file)
    assert threads.take(turns) is None
    threads.keep("other", turns, inherited=False)
    assert threads.take(turns) == "other"


def test_who_asks_the_first_question_again_does_not_go_on_with_a_salt_that_was_taken():
    threads, first = ConversationSalts(), [Turn("a", "b")]
    threads.keep("salt", first, inherited=False)
    assert threads.take(first) == "salt"
    threads.keep("salt", first, inherited=False)  # another, with the same first question and so the same salt
    assert threads.take(first) is None
    second = [*first, Turn("c", "d")]
    threads.keep("salt", second, inherited=True)
    threads.keep("salt", first, inherited=False)
    assert threads.take(first) is None
    assert threads.take(second) == "salt"
