"""Cuts documents into chunks of the generator's tokens. Knows nothing about embeddings or where chunks are kept."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from semantic_text_splitter import MarkdownSplitter, TextSplitter
from tokenizers import Tokenizer

from ragkv.errors import ConfigError, DocumentError, ModelError
from ragkv.retriever.documents import Document

SEPARATOR = "\n\n"


@dataclass(frozen=True)
class ChunkText:
    """A piece of a document that ends in one blank line, and its tokens: without special ones, at most max_tokens."""

    text: str
    token_ids: tuple[int, ...]


class Chunker:
    """Splits at the highest boundaries that fit: headings, paragraphs, sentences, words, at last characters.

    folder: holds tokenizer.json. Chunks are encoded each on its own, and control tokens spelt out in a document
    ("<|im_end|>") become ordinary text.

    Raises ModelError if the tokenizer can't be loaded, ConfigError if max_tokens or overlap can't be used.
    """

    def __init__(self, folder: Path, max_tokens: int = 512, overlap: int = 0) -> None:
        self._tokenizer = _load(folder / "tokenizer.json")
        self._max_tokens = max_tokens
        self._overlap = overlap
        self._capacity = max_tokens - len(self._encode(SEPARATOR))
        if self._capacity < 1:
            raise ConfigError(f"chunks of {max_tokens} tokens leave no room for text; raise chunk_tokens")
        if not 0 <= overlap < max_tokens:
            raise ConfigError(
                f"an overlap of {overlap} tokens needs chunks longer than {max_tokens}; lower the overlap"
            )

    def split(self, document: Document) -> list[ChunkText]:
        """Return the document's chunks in order; none is empty.

        Raises DocumentError if a single character takes more than max_tokens.
        """
        return list(self._split(document.text, document.markdown, self._capacity, self._overlap))

    def _split(self, text: str, markdown: bool, capacity: int, overlap: int) -> Iterator[ChunkText]:
        kind = MarkdownSplitter if markdown else TextSplitter
        splitter = kind.from_huggingface_tokenizer(self._tokenizer, capacity, overlap=min(overlap, capacity - 1))
        for piece in splitter.chunks(text):
            if not (body := piece.rstrip()):
                continue
            token_ids = self._encode(body + SEPARATOR)
            if len(token_ids) <= self._max_tokens:
                if token_ids:
                    yield ChunkText(body + SEPARATOR, token_ids)
            elif capacity > 1:  # the splitter counts other tokens than these, so let it try in smaller pieces
                yield from self._split(body, markdown, capacity // 2, 0)
            else:
                raise DocumentError(f"{body[:20]!r} takes {len(token_ids)} tokens; raise chunk_tokens")

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)


def _load(path: Path) -> Tokenizer:
    try:
        tokenizer: Tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # `tokenizers` raises bare Exception for a damaged file
        raise ModelError(f"can't load {str(path)!r} ({error}); give a folder with a valid tokenizer.json") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer
