"""What a model thinks before it answers, in both interfaces: apart from the answer, and not in the next turn."""

import json
from dataclasses import replace

import openai
import pytest
from server_harness import ANSWER, SCRIPT

from ragkv.answer import Conversation, Delta, Reasoning, Turn

THOUGHT = replace(ANSWER, text="Tea.", reasoning="Hm. Yes.")
CUT = replace(ANSWER, text="", reasoning="Hm.", finish_reason="length")
ASKED = [{"role": "user", "content": "who?"}]


@pytest.fixture
def openai_client(client):
    return openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0, timeout=10)


def complete(openai_client, messages=ASKED, **fields):
    return openai_client.chat.completions.create(model="smollm2-135m-instruct", messages=messages, **fields)


def test_whole_answers_have_it_in_a_field_of_its_own(pipeline, client, openai_client) -> None:
    pipeline.script = [SCRIPT[0], THOUGHT]
    message = complete(openai_client).choices[0].message
    assert (message.content, message.reasoning_content) == ("Tea.", "Hm. Yes.")
    body = client.post("/v1/answer", json={"question": "who?"}).json()
    assert (body["answer"], body["reasoning_content"]) == ("Tea.", "Hm. Yes.")


def test_streams_send_it_before_the_answer(pipeline, client, openai_client) -> None:
    pipeline.script = [SCRIPT[0], Reasoning("Hm."), Reasoning(" Yes."), Delta("Tea."), THOUGHT]
    _, *deltas, last = [chunk.choices[0].delta for chunk in complete(openai_client, stream=True)]
    thoughts = [getattr(delta, "reasoning_content", None) for delta in deltas]
    assert thoughts == ["Hm.", " Yes.", None]
    assert [delta.content for delta in deltas] == [None, None, "Tea."] and last.content is None
    text = client.post("/v1/answer", json={"question": "who?", "stream": True}).text
    frames = [dict(line.split(": ", 1) for line in frame.split("\n")) for frame in text.strip().split("\n\n")]
    assert [frame["event"] for frame in frames] == ["sources", "reasoning", "reasoning", "delta", "done"]
    assert [json.loads(frame["data"]) for frame in frames[1:3]] == [{"text": "Hm."}, {"text": " Yes."}]
    assert "reasoning_content" not in json.loads(frames[-1]["data"])


def test_an_answer_that_ends_while_the_model_thinks_is_empty_for_its_length(pipeline, client, openai_client) -> None:
    pipeline.script = [SCRIPT[0], Reasoning("Hm."), CUT]
    (choice,) = complete(openai_client).choices
    assert (choice.message.content, choice.message.reasoning_content, choice.finish_reason) == ("", "Hm.", "length")
    assert client.post("/v1/answer", json={"question": "who?"}).json()["answer"] == ""


def test_models_that_do_not_think_have_no_such_field(client, openai_client) -> None:
    assert not hasattr(complete(openai_client).choices[0].message, "reasoning_content")
    assert client.post("/v1/answer", json={"question": "who?"}).json()["reasoning_content"] is None


@pytest.mark.parametrize(
    "said",
    [
        {"content": "Tea."},
        {"content": "Tea.", "reasoning_content": "Hm.", "reasoning": "Hm."},
        {"content": "<think>\nHm.\n</think>\n\nTea."},
        {"content": [{"type": "text", "text": "<think>Hm.</think>Tea."}]},
    ],
)
def test_the_next_turn_has_the_answer_alone(pipeline, openai_client, said) -> None:
    complete(openai_client, [*ASKED, {"role": "assistant", **said}, {"role": "user", "content": "why?"}])
    assert pipeline.asked[-1][0] == Conversation("why?", (Turn("who?", "Tea."),))
