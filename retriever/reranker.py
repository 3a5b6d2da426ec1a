"""Scores of how well texts answer a question, by a cross-encoder. Knows nothing about how the texts were found."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ragkv.errors import ModelError

if TYPE_CHECKING:
    from sentence_transformers import CrossEncoder


class Reranker:
    """A cross-encoder on `device` ("cpu", "cuda"; the best one by default), usable from many threads.

    It reads a question and a text together, up to its window (often 512 tokens for both). Raises ModelError if
    the folder's model can't be loaded, or doesn't give one number for each pair.
    """

    def __init__(self, folder: str | Path, device: str | None = None, batch_size: int = 32) -> None:
        self._name = str(folder)
        self._model = _load(self._name, device)
        self._batch_size = batch_size
        # Fast tokenizers refuse to be used by two threads, and torch keeps memory and threads for each that computes.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ragkv-rerank")

    def scores(self, question: str, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Return scores `[n]`, one for each text, higher for a better answer to the question; their scale is any.

        Raises ModelError if the model yields anything but finite numbers.
        """
        from torch import nn

        prediction = self._thread.submit(
            self._model.predict,
            [(question, text) for text in texts],
            batch_size=self._batch_size,
            show_progress_bar=False,
            activation_fn=nn.Identity(),  # a sigmoid makes all large scores the same 1.0
        )
        scores = np.asarray(prediction.result(), np.float32)
        if not np.isfinite(scores).all():
            raise ModelError(f"the reranker {self._name!r} gave a score that is no number; choose another reranker")
        return scores


def _load(name: str, device: str | None) -> "CrossEncoder":
    try:
        from sentence_transformers import CrossEncoder

        model: CrossEncoder = CrossEncoder(name, device=device)
    except Exception as error:  # OSError, ValueError, safetensors and torch errors alike
        raise ModelError(f"can't load the reranker {name!r} ({error}); give the folder of a cross-encoder") from error
    remedy = "choose a cross-encoder that was trained to rank"
    kind = next(iter(getattr(model.config, "architectures", None) or ()), "model")
    if len(model) == 1 and not kind.endswith("ForSequenceClassification"):  # it would get a head of random numbers
        raise ModelError(f"the reranker {name!r} is a {kind}, without a head that scores pairs; {remedy}")
    if model.num_labels != 1:
        raise ModelError(f"the reranker {name!r} gives {model.num_labels} numbers for a pair, not one; {remedy}")
    return model
