"""The prompt of a chat template: what may change from day to day, and what must not."""

import datetime

import pytest
from tiny_tokenizer import CHATML, DATED, THINKING, save_tokenizer
from transformers.utils import chat_template_utils

from ragkv import prompt
from ragkv.answer import Conversation, Turn
from ragkv.conversation import fit
from ragkv.prompt import PromptLayout

EVE, MORROW = datetime.datetime(2026, 12, 31, 23, 59, 59), datetime.datetime(2027, 1, 1, 0, 0, 1)


@pytest.fixture
def at(monkeypatch):
    """Stops the clock, for chat templates and for prompts."""

    def stop(moment):
        class Clock(datetime.datetime):
            @classmethod
            def now(cls, tz=None):
                return moment

            @classmethod
            def today(cls):
                return moment

        monkeypatch.setattr(chat_template_utils, "datetime", Clock)
        monkeypatch.setattr(prompt, "date", Clock)

    return stop


WHY = Conversation("Why?")


def asked(layout, conversation=WHY):
    """The prompt's text."""
    prompt = fit(layout, conversation, [[] for _ in conversation.questions], 10_000).prompt
    return layout._tokenizer.decode(prompt.token_ids)


@pytest.mark.parametrize("family", DATED)
def test_the_anchor_is_the_same_after_midnight_and_the_question_tells_the_date(tmp_path, at, family):
    save_tokenizer(tmp_path, DATED[family])
    at(EVE)
    yesterday = PromptLayout(tmp_path)
    assert "Today is 31 December 2026.\n\nAnswer this" in asked(yesterday)
    at(MORROW)
    today = PromptLayout(tmp_path)
    assert today.anchor == yesterday.anchor
    assert yesterday.tells_date and today.tells_date
    for layout in (yesterday, today):  # a server that runs past midnight, and one that was started after
        text = asked(layout, Conversation("Why?", (Turn("Who?", "Me."),), "Be kind."))
        assert "Today is 1 January 2027.\n\nBe kind.\n\nAnswer this" in text
        assert not any(old in text for old in ("2026", "2024-", "26 Jul 2024"))
        assert text.count("2027") == 1


def test_the_date_is_told_only_where_the_template_has_one(tmp_path, at):
    save_tokenizer(tmp_path, CHATML)
    at(EVE)
    layout = PromptLayout(tmp_path)
    assert not layout.tells_date
    assert layout.instruction_tokens("") == []
    assert "2026" not in asked(layout)


@pytest.mark.parametrize("family", THINKING)
@pytest.mark.parametrize("thinking", [False, True])
def test_models_think_only_when_they_are_let(tmp_path, family, thinking):
    template, has_switch = THINKING[family]
    save_tokenizer(tmp_path, template, added=("<think>", "</think>"))
    layout = PromptLayout(tmp_path, thinking=thinking)
    text = asked(layout)
    if has_switch:  # left open, the model writes <think> itself
        assert ("<think>\n\n</think>" not in text) is thinking
        assert ("/no_think" not in text) is thinking or family != "SmolLM3"
    opened = layout.assemble([], layout.question_tokens("Why?")).ends_in_reasoning
    assert opened is (not has_switch)


@pytest.mark.parametrize("family", THINKING)
def test_earlier_turns_of_a_model_that_thinks_have_their_answers_alone(tmp_path, family):
    save_tokenizer(tmp_path, THINKING[family][0], added=("<think>", "</think>"))
    layout = PromptLayout(tmp_path)
    assert layout.takes_turns
    text = asked(layout, Conversation("Why?", (Turn("Who?", "Me."),)))
    before, answer, _ = text.partition("Me.<|end|>")
    assert answer and "Who?" in before and "Why?" not in before
    assert "<think>" not in before.replace("<think>\n\n</think>", "")
