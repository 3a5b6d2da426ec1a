"""Opening a home with the options of retrieval: real models, no vLLM."""

import asyncio
import os
from pathlib import Path

import pytest

from ragkv import models
from ragkv.config import EMBEDDED_EMBEDDER, EMBEDDED_MODEL, Config
from ragkv.errors import ConfigError, ModelError
from ragkv.retriever.chunking import ChunkText
from ragkv.workspace import Workspace


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """An empty home with the embedded models."""
    there = Path(os.environ.get("RAGKV_HOME", "~/.ragkv")).expanduser()
    try:
        for name in (EMBEDDED_MODEL, EMBEDDED_EMBEDDER):
            models.resolve(name, there)
    except ModelError as error:
        pytest.skip(f"{error} (`make models` fetches it)")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "models").symlink_to(there / "models")
    return tmp_path / "home"


@pytest.mark.parametrize("tenant", ["main", "acme"])
def test_hybrid_finds_by_words(home: Path, tenant: str) -> None:
    full = "E1287: the disk is full, or the quota is spent, so that nothing can be written."
    texts = [full, "F1286: wait.", "D1288: try again."]
    orders = {}
    for mode in ("vector", "hybrid"):
        at = Workspace(Config(home=home, retrieval={"mode": mode}), lambda line: None)
        chunks = [ChunkText(text, tuple(text.encode())) for text in texts]
        corpus = at.corpus(tenant)
        corpus.catalog.put_document("a", "a", "digest", chunks, at.embedder.embed(texts))
        hits = at.retriever(corpus).search("E1287?", 3)
        assert {hit.scope for hit in hits} == {corpus.catalog.scope}
        orders[mode] = [hit.chunk.text for hit in hits]
        asyncio.run(at.close())
    assert sorted(orders["vector"]) == sorted(orders["hybrid"]) == sorted(texts)
    assert (orders["vector"][2], orders["hybrid"][0]) == (full, full)


@pytest.mark.parametrize(
    ("reranker", "problem"),
    [
        ("no/such/folder", "No model 'no/such/folder': there is no such folder"),
        (EMBEDDED_EMBEDDER, "is a BertModel, without a head that scores pairs"),
    ],
)
def test_what_is_no_reranker_is_told_at_once(home: Path, reranker: str, problem: str) -> None:
    with pytest.raises(ModelError, match=problem):
        Workspace(Config(home=home, retrieval={"reranker": reranker}), lambda line: None)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"model": {"max_model_len": 512}}, r"chunk_tokens = 512 .* context of 512 .* or raise model.max_model_len"),
        ({"index": {"chunk_tokens": 8192}}, r"chunk_tokens = 8192 .* context of 8192 tokens.* leave \d+; lower one"),
        ({"model": {"max_model_len": 768}, "answer": {"max_tokens": 700}}, r"answer.max_tokens = 700 leave \d+;"),
    ],
)
def test_chunks_that_fit_into_no_prompt_are_told_before_anything_is_loaded(home: Path, settings, problem) -> None:
    reported: list[str] = []
    with pytest.raises(ConfigError, match=problem):
        Workspace(Config(home=home, **settings), reported.append)
    assert not reported
