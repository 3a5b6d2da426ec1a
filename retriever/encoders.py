"""Texts to vectors, and pairs of texts to scores, by sentence-transformers. Knows nothing about chunks or indexes."""

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ragkv.errors import ModelError

log = logging.getLogger(__name__)

_QUESTION_PART = 64  # tokens, about a paragraph: docs/log/2026-11.md

Vectors = npt.NDArray[np.float32]


class Embedder:
    """An embedding model on `device` ("cpu", "cuda"; the best one by default), usable from many threads.

    Raises ModelError if the folder's model can't be loaded.
    """

    def __init__(self, folder: str | Path, device: str | None = None, batch_size: int = 32) -> None:
        with _loading("embedder", folder, "give a sentence-transformers folder"):
            from sentence_transformers import SentenceTransformer

            self._model = SentenceTransformer(str(folder), device=device)
        self._run, self._batch_size = _in_one_thread(), batch_size
        self._window = self._measure_window()
        self.dimension = int(self._encode(["dimension"]).shape[1])

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Return unit vectors `[n, dimension]` of the texts.

        A text longer than the model's window gets the mean of its windows, so that its end can be found too.
        Raises ModelError if the model yields anything but finite numbers.
        """
        vectors = np.empty((len(texts), self.dimension), np.float32)
        for start in range(0, len(texts), self._batch_size):
            batch = texts[start : start + self._batch_size]
            windows = [self._windows(text) for text in batch]
            encoded = self._encode([window for parts in windows for window in parts])  # [windows, dim]
            ends = np.cumsum([len(parts) for parts in windows])
            for row, part in enumerate(np.split(encoded, ends[:-1])):
                vectors[start + row] = part.mean(axis=0)
        return _normalised(vectors)

    def embed_question(self, question: str) -> Vectors:
        """Return the question's unit vector, with the model's own prompt for questions if it has one: `[1, dimension]`.

        A question longer than the model's window gets a vector for each of its parts `[n, dimension]`, since most of it
        (a mail, a log) is not what is asked: docs/log/2026-11.md.
        """
        parts = [question] if self._fits(question) else self._windows(question, _QUESTION_PART)
        encoded = self._run(self._model.encode_query, parts, show_progress_bar=False, convert_to_numpy=True)
        return _normalised(np.asarray(encoded, np.float32))

    def _encode(self, texts: list[str]) -> Vectors:
        encoded = self._run(
            self._model.encode_document,
            texts,
            batch_size=self._batch_size,
            show_progress_bar=False,
            convert_to_numpy=True,
            normalize_embeddings=True,
        )
        return np.asarray(encoded, np.float32)

    def _measure_window(self) -> int | None:
        """Return how many tokens of text fit into one pass next to special tokens and prompt; None for no limit."""
        limit = self._model.max_seq_length
        if limit is None:
            return None
        if not getattr(self._model.tokenizer, "is_fast", False):
            log.warning("the embedder has no fast tokenizer: only the first %d tokens of a chunk are searched", limit)
            return None
        prompts = [prompt or "" for prompt in (self._model.prompts or {}).values()]
        return max(1, limit - max(len(self._model.tokenizer(prompt)["input_ids"]) for prompt in ["", *prompts]))

    def _fits(self, text: str) -> bool:
        return len(self._windows(text)) == 1

    def _windows(self, text: str, most_tokens: int | None = None) -> list[str]:
        """Cut the text into equal parts that fit the model's window, or of `most_tokens` if that is less."""
        if self._window is None or len(text.encode()) <= self._window:  # no token is shorter than a byte
            return [text]
        size = min(self._window, most_tokens or self._window)
        windows: list[str] = self._run(_windows, self._model.tokenizer, text, size)
        return windows


class Reranker:
    """A cross-encoder on `device` ("cpu", "cuda"; the best one by default), usable from many threads.

    It reads a question and a text together, up to its window (often 512 tokens for both). Raises ModelError if
    the folder's model can't be loaded, or doesn't give one number for each pair.
    """

    def __init__(self, folder: str | Path, device: str | None = None, batch_size: int = 32) -> None:
        self._name = name = str(folder)
        with _loading("reranker", folder, "give the folder of a cross-encoder"):
            from sentence_transformers import CrossEncoder

            self._model: CrossEncoder = CrossEncoder(name, device=device)
        remedy = "choose a cross-encoder that was trained to rank"
        kind = next(iter(getattr(self._model.config, "architectures", None) or ()), "model")
        if len(self._model) == 1 and not kind.endswith("ForSequenceClassification"):  # its head would be random numbers
            raise ModelError(f"the reranker {name!r} is a {kind}, without a head that scores pairs; {remedy}")
        if self._model.num_labels != 1:
            raise ModelError(
                f"the reranker {name!r} gives {self._model.num_labels} numbers for a pair, not one; {remedy}"
            )
        self._run, self._batch_size = _in_one_thread(), batch_size

    def scores(self, question: str, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Return scores `[n]`, one for each text, higher for a better answer to the question; their scale is any.

        A question longer than half of the window is asked in parts, and the best score counts. Raises ModelError if the
        model yields anything but finite numbers.
        """
        from torch import nn

        parts, limit, tokenizer = [question], self._model.max_seq_length, self._model.tokenizer
        if limit is not None and getattr(tokenizer, "is_fast", False):
            parts = self._run(_windows, tokenizer, question, max(1, limit // 2))
        prediction = self._run(
            self._model.predict,
            [(part, text) for part in parts for text in texts],
            batch_size=self._batch_size,
            show_progress_bar=False,
            activation_fn=nn.Identity(),  # a sigmoid makes all large scores the same 1.0
        )
        scores = np.asarray(prediction, np.float32)
        if not np.isfinite(scores).all():
            raise ModelError(f"the reranker {self._name!r} gave a score that is no number; choose another reranker")
        best: npt.NDArray[np.float32] = scores.reshape(len(parts), len(texts)).max(axis=0)
        return best


def _windows(tokenizer: Any, text: str, most_tokens: int) -> list[str]:
    """Cut the text into equal parts of at most so many tokens."""
    options = {"add_special_tokens": False, "return_offsets_mapping": True, "truncation": False, "verbose": False}
    offsets = tokenizer(text, **options)["offset_mapping"]  # (start, end) for each token
    num_windows = -(-len(offsets) // most_tokens)
    cuts = [offsets[len(offsets) * i // num_windows][0] for i in range(1, num_windows)]
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def _in_one_thread() -> Callable[..., Any]:
    """Return a caller of functions: fast tokenizers refuse two threads, torch keeps memory and threads for each."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="ragkv-encode")
    return lambda function, *arguments, **options: pool.submit(function, *arguments, **options).result()


@contextmanager
def _loading(kind: str, folder: str | Path, remedy: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # OSError, ValueError, safetensors and torch errors alike
        raise ModelError(f"can't load the {kind} {str(folder)!r} ({error}); {remedy}") from error


def _normalised(vectors: Vectors) -> Vectors:
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    if not (np.isfinite(norms).all() and (norms > 0).all()):
        raise ModelError("the embedder gave a vector without direction (zero or not finite); choose another embedder")
    return np.asarray(vectors / norms, np.float32)
