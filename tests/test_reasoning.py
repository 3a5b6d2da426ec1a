"""A model's reasoning is told from its answer, however the text is cut into pieces."""

import asyncio
import itertools

import pytest

from ragkv.answer import AnswerOptions, Delta, Reasoning
from ragkv.engine.task import PrefixUse
from ragkv.generation import Generation
from ragkv.policies import FULL
from ragkv.prompt import Prompt
from ragkv.reasoning import ReasoningSplitter, ends_in_reasoning, split, without_reasoning
from ragkv.routing import Request

# What the model writes, whether the prompt has opened its reasoning, the reasoning, the answer.
TEXTS = [
    ("<think>\nHm.\n\nYes.\n</think>\n\nTea.", False, "Hm.\n\nYes.", "Tea."),
    ("Hm.\n\nYes.\n</think>\n\nTea.", True, "Hm.\n\nYes.", "Tea."),
    ("<think>\nHm.\n</think>\n\nTea.", True, "Hm.", "Tea."),
    ("\n<think>Hm.</think>Tea.\n", False, "Hm.", "Tea.\n"),
    ("<think>\n\n</think>\n\nTea.", False, "", "Tea."),
    ("</think>\n\nTea.", True, "", "Tea."),
    ("<think>\nHm. </thin k> </thi", False, "Hm. </thin k> </thi", ""),
    ("<think>\nHm.\n", False, "Hm.", ""),
    ("Hm.", True, "Hm.", ""),
    ("", True, "", ""),
    ("\n", True, "", ""),
    (" Tea.", False, "", " Tea."),
    ("<thi", False, "", "<thi"),
    ("<b>Tea</b>", False, "", "<b>Tea</b>"),
    ("Models write <think>thoughts</think> first.", False, "", "Models write <think>thoughts</think> first."),
    ("<think>a</think>b</think>c", False, "a", "b</think>c"),
    ("", False, "", ""),
]


def joined(events):
    texts = {Reasoning: "", Delta: ""}
    for event in events:
        assert event.text
        texts[type(event)] += event.text
    return texts[Reasoning], texts[Delta]


@pytest.mark.parametrize(("text", "is_open", "reasoning", "answer"), TEXTS)
def test_every_way_to_cut_a_text_gives_the_same(text, is_open, reasoning, answer):
    assert joined(split(text, is_open=is_open)) == (reasoning, answer)
    assert without_reasoning(text, is_open=is_open) == answer
    for first, second in itertools.combinations_with_replacement(range(len(text) + 1), 2):
        splitter = ReasoningSplitter(is_open=is_open)
        pieces = (text[:first], text[first:second], text[second:])
        events = [event for piece in pieces for event in splitter.feed(piece)]
        assert joined([*events, *splitter.end()]) == (reasoning, answer)
    splitter = ReasoningSplitter(is_open=is_open)
    assert joined([*(event for char in text for event in splitter.feed(char)), *splitter.end()]) == (reasoning, answer)


def test_an_answer_is_held_back_no_longer_than_needed():
    splitter = ReasoningSplitter(is_open=False)
    pieces = ("<", "think", ">\nHm", ". ", "Yes", "</", "think>\n", "\nTea", ".")
    assert [list(splitter.feed(piece)) for piece in pieces] == [
        *([], [], [Reasoning("Hm")], [Reasoning(".")], [Reasoning(" Yes")], [], []),
        *([Delta("Tea")], [Delta(".")]),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [
        ("<|assistant|><think>\n", True),
        ("<|assistant|><think>\n\n</think>\n\n", False),
        ("<|assistant|></think>", False),
        ("<|assistant|>", False),
        ("<|assistant|><think>\n\n</think>\n\n<|end|><|assistant|><think>", True),
    ],
)
def test_the_prompt_says_whether_the_model_is_thinking_already(prompt, is_open):
    assert ends_in_reasoning(prompt) is is_open


def test_a_generation_keeps_reasoning_and_answer_apart():
    prompt = Prompt([1], 1, [], ends_in_reasoning=True)

    class Fitted:
        pass

    fitted = Fitted()
    fitted.prompt = prompt
    request = Request(fitted, None, None, FULL, None, None, False, (), (), PrefixUse())
    generation = Generation(request, AnswerOptions(FULL, 1, 8), 0.0)

    async def texts():
        for text in ("Hm", ".\n</think>", "\n\nTea", "."):
            yield text

    async def events():
        return [event async for event in generation.events(texts())]

    assert asyncio.run(events()) == [Reasoning("Hm"), Reasoning("."), Delta("Tea"), Delta(".")]
    assert (generation.reasoning, generation.text) == ("Hm.", "Tea.")
