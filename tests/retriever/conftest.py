"""Small real pieces: a trained byte-level tokenizer, a bag-of-words embedder, a catalogue on disk."""

import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from ragkv.retriever.catalog import Catalog
from ragkv.retriever.chunking import ChunkText

SENTENCES = [
    "The quick brown fox jumps over the lazy dog.\n\n",
    "Every chunk of a document is read once, and its keys and values are kept.\n\n",
    "# Heading\n\nA paragraph follows the heading; then another one.\n\n",
]


class BagOfWords:
    """Sums a fixed random direction per word: texts that share words are near. [n, 16] float32, unit length."""

    dimension = 16

    def embed(self, texts: list[str]) -> npt.NDArray[np.float32]:
        vectors = np.array([sum(map(self._direction, text.lower().split())) for text in texts], np.float32)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    def embed_question(self, question: str) -> npt.NDArray[np.float32]:
        return self.embed([question])

    def _direction(self, word: str) -> npt.NDArray[np.float64]:
        return np.random.default_rng(zlib.crc32(word.strip(".?,").encode())).standard_normal(self.dimension)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES * 4, trainer)
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


@pytest.fixture(scope="session")
def embedder() -> BagOfWords:
    return BagOfWords()


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    with Catalog(tmp_path / "catalog.db") as catalog:
        yield catalog


@pytest.fixture(scope="session")
def chunk() -> Callable[[str], ChunkText]:
    """A chunk whose tokens are its bytes."""
    return lambda text: ChunkText(f"{text}\n\n", tuple(f"{text}\n\n".encode()))


@pytest.fixture(scope="session")
def put(chunk: Callable[[str], ChunkText], embedder: BagOfWords) -> Callable[..., None]:
    """Put a document of one chunk per text, embedded by BagOfWords."""

    def put(catalog: Catalog, id: str, *texts: str, digest: str = "digest") -> None:
        catalog.put_document(id, id.title(), digest, [chunk(text) for text in texts], embedder.embed(list(texts)))

    return put
