"""A real cross-encoder of a few kilobytes, with random weights: what it scores is what decides the order."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertForSequenceClassification, BertModel, PreTrainedTokenizerFast

from ragkv.errors import ModelError
from ragkv.retriever.catalog import Catalog
from ragkv.retriever.encoders import Reranker
from ragkv.retriever.index import VectorIndex
from ragkv.retriever.keywords import KeywordIndex
from ragkv.retriever.retriever import Retriever

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "one", "two", "three", "four", "fox", "dogs", "cats", "birds", "who"]
TEXTS = ["one fox", "two dogs", "three cats", "four birds", "one fox two dogs three cats"]


def save(folder: Path, cls: type = BertForSequenceClassification, num_labels: int = 1) -> Path:
    """Write the model and its tokenizer, in Hugging Face format."""
    torch.manual_seed(3)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    others = {"vocab_size": len(WORDS), "max_position_embeddings": 32, "initializer_range": 1.0}
    config = BertConfig(num_labels=num_labels, **others, **sizes)
    cls(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=32, **names)
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def reranker(folder: Path) -> Reranker:
    return Reranker(folder, device="cpu", batch_size=2)


def test_scores_are_the_models_logits(folder: Path, reranker: Reranker) -> None:
    model = BertForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    expected = []
    for text in TEXTS:
        with torch.no_grad():
            expected.append(model(**tokenizer("who one", text, return_tensors="pt")).logits.item())
    assert max(expected) - min(expected) > 0.1 and max(map(abs, expected)) > 1  # no probabilities
    np.testing.assert_allclose(reranker.scores("who one", TEXTS), expected, atol=1e-5)


def test_long_texts_are_read_as_far_as_the_window_goes(reranker: Reranker) -> None:
    same, longer, other = reranker.scores("who", ["fox " * 40, "fox " * 400, "dogs " * 40])
    assert same == pytest.approx(longer) and same != pytest.approx(other)


def test_of_a_long_question_all_parts_are_read(reranker: Reranker) -> None:
    begin, end = ["who"] * 16, ["birds", "dogs"] * 8
    long, first, last = (reranker.scores(" ".join(words), TEXTS) for words in (begin + end, begin, end))
    np.testing.assert_allclose(long, np.maximum(first, last), atol=1e-5)
    assert (first != last).all()


def test_threads_share_it(reranker: Reranker) -> None:
    expected = reranker.scores("who", TEXTS)
    with ThreadPoolExecutor(4) as pool:
        for scores in pool.map(lambda _: reranker.scores("who", TEXTS), range(12)):
            np.testing.assert_allclose(scores, expected, atol=1e-5)


@pytest.mark.parametrize("hybrid", [False, True])
def test_it_decides_the_order(catalog: Catalog, put: Callable[..., None], embedder, reranker: Reranker, hybrid) -> None:
    put(catalog, "a", *TEXTS)
    index, keywords = VectorIndex(catalog), KeywordIndex(catalog) if hybrid else None
    question, earlier = "who one fox", ["two dogs"]
    plain = Retriever(catalog, index, embedder.embed_question, keywords).search(question, 5, earlier)
    hits = Retriever(catalog, index, embedder.embed_question, keywords, reranker.scores).search(question, 5, earlier)
    scores = reranker.scores(question, [hit.chunk.text for hit in hits])
    assert sorted(scores, reverse=True) == pytest.approx(scores.tolist())
    assert hits != plain and {hit.chunk.id: hit.score for hit in hits} == {hit.chunk.id: hit.score for hit in plain}
    best = Retriever(catalog, index, embedder.embed_question, keywords, reranker.scores).search(question, 1, earlier)
    assert best == hits[:1]
    among = Retriever(catalog, index, embedder.embed_question, keywords, reranker.scores, candidates=2).search(
        question, 1, earlier
    )
    assert among == [hit for hit in hits if hit in plain[:2]][:1]


def test_nothing_found(catalog: Catalog, embedder, reranker: Reranker) -> None:
    assert (
        Retriever(catalog, VectorIndex(catalog), embedder.embed_question, None, reranker.scores).search("fox", 3) == []
    )


def test_what_is_no_reranker(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="can't load the reranker .*nowhere"):
        Reranker(tmp_path / "nowhere")
    with pytest.raises(ModelError, match="gives 3 numbers for a pair"):
        Reranker(save(tmp_path / "classifier", num_labels=3), device="cpu")
    with pytest.raises(ModelError, match="is a BertModel, without a head"):
        Reranker(save(tmp_path / "embedder", BertModel), device="cpu")


def test_weights_that_are_no_numbers(tmp_path: Path) -> None:
    folder = save(tmp_path / "broken")
    model = BertForSequenceClassification.from_pretrained(folder)
    torch.nn.init.constant_(model.classifier.weight, float("nan"))
    model.save_pretrained(folder)
    with pytest.raises(ModelError, match="gave a score that is no number"):
        Reranker(folder, device="cpu").scores("who", TEXTS)
