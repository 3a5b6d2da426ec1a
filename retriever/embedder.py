"""Text to vectors by sentence-transformers. Knows nothing about chunks or the index."""

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ragkv.errors import ModelError

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

log = logging.getLogger(__name__)

Vectors = npt.NDArray[np.float32]


class Embedder:
    """An embedding model on `device` ("cpu", "cuda"; the best one by default), usable from many threads.

    Raises ModelError if the folder's model can't be loaded.
    """

    def __init__(self, folder: str | Path, device: str | None = None, batch_size: int = 32) -> None:
        self._model = _load(str(folder), device)
        self._batch_size = batch_size
        # Fast tokenizers refuse to be used by two threads, and torch keeps memory and threads for each that computes.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ragkv-embed")
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
        """Return the question's unit vector `[dimension]`, with the model's own prompt for questions if it has one."""
        encoding = self._thread.submit(
            self._model.encode_query, [question], show_progress_bar=False, convert_to_numpy=True
        )
        unit: Vectors = _normalised(np.asarray(encoding.result(), np.float32))[0]
        return unit

    def _encode(self, texts: list[str]) -> Vectors:
        encoding = self._thread.submit(
            self._model.encode_document,
            texts,
            batch_size=self._batch_size,
            show_progress_bar=False,
            convert_to_numpy=True,
            normalize_embeddings=True,
        )
        return np.asarray(encoding.result(), np.float32)

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

    def _windows(self, text: str) -> list[str]:
        """Cut the text into equal parts that fit the model's window."""
        if self._window is None or len(text.encode()) <= self._window:  # no token is shorter than a byte
            return [text]
        encoding = self._thread.submit(
            self._model.tokenizer,
            text,
            add_special_tokens=False,
            return_offsets_mapping=True,
            truncation=False,
            verbose=False,
        )
        offsets = encoding.result()["offset_mapping"]  # (start, end) characters per token
        num_windows = -(-len(offsets) // self._window)
        if num_windows <= 1:
            return [text]
        cuts = [offsets[len(offsets) * i // num_windows][0] for i in range(1, num_windows)]
        return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def _load(name: str, device: str | None) -> "SentenceTransformer":
    try:
        from sentence_transformers import SentenceTransformer

        return SentenceTransformer(name, device=device)
    except Exception as error:  # OSError, ValueError, safetensors and torch errors alike
        raise ModelError(f"can't load the embedder {name!r} ({error}); give a sentence-transformers folder") from error


def _normalised(vectors: Vectors) -> Vectors:
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    if not (np.isfinite(norms).all() and (norms > 0).all()):
        raise ModelError("the embedder gave a vector without direction (zero or not finite); choose another embedder")
    return np.asarray(vectors / norms, np.float32)
