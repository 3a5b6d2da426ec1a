"""The lines of a batch: what is read, and what is refused by its line's number."""

import json

import pytest

from ragkv.batch.requests import CompletionRequest, read
from ragkv.errors import ConfigError
from ragkv.server.answers import AnswerRequest
from ragkv.server.chat_request import ChatRequest

MODEL = "a-model"
CHAT = {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions"}
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}]


def written(tmp_path, *lines):
    file = tmp_path / "batch.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return file


def problems(tmp_path, *lines):
    with pytest.raises(ConfigError) as error:
        read(written(tmp_path, *lines), MODEL)
    return str(error.value)


def test_all_three_kinds_of_lines_are_read_in_order(tmp_path):
    prompt = {"custom_id": "p", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Once"}}
    chat = {**CHAT, "body": {"model": MODEL, "messages": MESSAGES, "max_tokens": 3, "user": "somebody"}}
    file = written(tmp_path, {"question": "Why?", "top_k": 2}, "", chat, prompt)
    first, second, third = read(file, MODEL)
    assert (first.custom_id, second.custom_id, third.custom_id) == ("line-1", "c", "p")
    assert isinstance(first.body, AnswerRequest)
    assert (first.body.question, first.body.top_k) == ("Why?", 2)
    assert isinstance(second.body, ChatRequest)
    assert [message.text for message in second.body.messages] == ["Be brief.", "Who?"]
    assert isinstance(third.body, CompletionRequest)
    assert (third.body.prompt, third.body.max_tokens) == ("Once", 16)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "line 1: it isn't JSON"),
        ("[1]", "line 1: it isn't a JSON object"),
        ({"question": " "}, "line 1: question: Value error, is blank"),
        ({"question": "Why?", "topk": 2}, "line 1: topk: Extra inputs"),
        ({"question": "Why?", "custom_id": 7}, "line 1: custom_id: 7 isn't a text"),
        ({**CHAT, "body": {"messages": []}}, "line 1: messages: List should have at least 1"),
        ({**CHAT, "body": {"messages": MESSAGES, "n": 2}}, "line 1: body: Value error, n can't be used here"),
        ({**CHAT, "body": {"messages": MESSAGES, "model": "other"}}, "'other' isn't the model that answers here"),
        (
            {**CHAT, "body": {"messages": MESSAGES, "stream": True}},
            "line 1: body.stream and body.ragkv are",
        ),
        ({**CHAT, "body": {"messages": MESSAGES, "ragkv": {"top_k": 2}}}, "line 1: body.stream and body.ragkv"),
        ({**CHAT, "url": "/v1/embeddings", "body": {}}, "line 1: url: Input should be '/v1/chat/completions'"),
        ({"custom_id": "x", "url": "/v1/completions", "body": {"prompt": ""}}, "line 1: prompt: "),
    ],
)
def test_a_line_that_cannot_be_used_is_named(tmp_path, line, problem):
    assert problem in problems(tmp_path, line)


def test_the_same_id_twice_is_named_with_both_lines(tmp_path):
    line = {"question": "Why?", "custom_id": "x"}
    assert "line 3: the custom_id 'x' is also that of line 1" in problems(tmp_path, line, {"question": "Who?"}, line)


def test_many_bad_lines_end_in_a_short_list(tmp_path):
    told = problems(tmp_path, *["{"] * 1000)
    assert told.count("\n") == 10
    assert "and perhaps more" in told


def test_files_that_are_no_batch_are_told_apart(tmp_path):
    assert "has no requests" in problems(tmp_path, "")
    with pytest.raises(ConfigError, match="can't read"):
        read(tmp_path / "none.jsonl", MODEL)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="isn't UTF-8"):
        read(tmp_path / "binary", MODEL)
