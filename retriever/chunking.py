"""Cuts documents into chunks of the generator's tokens. Knows nothing about embeddings or where chunks are kept."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from semantic_text_splitter import MarkdownSplitter, TextSplitter

from ragkv.errors import ConfigError, DocumentError
from ragkv.retriever.documents import Document
from ragkv.retriever.plain_text import PlainTokenizer
from ragkv.retriever.token_count import TokenCount

SEPARATOR = "\n\n"
_CHUNKS_AT_A_TIME = 4
_FIRST_WINDOW = 16  # characters for each token of a chunk: more than most texts have
_MARKDOWN_WINDOW = 1 << 14  # characters; what begins before and ends after it (a list, a table) is parsed as two
_LONGEST_LINE = 1 << 13  # characters of a line that somebody wrote


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
        self._tokenizer = PlainTokenizer(folder)
        self._max_tokens = max_tokens
        self._overlap = overlap
        self._capacity = max_tokens - len(self._tokenizer.encode(SEPARATOR))
        if self._capacity < 1:
            raise ConfigError(f"chunks of {max_tokens} tokens leave no room for text; raise chunk_tokens")
        if not 0 <= overlap < max_tokens:
            raise ConfigError(
                f"an overlap of {overlap} tokens needs chunks longer than {max_tokens}; lower the overlap"
            )

    def split(self, document: Document) -> Iterator[ChunkText]:
        """Yield the document's chunks in order, none of them empty, in time that grows with its length only.

        Raises DocumentError if a single character takes more than max_tokens.
        """
        text = document.text
        # A line that goes on and on is no Markdown, and to look for its end again and again takes too long.
        markdown = document.markdown and max(map(len, text.splitlines()), default=0) <= _LONGEST_LINE
        for piece in self._pieces(text, markdown):
            yield from self._fitting(piece, markdown, self._capacity)

    def _pieces(self, text: str, markdown: bool) -> Iterator[str]:
        """Split a window of the text at a time: for each chunk, the splitter may count the tokens of all that follows.

        It chooses a boundary by what comes before it and one chunk after it, so that the pieces are those of the whole
        text, but for the last one of each window, with which the next window begins.
        """
        splitter = self._splitter(markdown, self._capacity, self._overlap)
        start, size = 0, _FIRST_WINDOW * self._capacity
        while start < len(text):
            if markdown:
                size = max(size, _MARKDOWN_WINDOW)
            pieces = splitter.chunk_indices(text[start : start + size])
            if start + size >= len(text):
                yield from (piece for _, piece in pieces)
                return
            yield from (piece for _, piece in pieces[:-1])
            if len(pieces) > 1:
                start += pieces[-1][0]
                size = _CHUNKS_AT_A_TIME * max(len(piece) for _, piece in pieces)
            else:
                size *= 2

    def _fitting(self, piece: str, markdown: bool, capacity: int) -> Iterator[ChunkText]:
        if not (body := piece.rstrip()):
            return
        token_ids = tuple(self._tokenizer.encode(body + SEPARATOR))
        if len(token_ids) <= self._max_tokens:
            if token_ids:
                yield ChunkText(body + SEPARATOR, token_ids)
        elif capacity > 1:  # the splitter counts other tokens than these, so let it try in smaller pieces
            for part in self._splitter(markdown, capacity // 2, 0).chunks(body):
                yield from self._fitting(part, markdown, capacity // 2)
        else:
            raise DocumentError(f"{body[:20]!r} takes {len(token_ids)} tokens; raise chunk_tokens")

    def _splitter(self, markdown: bool, capacity: int, overlap: int) -> MarkdownSplitter | TextSplitter:
        kind = MarkdownSplitter if markdown else TextSplitter
        count = TokenCount(self._tokenizer.without_control, capacity)
        return kind.from_callback(count, capacity, overlap=min(overlap, capacity - 1))
