"""TTFT of a LangChain chain and a LlamaIndex chat engine before plain vLLM, with ragkv's connector and without it.

python tests/engine/clients_ttft.py [questions]

The clients know nothing of ragkv. Their passages, of the Python manual, are indexed; what the prompts begin with is
learnt meanwhile. Each question goes to both servers, in turns. LLAMA_INDEX_PYTHON names a Python that has LlamaIndex,
else only LangChain is asked. Prints a JSON line for each client: medians of the last half of its questions.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import yaml
from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnablePassthrough
from langchain_openai import ChatOpenAI
from test_plain_vllm import SERVED, metric, with_and_without
from transformers import AutoTokenizer

from ragkv import models
from ragkv.evals.manual import TITLES, excerpt
from ragkv.settings import load_config

PASSAGES, RETRIEVED, TOKENS = 24, 8, 504  # with the instruction and the question a prompt has 4,096 tokens and more
PAUSE_S = 6  # between two questions, in which ragkv may learn
QUIET_S = 2  # before each request: vLLM's worker looks for work for a second after it had some, without sleeping


class ByWords(BaseRetriever):
    passages: list[str]

    def _get_relevant_documents(self, query, *, run_manager):
        words = set(query.lower().split())
        ranked = sorted(self.passages, key=lambda each: -len(words & set(each.lower().split())))
        return [Document(text) for text in ranked[:RETRIEVED]]


class LangChain:
    def __init__(self, client, passages, _folder):
        template = ChatPromptTemplate.from_messages(
            [("system", "You answer briefly, by these passages:\n\n{context}"), ("human", "{question}")]
        )
        model = ChatOpenAI(base_url=str(client.base_url), api_key="none", model=SERVED, temperature=0, max_tokens=12)
        context = ByWords(passages=passages) | (lambda found: "\n\n".join(each.page_content for each in found))
        self._chain = {"context": context, "question": RunnablePassthrough()} | template | model | StrOutputParser()

    def ask(self, question):
        begin = time.perf_counter()
        pieces = self._chain.stream(question)
        while not next(pieces):
            pass
        ttft_s = time.perf_counter() - begin
        list(pieces)
        return ttft_s


class LlamaIndex:
    def __init__(self, client, passages, folder):
        file = folder / "passages.json"
        file.write_text(json.dumps(passages))
        program = Path(__file__).with_name("llama_index_client.py")
        command = [os.environ["LLAMA_INDEX_PYTHON"], str(program), str(client.base_url), SERVED]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen([*command, str(file), str(RETRIEVED), "1"], env=environment, **pipes)

    def ask(self, question):
        """LlamaIndex's stream never ends where an answer is empty, so this is the time of an answer of one token."""
        self._process.stdin.write(f"{question}\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())["s"]


def manual(tokenizer, drawing):
    """Passages that differ, each of one chunk."""
    texts = [" ".join(excerpt(title, drawing).split()) for title in drawing.sample(TITLES, PASSAGES)]
    return [tokenizer.decode(tokenizer.encode(text)[:TOKENS]).strip() for text in texts]


def prepared(folder, passages):
    """Index the passages. Returns vLLM's configuration with the connector, and its environment."""
    config = load_config()
    environment = {
        **os.environ,
        "RAGKV_HOME": str(folder / "home"),
        "RAGKV_MODEL__NAME": str(models.resolve(config.model.name, config.home)),
        "RAGKV_INDEX__EMBEDDER": str(models.resolve(config.index.embedder, config.home)),
        "RAGKV_MODEL__MAX_MODEL_LEN": "5120",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "TORCH_COMPILE_DISABLE": "1",
    }
    files = [folder / f"{i}.txt" for i in range(len(passages))]
    for file, passage in zip(files, passages, strict=True):
        file.write_text(passage)
    ragkv = [sys.executable, "-m", "ragkv"]
    subprocess.run([*ragkv, "index", *map(str, files)], env=environment, check=True, stdout=sys.stderr)
    written = subprocess.run([*ragkv, "vllm-config", "--learn"], env=environment, check=True, capture_output=True)
    return yaml.safe_load(written.stdout), environment


def compare(kind, clients, passages, num_questions, folder):
    asking = {is_on: kind(client, passages, folder) for is_on, client in clients.items()}
    drawing, times, reused = random.Random(1), {True: [], False: []}, []
    lengths = []  # of the prompts, in tokens
    for number in range(num_questions):
        words = " ".join(word for each in drawing.sample(passages, 2) for word in drawing.sample(each.split(), 6))
        before, asked = metric(clients[True], "reused_tokens"), metric(clients[False], "prompt_tokens", "vllm")
        for is_on in (True, False) if number % 2 else (False, True):
            time.sleep(QUIET_S)
            times[is_on].append(asking[is_on].ask(f"Question {number}: what of {words}?"))
        reused.append(metric(clients[True], "reused_tokens") - before)
        lengths.append(metric(clients[False], "prompt_tokens", "vllm") - asked)
        time.sleep(PAUSE_S)
    late = {is_on: median(each[num_questions // 2 :]) for is_on, each in times.items()}
    return {
        "client": kind.__name__,
        "questions": num_questions,
        "ragkv_ttft_s": [round(each, 3) for each in times[True]],
        "vllm_ttft_s": [round(each, 3) for each in times[False]],
        "speedup": round(late[False] / late[True], 2),
        "prompt_tokens": lengths,
        "reused_tokens": reused,
    }


def main(num_questions):
    config = load_config()
    tokenizer = AutoTokenizer.from_pretrained(models.resolve(config.model.name, config.home))
    passages = manual(tokenizer, random.Random(0))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with with_and_without(*prepared(folder, passages), folder) as clients:
            for kind in (LangChain, LlamaIndex) if "LLAMA_INDEX_PYTHON" in os.environ else (LangChain,):
                print(json.dumps(compare(kind, clients, passages, num_questions, folder)), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 12)
