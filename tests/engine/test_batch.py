"""A batch on a real engine, in float32: the answers of single requests, whatever the order, also after it was broken
off."""

import asyncio
import json
import random

import psutil
import pytest

from ragkv.answer import Answer, AnswerOptions
from ragkv.batch.requests import read
from ragkv.batch.run import run
from ragkv.config import EMBEDDED_EMBEDDER, EMBEDDED_MODEL, Config
from ragkv.pipeline import Pipeline
from ragkv.policies import Policy

pytestmark = pytest.mark.engine

TEXTS = {
    "volcano": "Mount Etna is the tallest active volcano in Europe. It stands in Sicily, and it erupted in 2021.",
    "bridge": "The Akashi bridge spans 1,991 metres between two towers. It was opened in 1998 and links Kobe to Awaji.",
}
QUESTIONS = ["How tall is Etna?", "When was the Akashi bridge opened?", "Where is Etna?", "What links Kobe to Awaji?"]
INSTRUCTIONS = [f"You are clerk number {i}. " + "Say what the text is about, in a word or two. " * 20 for i in range(3)]
NUM_TOKENS = 8


@pytest.fixture(scope="module")
def home(whole_home):
    return whole_home


@pytest.fixture(scope="module")
def pipeline(runner, home, tmp_path_factory):
    model = {"name": EMBEDDED_MODEL, "dtype": "float32", "max_model_len": 2048, "kv_cache_gib": 1}
    config = Config(home=home, model=model, index={"embedder": EMBEDDED_EMBEDDER, "chunk_tokens": 128})
    folder = tmp_path_factory.mktemp("corpus")
    for name, text in TEXTS.items():
        (folder / f"{name}.md").write_text(f"# {name}\n\n" + "\n\n".join([text] * 6))
    pipeline = runner.run(Pipeline.open(config))
    runner.run(pipeline.ingest([folder]))
    yield pipeline
    runner.run(pipeline.close())


def lines():
    chats = [
        {
            "custom_id": f"chat-{i}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "messages": [
                    {"role": "system", "content": INSTRUCTIONS[i % 3]},
                    {"role": "user", "content": f"Text {i}: {random.Random(i).choice(list(TEXTS.values()))}"},
                ],
                "max_tokens": 1 + i % NUM_TOKENS,
            },
        }
        for i in range(18)
    ]
    prompt = {"custom_id": "prompt", "method": "POST", "url": "/v1/completions", "body": {"prompt": "One, two,"}}
    long = {**prompt, "custom_id": "long", "body": {"prompt": "so on and " * 2000}}
    asked = [{"question": question, "custom_id": question, "max_tokens": NUM_TOKENS} for question in QUESTIONS]
    return [*chats, prompt, long, *asked]


def requests(tmp_path, seed):
    file = tmp_path / f"{seed}.jsonl"
    file.write_text("\n".join(map(json.dumps, random.Random(seed).sample(lines(), k=len(lines())))))
    return read(file, EMBEDDED_MODEL)


def answers(file):
    found = {}
    for line in map(json.loads, file.read_text().splitlines()):
        body = line["response"]["body"]
        said = body["choices"][0] if "choices" in body else body
        text = said["message"]["content"] if "message" in said else said.get("text", said.get("answer"))
        assert line["custom_id"] not in found
        found[line["custom_id"]] = (line["response"]["status_code"], text)
    return found


def test_a_batch_answers_as_single_requests_do_and_computes_what_is_shared_once(runner, pipeline, tmp_path):
    summary = runner.run(run(pipeline, requests(tmp_path, 1), tmp_path / "out.jsonl"))
    assert (summary.answered, summary.failed, summary.earlier) == (len(lines()) - 1, 1, 0)
    found = answers(tmp_path / "out.jsonl")
    assert found["long"] == (413, None)
    assert summary.num_shared > 0
    assert summary.num_reused >= 0.9 * summary.num_shared

    async def alone(question):
        options = AnswerOptions(Policy.parse("guided:0.05"), pipeline.defaults.top_k, NUM_TOKENS, fresh=True)
        *_, answer = [event async for event in pipeline.answer(question, options)]
        assert isinstance(answer, Answer)
        return answer.text

    for question in QUESTIONS:
        assert found[question] == (200, runner.run(alone(question)))

    async def chat_alone(line):
        engine = await pipeline.start()
        tokens = pipeline.workspace.layout.chat_tokens(line["body"]["messages"])
        outputs = engine.generate(
            tokens, max_tokens=line["body"]["max_tokens"], salt=line["custom_id"], frequency_penalty=1.0
        )
        return "".join([output.text async for output in outputs])

    for line in lines()[:18:5]:
        assert found[line["custom_id"]] == (200, runner.run(chat_alone(line)))


def test_a_batch_that_is_broken_off_and_reordered_ends_with_the_same_answers(runner, pipeline, tmp_path):
    whole, broken = tmp_path / "whole.jsonl", tmp_path / "broken.jsonl"
    runner.run(run(pipeline, requests(tmp_path, 2), whole))

    async def broken_off(seed, num_answers):
        task = asyncio.ensure_future(run(pipeline, requests(tmp_path, seed), broken, lambda done, _: tell(task, done)))

        def tell(task, done):
            if done >= num_answers:
                task.cancel()

        with pytest.raises(asyncio.CancelledError):
            await task

    for seed, num_answers in ((3, 4), (4, 9), (5, 17)):
        runner.run(broken_off(seed, num_answers))
        assert num_answers <= len(answers(broken)) < len(lines())
    summary = runner.run(run(pipeline, requests(tmp_path, 6), broken))
    assert summary.earlier >= 17
    assert answers(broken) == answers(whole)
    assert runner.run(run(pipeline, requests(tmp_path, 7), broken)).earlier == len(lines())


def test_a_batch_goes_on_where_vllms_processes_end(runner, pipeline, tmp_path):
    whole, killed, names = tmp_path / "whole.jsonl", tmp_path / "killed.jsonl", []
    runner.run(run(pipeline, requests(tmp_path, 8), whole))

    def kill(done, _):
        if done >= 6 and not names:
            found = [
                child for child in psutil.Process().children(recursive=True) if "VLLM::Worker" in child.cmdline()[0]
            ]
            names.extend(child.pid for child in found)
            for child in found:
                child.kill()

    summary = runner.run(run(pipeline, requests(tmp_path, 9), killed, kill))
    assert len(names) == 1
    assert summary.answered == len(lines()) - 1
    assert answers(killed) == answers(whole)
