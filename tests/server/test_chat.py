"""OpenAI's protocol over real sockets, with their own client and LangChain's, and a scripted pipeline."""

import asyncio
import json
import re

import httpx
import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from server_harness import ANSWER, SCRIPT

from ragkv.answer import AnswerOptions, Conversation, Sampling, Turn
from ragkv.errors import ContextTooLongError, StoreError
from ragkv.policies import Policy

MODEL = "smollm2-135m-instruct"
ASKED = [{"role": "user", "content": "who?"}]
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
CALLED = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "21 degrees"},
    {"role": "assistant", "content": "b"},
]


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
    assert done.ragkv.keys() == known | {"hint_refused"}


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
        ([*ASKED, {"role": "system", "content": "Be kind."}], Conversation("who?", (), "Be kind.")),
        ([*CALLED, {"role": "user", "content": "c"}], Conversation("c", (Turn("a\n\n21 degrees", "b"),))),
        (CALLED[:3], Conversation("a\n\n21 degrees")),
        (
            [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
                {"role": "function", "name": "f", "content": "1"},
            ],
            Conversation("a\n\n1"),
        ),
        (
            [
                {"role": "system", "content": ""},
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}], "reasoning_content": "hm"},
                {"role": "user", "content": ["b", {"type": "text", "text": "c", "cache_control": {}}]},
                {"role": "user", "content": ""},
                {"role": "assistant", "content": None},
            ],
            Conversation("b\nc", (Turn("a", "No."),)),
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
        extra_body={
            "ragkv": {"policy": "none", "budget": 0, "top_k": 9, "hint": "pin"},
            **{"top_k": -1, "min_p": 0.1, "repetition_penalty": 1.2},
        },
    )
    (_, plain), (_, chosen) = pipeline.asked
    assert plain == AnswerOptions(Policy("query", 0.2), top_k=3, max_tokens=40)
    sampling = Sampling(0.5, 0.9, 3, ("\n",), 0.1, 0.2, 1.2, -1, 0.1)
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
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages: Value error, the last message"),
        ({"messages": [*CALLED, CALLED[2]]}, "messages: Value error, the last message"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages: Value error, the last message"),
        ({"messages": 5}, "messages: Input should be a valid list"),
        ({"messages": {"role": "user"}}, "messages: Input should be a valid list"),
        ({"messages": [5]}, "messages.0: "),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content."),
        ({"messages": [{"role": "user", "content": [5]}]}, "messages.0.content."),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages.0.content."),
        ({"messages": [{"role": "critic", "content": "x"}]}, "messages.0.role: "),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
            "messages.0.content: Value error, a part of type 'image_url' can't be read here; send text only",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 10_001}]},
            "body: Value error, messages have more than 10000 parts",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 100_000}]},
            "body: it has more than 100000 names of fields; send fewer, or join their texts",
        ),
        ({"tool_choice": "required"}, "body: Value error, tool_choice can't be used here: leave it out"),
        ({"tool_choice": CALL}, "body: Value error, tool_choice can't be used here: leave it out"),
        ({"continue_final_message": True}, "body: Value error, continue_final_message can't be used here"),
        ({"guided_choice": ["a"]}, "body: Value error, guided_choice can't be used here: leave it out"),
        ({"logit_bias": {"5": 1}}, "body: Value error, logit_bias can't be used here"),
        ({"response_format": {"type": "json_schema", "x": "y" * 9999}}, "body: Value error, response_format can't"),
        ({"stop": ""}, "stop.constrained-str: String should have at least 1 character"),
        ({"stop": ["\n", ""]}, "stop.constrained-str: Input should be a valid string; stop.list"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop.constrained-str: Input should be a valid string; stop.list"),
        ({"stop": "x" * 1001}, "stop.constrained-str: String should have at most 1000 characters"),
        ({"top_k": -2}, "top_k: Input should be greater than or equal to -1"),
        ({"top_p": 0}, "top_p: Input should be greater than 0"),
        ({"presence_penalty": 2.1}, "presence_penalty: Input should be less than or equal to 2"),
        ({"repetition_penalty": 0}, "repetition_penalty: Input should be greater than 0"),
        ({"seed": 1 << 63}, "seed: Input should be less than 9223372036854775808"),
        ({"max_completion_tokens": 0}, "max_completion_tokens: Input should be greater than or equal to 1"),
        ({"n": 2}, "body: Value error, n can't be used here: leave it out; 1 is accepted"),
        ({"response_format": {"type": "json_object"}}, "body: Value error, response_format can't be used"),
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


@pytest.mark.parametrize("messages", [[{"role": "user", "content": [5] * 10_000}], [{"role": "nobody"}] * 10_000])
def test_of_many_errors_the_first_are_named(client, messages) -> None:
    response = client.post("/v1/chat/completions", json={"messages": messages})
    message = response.json()["error"]["message"]
    assert response.status_code == 422 and message.startswith("messages.0.") and len(message) < 1000


def test_other_fields_are_ignored_and_counted(own_client, caplog) -> None:
    """Among them those that clients send by default; a name that anybody may choose is logged once, and no label."""
    nothing = {"n": 1, "tool_choice": "auto", "response_format": {"type": "text"}, "logprobs": False, "stop": []}
    tools = {"tools": [{"type": "function", "function": {"name": "f" * 9999}}], "parallel_tool_calls": True}
    extra = {"store": True, "metadata": {"a": "b"}, "temprature": 1, "keep_alive": "5m", "logit_bias": {}}
    for _ in range(2):
        body = {"messages": ASKED, **nothing, **tools, **extra, "max_tokens": None, "stream_options": None}
        assert own_client.post("/v1/chat/completions", json=body).status_code == 200
    found = own_client.get("/metrics").text
    counted = dict(re.findall(r'ragkv_ignored_fields_total{field="(.*?)"} (\S+)', found))
    assert counted == {**dict.fromkeys(("tools", "parallel_tool_calls", "store", "metadata"), "2.0"), "other": "4.0"}
    assert [r.getMessage() for r in caplog.records].count("the field 'temprature' of chat requests is ignored") == 1


def test_the_model_is_listed_and_no_other_is_served(openai_client) -> None:
    (card,) = openai_client.models.list().data
    assert (card.id, card.owned_by) == (MODEL, "ragkv")
    assert openai_client.models.retrieve(MODEL) == card
    for call in (openai_client.chat.completions.create, lambda model, messages: openai_client.models.retrieve(model)):
        with pytest.raises(openai.NotFoundError, match=f"org/gpt-9 isn't served here; it is {MODEL}"):
            call(model="org/gpt-9", messages=ASKED)


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


def test_langchain_goes_on_after_a_tool_that_it_called_elsewhere(client, pipeline) -> None:
    model = ChatOpenAI(base_url=f"{client.base_url}/v1", api_key="none", model=MODEL, max_retries=0)
    call = {"name": "weather", "args": {}, "id": "1"}
    said = [HumanMessage("a"), AIMessage("", tool_calls=[call]), ToolMessage("21 degrees", tool_call_id="1")]
    tool = {"name": "weather", "description": "Tell it", "parameters": {"type": "object", "properties": {}}}
    assert model.bind_tools([tool]).invoke(said).content == ANSWER.text
    model.invoke([*said, AIMessage("b"), HumanMessage("c")])
    asked = [conversation for conversation, _ in pipeline.asked]
    assert asked == [Conversation("a\n\n21 degrees"), Conversation("c", (Turn("a\n\n21 degrees", "b"),))]
    with pytest.raises(openai.UnprocessableEntityError, match="tool_choice can't be used here"):
        model.bind_tools([tool], tool_choice="weather").invoke("who?")


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
