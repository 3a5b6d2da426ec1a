"""A LlamaIndex chat engine with a retriever of its own, in a Python that has LlamaIndex (`LLAMA_INDEX_PYTHON`).

Its dependencies don't fit vLLM's (setuptools, openai). Arguments: the server's address, the model, and a file with
passages as a JSON list. Asks each line of its input, and prints the answers as a JSON list.
"""

import json
import sys
from pathlib import Path

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.chat_engine import ContextChatEngine
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.llms.openai_like import OpenAILike


class ByWords(BaseRetriever):
    """Passages by the words that they share with a question."""

    def __init__(self, passages):
        super().__init__()
        self._passages = passages

    def _retrieve(self, query_bundle):
        words = set(query_bundle.query_str.lower().split())
        ranked = sorted(self._passages, key=lambda each: -len(words & set(each.lower().split())))
        return [NodeWithScore(node=TextNode(text=text), score=1.0) for text in ranked[:12]]


def main(url, model, passages):
    llm = OpenAILike(
        model=model, api_base=url, api_key="none", is_chat_model=True, context_window=2048, max_tokens=12, temperature=0
    )
    retriever = ByWords(json.loads(Path(passages).read_text()))
    engine = ContextChatEngine.from_defaults(retriever=retriever, llm=llm, system_prompt="You are brief.")
    print(json.dumps([engine.chat(line.strip()).response for line in sys.stdin]))


main(*sys.argv[1:])
