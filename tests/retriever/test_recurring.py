"""Passages that come back in prompts, told by their tokens alone."""

import random

from ragkv.retriever import recurring
from ragkv.retriever.recurring import Recurring


def drawn(drawing: random.Random, count: int) -> list[int]:
    return [drawing.randrange(50_000) for _ in range(count)]


def test_a_passage_is_found_whole_when_it_comes_back_in_another_context() -> None:
    for seed in range(20):
        drawing = random.Random(seed)
        passages = [drawn(drawing, count) for count in (100, 300, 170)]
        a, b, c = passages
        seen = Recurring(64, 512)
        assert seen.add([*drawn(drawing, 30), *a, *drawn(drawing, 9), *b, *drawn(drawing, 40)]) == []
        assert seen.add([*drawn(drawing, 50), *b, *drawn(drawing, 3), *c, *drawn(drawing, 3), *a, 1]) == [b, a]
        assert seen.add([*drawn(drawing, 500), *c]) == [c]


def test_an_instruction_that_all_prompts_begin_with_is_no_passage() -> None:
    drawing = random.Random(1)
    instruction = drawn(drawing, 400)
    seen = Recurring(64, 512)
    for _ in range(5):
        assert seen.add([*instruction, *drawn(drawing, 200)]) == []
    conversation = [*instruction, *drawn(drawing, 200)]
    for _ in range(5):
        assert seen.add(conversation) == []
        conversation += drawn(drawing, 100)
    assert seen.add([*drawn(drawing, 10), *instruction]) == [instruction]


def test_what_is_known_is_left_out() -> None:
    drawing = random.Random(2)
    a, b = drawn(drawing, 200), drawn(drawing, 200)
    seen = Recurring(64, 512)
    seen.add([1, *a, *b, 2])
    prompt = [3, 4, *a, *b, 5]
    assert seen.add(prompt, [(2, 202)]) == [b]
    assert seen.add([6, *a, *b, 7], [(0, 100), (101, 150), (380, 402)]) == [[*a, *b][149:379]]
    assert seen.add([8, *a, *b, 9], [(1, 401)]) == []


def test_long_passages_are_cut_the_same_way_wherever_they_stand() -> None:
    drawing = random.Random(3)
    text = drawn(drawing, 3000)
    first, second = Recurring(64, 512), Recurring(64, 512)
    first.add([1, *text, 2])
    parts = first.add([3, 3, *text, 4])
    assert [token for part in parts for token in part] == text
    assert all(64 <= len(part) <= 512 for part in parts)
    second.add(text[700:])
    again = second.add([*drawn(drawing, 17), *text[700:], 5])
    assert len(set(map(tuple, again)) & set(map(tuple, parts))) >= 4  # all but those around where it begins


def test_short_passages_and_prompts_are_left_alone() -> None:
    drawing = random.Random(4)
    passage = drawn(drawing, 63)
    seen = Recurring(64, 512)
    for _ in range(3):
        assert seen.add([*drawn(drawing, 100), *passage, *drawn(drawing, 100)]) == []
        assert seen.add(passage[:20]) == [] and seen.add([]) == []


def test_old_prompts_are_forgotten(monkeypatch) -> None:
    monkeypatch.setattr(recurring, "_REMEMBERED", 1000)
    drawing = random.Random(5)
    passage, seen = drawn(drawing, 300), Recurring(64, 512)
    seen.add([1, *passage])
    assert seen.add([2, 3, *passage]) == [passage]
    for _ in range(5):
        seen.add(drawn(drawing, 400))
    assert seen.add([4, 5, *passage]) == []
    assert len(seen._windows) < 400 and sum(map(len, seen._prompts.values())) <= 1000
