"""OpenAI's protocol over real sockets, with their own client and LangChain's, and a scripted pipeline."""

import asyncio
import json

import httpx
import openai
import pytest
from langchain_openai import ChatOpenAI
from server_harness import ANSWER, SCRIPT

from ragkv.answer import AnswerOptions, Conversation, Sampling, Turn
from ragkv.errors import ContextTooLongError, StoreError
from ragkv.policies import Policy

MODEL = "smollm2-135m-instruct"
ASKED = [{"role": "user", "content": "who?"}]


@pytest.fixture
def openai_client(client):
    return openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0, timeout=10)


def test_a_completion_carries_the_answer_and_where_it_is_from(openai_client) -> None:
    done = openai_client.chat.completions.create(model=MODEL, messages=ASKED)
    (choice,) = done.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", ANSWER.text, "stop")
    assert (done.object, done.model, done.id[:9]) == ("chat.completion", MODEL, "chatcmpl-")
    assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.total_tokens) == (30, 3, 33)
    assert done.usage.prompt_tokens_details.cached_tokens == 25
    assert done.ragkv["sources"][0]["document"] == "docs/a.md"
    assert done.ragkv["policy"] == "full" and done.ragkv["timings"]["ttft_ms"] == 20
    known = {"sources", "policy", "fallback", "usage", "timings", "plan", "prompt", "drift_estimate", "attempts"}
    assert done.ragkv.keys() == known


def test_a_stream_carries_the_same(openai_client) -> None:
    stream = openai_client.chat.completions.create(
        model=MODEL, messages=ASKED, stream=True, stream_options={"include_usage": True}
    )
    first, *deltas, last, usage = list(stream)
    assert first.choices[0].delta.role == "assistant" and first.ragkv["sources"][0]["chunk"] == 7
    assert [chunk.choices[0].delta.content for chunk in deltas] == ["Grüße,\n", " world"]
    assert last.choices[0].finish_reason == "stop" and last.ragkv["fallback"] == ANSWER.fallback
    assert usage.choices == [] and usage.usage.total_tokens == 33
    assert len({chunk.id for chunk in (first, *deltas, last, usage)}) == 1


def test_nothing_comes_before_the_first_token(pipeline, client) -> None:
    """Clients measure the time to first token by the first frame."""
    pipeline.script = [SCRIPT[0], asyncio.Event()]
    body = {"messages": ASKED, "stream": True}
    with pytest.raises(httpx.ReadTimeout), client.stream("POST", "/v1/chat/completions", json=body, timeout=1) as found:
        assert found.status_code == 200
        next(found.iter_lines())
    assert pipeline.cancelled.wait(5)


def test_a_stream_has_usage_only_on_request(openai_client) -> None:
    chunks = list(openai_client.chat.completions.create(model=MODEL, messages=ASKED, stream=True))
    assert all(chunk.usage is None for chunk in chunks) and chunks[-1].choices[0].finish_reason == "stop"


def test_the_end_is_marked_and_pieces_come_as_they_are_made(pipeline, client) -> None:
    body = {"messages": ASKED, "stream": True}
    assert client.post("/v1/chat/completions", json=body).text.endswith("data: [DONE]\n\n")
    pipeline.script = [*SCRIPT[:2], asyncio.Event()]
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert any("Grüße" in line for line in response.iter_lines())  # found before the end: the pipeline waits
    assert pipeline.cancelled.wait(5)


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        (ASKED, Conversation("who?")),
        (
            [
                {"role": "system", "content": "Be kind."},
                {"role": "assistant", "content": "How can I help?"},
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b"},
                {"role": "user", "content": [{"type": "text", "text": "c"}, {"type": "text", "text": "d"}]},
                {"role": "assistant", "content": "e", "refusal": None},
                {"role": "developer", "content": "Be brief."},
                {"role": "user", "content": "f"},
                {"role": "user", "content": "g", "name": "me"},
            ],
            Conversation("f\n\ng", (Turn("a", "b"), Turn("c\nd", "e")), "Be kind.\n\nBe brief."),
        ),
    ],
)
def test_messages_are_a_conversation(pipeline, client, messages, expected) -> None:
    assert client.post("/v1/chat/completions", json={"messages": messages}).status_code == 200
    ((asked, _),) = pipeline.asked
    assert asked == expected


def test_options_come_from_the_request_else_from_the_configuration(pipeline, openai_client) -> None:
    openai_client.chat.completions.create(model=MODEL, messages=ASKED)
    openai_client.chat.completions.create(
        model=MODEL,
        messages=ASKED,
        max_completion_tokens=7,
        temperature=0.5,
        top_p=0.9,
        seed=3,
        stop=["\n"],
        frequency_penalty=0.1,
        presence_penalty=0.2,
        n=1,
        user="me",
        extra_body={"ragkv": {"policy": "none", "budget": 0, "top_k": 9, "hint": "pin"}},
    )
    (_, plain), (_, chosen) = pipeline.asked
    assert plain == AnswerOptions(Policy("query", 0.2), top_k=3, max_tokens=40)
    sampling = Sampling(0.5, 0.9, 3, ("\n",), 0.1, 0.2)
    assert chosen == AnswerOptions(Policy("none", 0), top_k=9, max_tokens=7, hint="pin", sampling=sampling)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"messages": []}, "messages: "),
        (
            {"messages": [{"role": "user", "content": " "}]},
            "messages: Value error, the last message must be the user's",
        ),
        ({"messages": [*ASKED, {"role": "assistant", "content": "I"}]}, "messages: Value error, the last message"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role: "),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, "messages.0.content"),
        ({"tools": [{"type": "function"}]}, "body: Value error, tools can't be used here: leave it out"),
        ({"n": 2}, "body: Value error, n can't be used here: leave it out; 1 is accepted"),
        ({"response_format": {"type": "json_object"}}, "body: Value error, response_format can't be used"),
        ({"temprature": 1}, "temprature: Extra inputs are not permitted"),
        ({"temperature": 3}, "temperature: Input should be less than or equal to 2"),
        ({"ragkv": {"top_k": 0}}, "ragkv.top_k: "),
        ({"ragkv": {"policy": "cachblend"}}, "unknown policy 'cachblend'"),
    ],
)
def test_what_cannot_be_used_is_named(pipeline, openai_client, fields, named) -> None:
    with pytest.raises(openai.UnprocessableEntityError) as error:
        openai_client.chat.completions.create(**{"model": MODEL, "messages": ASKED, "extra_body": fields})
    assert error.value.body["message"].startswith(named)
    assert not pipeline.asked


def test_fields_without_effect_are_ignored(openai_client) -> None:
    nothing = {"n": 1, "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "logprobs": False}
    extra = {**nothing, "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "logit_bias": {}}
    assert openai_client.chat.completions.create(model=MODEL, messages=ASKED, extra_body=extra).choices


def test_the_model_is_listed_and_no_other_is_served(openai_client) -> None:
    (card,) = openai_client.models.list().data
    assert (card.id, card.owned_by) == (MODEL, "ragkv")
    with pytest.raises(openai.NotFoundError, match=f"gpt-9 isn't served here; it is {MODEL}"):
        openai_client.chat.completions.create(model="gpt-9", messages=ASKED)


def test_errors_before_and_in_a_stream(pipeline, openai_client) -> None:
    pipeline.script = [ContextTooLongError("too long", 9, 5)]
    with pytest.raises(openai.APIStatusError) as error:
        openai_client.chat.completions.create(model=MODEL, messages=ASKED, stream=True)
    assert error.value.status_code == 413 and error.value.body["limit"] == 5
    pipeline.script = [*SCRIPT[:2], StoreError("no space")]
    with pytest.raises(openai.APIError, match="no space"):
        list(openai_client.chat.completions.create(model=MODEL, messages=ASKED, stream=True))
    pipeline.is_ready = False
    with pytest.raises(openai.InternalServerError, match="not running"):
        openai_client.chat.completions.create(model=MODEL, messages=ASKED)


def test_langchain_asks_and_streams(client, pipeline) -> None:
    model = ChatOpenAI(base_url=f"{client.base_url}/v1", api_key="none", model=MODEL, max_retries=0)
    message = model.invoke([("system", "Be kind."), ("human", "a"), ("ai", "b"), ("human", "c")])
    assert message.content == ANSWER.text and message.usage_metadata["input_tokens"] == 30
    assert pipeline.asked[0][0] == Conversation("c", (Turn("a", "b"),), "Be kind.")
    assert "".join(chunk.content for chunk in model.stream("who?")) == "Grüße,\n world"


def test_the_interface_describes_both_forms(client) -> None:
    described = client.get("/openapi.json").json()["paths"]["/v1/chat/completions"]["post"]["responses"]
    assert described["200"]["content"].keys() == {"application/json", "text/event-stream"}
    assert {"404", "413", "422", "503"} < described.keys()
    assert json.dumps(described).count("ErrorResponse") == 9


def test_the_configured_penalty_is_of_requests_that_choose_none(pipeline, client, openai_client, monkeypatch) -> None:
    monkeypatch.setattr(pipeline, "defaults", pipeline.defaults.model_copy(update={"frequency_penalty": 1.0}))
    openai_client.chat.completions.create(model=MODEL, messages=ASKED)
    openai_client.chat.completions.create(model=MODEL, messages=ASKED, frequency_penalty=0)
    client.post("/v1/answer", json={"question": "who?"})
    assert [options.sampling.frequency_penalty for _, options in pipeline.asked] == [1, 0, 1]
