"""A LlamaIndex chat engine with a retriever of its own, in a Python that has LlamaIndex (`LLAMA_INDEX_PYTHON`).

Its dependencies don't fit vLLM's (setuptools, openai). Arguments: the server's address, the model, a file with passages
as a JSON list, how many of them to retrieve, and how long answers may be, in tokens. Asks each line of its input, and
prints a JSON line for each: the answer, and the seconds that it took.
"""

import json
import sys
import time
from pathlib import Path

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.chat_engine import ContextChatEngine
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.llms.openai_like import OpenAILike


class ByWords(BaseRetriever):
    """Passages by the words that they share with a question."""

    def __init__(self, passages, count):
        super().__init__()
        self._passages, self._count = passages, count

    def _retrieve(self, query_bundle):
        words = set(query_bundle.query_str.lower().split())
        ranked = sorted(self._passages, key=lambda each: -len(words & set(each.lower().split())))
        return [NodeWithScore(node=TextNode(text=text), score=1.0) for text in ranked[: self._count]]


def main(url, model, passages, count, max_tokens):
    options = {"is_chat_model": True, "context_window": 5120, "max_tokens": int(max_tokens), "temperature": 0}
    llm = OpenAILike(model=model, api_base=url, api_key="none", **options)
    retriever = ByWords(json.loads(Path(passages).read_text()), int(count))
    engine = ContextChatEngine.from_defaults(retriever=retriever, llm=llm, system_prompt="You are brief.")
    for line in sys.stdin:
        begin = time.perf_counter()
        answer = engine.chat(line.strip()).response
        print(json.dumps({"answer": answer, "s": time.perf_counter() - begin}), flush=True)


main(*sys.argv[1:])
