import functools
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from ragkv import models
from ragkv.config import EMBEDDED_EMBEDDER
from ragkv.errors import ModelError
from ragkv.retriever.encoders import Embedder


@pytest.fixture(scope="module")
def embedder() -> Embedder:
    home = Path(os.environ.get("RAGKV_HOME", "~/.ragkv")).expanduser()
    try:
        path = models.resolve(EMBEDDED_EMBEDDER, home)
    except ModelError as error:
        pytest.skip(f"{error} (`make models` fetches it)")
    return Embedder(path, device="cpu", batch_size=4)


def test_unit_vectors_in_the_order_given(embedder: Embedder) -> None:
    texts = ["A fox jumps.", "Bonds yield interest. " * 5, "Dogs sleep.", "x", "Paris is in France.", "A fox jumps."]
    vectors = embedder.embed(texts)
    assert vectors.shape == (6, embedder.dimension) and vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    for text, vector in zip(texts, vectors, strict=True):
        np.testing.assert_allclose(embedder.embed([text])[0], vector, atol=1e-4)


def test_question_is_near_its_answer(embedder: Embedder) -> None:
    vectors = embedder.embed(["A fox jumps over a dog.", "Bonds yield interest.", "Paris is the capital of France."])
    question = embedder.embed_question("What is France's capital city?")
    assert question.shape == (1, embedder.dimension)
    assert int(np.argmax(vectors @ question[0])) == 2


def test_no_texts(embedder: Embedder) -> None:
    assert embedder.embed([]).shape == (0, embedder.dimension)


def test_end_of_a_long_text_counts(embedder: Embedder) -> None:
    filler = "Bonds yield interest every year. " * 60  # beyond the model's 256 tokens
    plain, fox = embedder.embed([filler + filler, filler + "A fox jumps over a lazy dog. " * 60])
    question = embedder.embed_question("Which animal jumps over the dog?")[0]
    np.testing.assert_allclose(np.linalg.norm([plain, fox], axis=1), 1, atol=1e-5)
    assert fox @ question > plain @ question + 0.1
    assert len(embedder._windows(filler)) > 1 and "".join(embedder._windows(filler)) == filler


def test_a_long_question_is_searched_with_all_of_it(embedder: Embedder) -> None:
    """Two mails with the same beginning, beyond the model's 256 tokens, ask for different things."""
    mail = "Dear Sir or Madam, I bought your product last year in spring and was very content with it at first. " * 18
    vectors = embedder.embed(["The warranty lasts for two years.", "Returns are sent to the warehouse in Leipzig."])
    for i, question in enumerate(("How long is the warranty?", "Where do I send a return to?")):
        parts = embedder.embed_question(mail + question)
        assert len(parts) > 4 and parts.shape[1] == embedder.dimension
        assert int(np.argmax((vectors @ parts.T).max(axis=1))) == i
        np.testing.assert_allclose(np.linalg.norm(parts, axis=1), 1, atol=1e-5)
    assert len(embedder.embed_question("word " * 250)) == 1  # it fits


def test_threads_share_it(embedder: Embedder, request: pytest.FixtureRequest) -> None:
    request.addfinalizer(functools.partial(sys.setswitchinterval, sys.getswitchinterval()))
    sys.setswitchinterval(1e-6)
    expected = embedder.embed_question("one fox")
    with ThreadPoolExecutor(4) as pool:
        for vector in pool.map(embedder.embed_question, ["one fox", "one fox"] * 4):
            np.testing.assert_allclose(vector, expected, atol=1e-5)
        list(pool.map(lambda i: embedder.embed(["word " * (i * 50)]), range(1, 9)))


def test_folder_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="can't load .*missing"):
        Embedder(tmp_path / "missing")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="can't load"):
        Embedder(tmp_path)
