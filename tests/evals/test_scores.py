import pytest

from ragkv.evals import scores


@pytest.mark.parametrize(
    "answer, golds, found, f1",
    [
        ("It is the Exeter College.", ["Exeter College"], 1.0, 2 / 3),
        ("Paris", ["Rome", "paris!"], 1.0, 1.0),
        ("category", ["cat"], 0.0, 0.0),
        ("", ["cat"], 0.0, 0.0),
        ("a cat and a dog", ["dog cat"], 0.0, 0.8),
    ],
)
def test_answers_as_squad_scores_them(answer, golds, found, f1):
    assert scores.contains(answer, golds) == found
    assert scores.word_f1(answer, golds) == pytest.approx(f1)


@pytest.mark.parametrize(
    "answer, gold, expected",
    [
        ("the cat sat", "the cat sat", 1.0),
        ("sat cat the", "the cat sat", 1 / 3),
        ("police killed the gunman", "police kill the gunman", 0.75),  # Lin (2004), the example of section 3.1
        ("the gunman kill police", "police kill the gunman", 0.5),
        ("dog", "cat", 0.0),
    ],
)
def test_rouge_l(answer, gold, expected):
    assert scores.rouge_l(answer, [gold]) == pytest.approx(expected)


def test_the_first_line_is_the_first_with_text():
    assert scores.first_line("\n\n Ann came. \n\nDialogue:") == " Ann came. "
    assert scores.first_line("") == ""


def test_cacheblends_f1_looks_at_the_first_line_only():
    encode = lambda text: [ord(char) for char in text]  # noqa: E731
    assert scores.token_f1("\n\nabc\nxyz", ["abc"], encode) == 1.0
    assert scores.token_f1("xyz\nabc", ["abc"], encode) == 0.0
