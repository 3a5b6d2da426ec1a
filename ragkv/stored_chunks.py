"""Which chunks with stored KV stand in a prompt: of a home's documents, and passages that were learnt from prompts.

Whoever sends a `cache_salt` is told apart from everybody else. The documents are for requests without one; what is
learnt from requests with a salt is theirs alone, in a catalogue of its own.
"""

import hashlib
import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ragkv.chunk_kv import ChunkKV
from ragkv.config import MAIN
from ragkv.engine.task import ROOT_HASH, Span
from ragkv.home import ANCHOR_SETTING, NUM_CONTEXTS_SETTING, Home, Owner
from ragkv.prompt import PromptLayout
from ragkv.retriever.catalog import Catalog
from ragkv.retriever.chunking import ChunkText
from ragkv.retriever.hashing import chunk_hash
from ragkv.retriever.tokens import SEAM, TokenIndex
from ragkv.store.entries import EntryFolder
from ragkv.store.record import FORMAT_VERSION

_LEARNT = "learnt"
_MOST_OPEN = 64  # catalogues
_BEGINNING = 256  # tokens: chunks behind so many have their mean KV, whatever these are
_SOME = 8  # chunks that may stand before another one


@dataclass(frozen=True)
class Lacking:
    """A chunk's KV behind the beginning of prompts, which isn't stored. span: its place behind that."""

    beginning: tuple[int, ...]
    chunk: tuple[int, ...]
    span: Span


class Chunks:
    """The chunks of one catalogue, and what their KV is called. num_contexts: if the catalogue doesn't say."""

    def __init__(
        self,
        catalog: Catalog,
        anchor: Sequence[int],
        fingerprint: str,
        heads: tuple[int, int],
        num_contexts: int,
        *,
        joins: bool,
    ) -> None:
        self.catalog, self._index = catalog, TokenIndex(catalog)
        self._named = (anchor, fingerprint, heads)
        self._num_contexts, self._joins = num_contexts, joins
        self._index.sync()
        self.kv = self._chunk_kv()

    def find(self, token_ids: Sequence[int]) -> list[Span]:
        """Return the spans of chunks in a prompt, whether their KV is stored or not, in order of position."""
        if self._index.sync():
            self.kv = self._chunk_kv()
        return self.kv.found(token_ids, self._index.search(token_ids))

    def some(self, choice: random.Random) -> list[Span]:
        """Return up to `_SOME` chunks at random, in the spans in which they were precomputed."""
        ids = self.catalog.ids_after(0)
        tokens = self.catalog.tokens(choice.sample(ids, min(_SOME, len(ids))))
        return [self.kv.span(chunk_hash, len(token_ids)) for chunk_hash, token_ids in tokens.values()]

    def _chunk_kv(self) -> ChunkKV:
        num_contexts = int(self.catalog.get_setting(NUM_CONTEXTS_SETTING) or self._num_contexts)
        return ChunkKV(*self._named, num_contexts, joins=self._joins)


class StoredChunks:
    """Finds the chunks of a home in prompts, as far as their KV is stored.

    folder: of the model. heads: the range of KV heads in an entry. num_contexts: where the documents' catalogue doesn't
    say, which passages that are learnt follow. learns: whether there are such passages. Raises RagKVError if the home
    can't be used.
    """

    def __init__(
        self,
        home: Home,
        folder: Path,
        fingerprint: str,
        heads: tuple[int, int],
        num_contexts: int,
        *,
        joins: bool,
        learns: bool = False,
    ) -> None:
        self._home, self._learns = home, learns
        self.layout = PromptLayout(folder)
        self._owner = Owner(folder.name, fingerprint, "")
        self._named, self._num_contexts, self._joins = (self.layout.anchor, fingerprint, heads), num_contexts, joins
        self.entries = EntryFolder(home.kv / f"v{FORMAT_VERSION}")
        self._documents = self._open(home.open_catalog(MAIN))
        self._learnt: OrderedDict[str, Chunks] = OrderedDict()  # by the catalogue's name

    def find(self, token_ids: Sequence[int], salt: str | None) -> tuple[Span, ...]:
        """Return the spans of chunks in a prompt `[n]` whose KV is stored, for requests with this `cache_salt`.

        The first is among them only if it has KV that was computed behind the prompt's very beginning: what a mean is
        off there is off for all that follows.
        """
        spans = self.standing(token_ids, salt)
        at = first_chunk(spans)
        if at is not None:
            begin = _begins_at(spans[at])
            behind = None if begin is None else self._documents.kv.behind(spans[at], token_ids[:begin])
            spans[at : at + 1] = [behind] if behind is not None and self.is_stored(behind) else []
        return tuple(spans)

    def standing(self, token_ids: Sequence[int], salt: str | None) -> list[Span]:
        """Return the chunks in a prompt that have KV, with their mean, in order of position."""
        found: list[Span] = []
        for source in self._sources(salt):
            stored = [span for span in source.find(token_ids) if source.kv.is_stored(span, self.entries)]
            found += [span for span in stored if all(span.end <= s.start or s.end <= span.start for s in found)]
        return sorted(found, key=lambda span: span.start)

    def lacking(self, token_ids: Sequence[int], salt: str | None) -> tuple[tuple[int, ...], list[Lacking]]:
        """Return what a prompt begins with before its first chunk, and its chunks' KV behind that, as far as it isn't
        stored: whichever of them may come first another time."""
        spans = self.standing(token_ids, salt)
        at, kv = first_chunk(spans), self._documents.kv
        end = None if at is None else _begins_at(spans[at])
        if end is None:
            return (), []
        beginning, lacking = tuple(token_ids[:end]), []
        for name in dict.fromkeys(span.chunk_hash for span in spans[at:]):
            behind = kv.behind(Span(end, end, name, ""), beginning)
            chunk = None if self.is_stored(behind) else self._chunk(name, salt)
            if chunk is not None:
                lacking.append(Lacking(beginning, chunk, replace(behind, end=end + len(chunk))))
        return beginning, lacking

    def is_stored(self, span: Span) -> bool:
        return self._documents.kv.is_stored(span, self.entries)

    def drop_if_deleted(self, span: Span) -> None:
        """Delete the entry of a span if its chunk was deleted while that was computed: then it's the only one left."""
        key = self._documents.kv.key(span)
        if self.entries.keys_of(span.chunk_hash) == [key]:
            self.entries.delete([key])

    def _sources(self, salt: str | None) -> list[Chunks]:
        learnt = self.learnt_by(salt) if self._learns else None
        return [*([] if salt is not None else [self._documents]), *([] if learnt is None else [learnt])]

    def _chunk(self, chunk_hash: str, salt: str | None) -> tuple[int, ...] | None:
        found = (source.catalog.chunk_of(chunk_hash) for source in self._sources(salt))
        return next((tuple(chunk.token_ids) for chunk in found if chunk is not None), None)

    def learnt_by(self, salt: str | None, *, make: bool = False) -> Chunks | None:
        """Return the passages that were learnt from requests with this salt; None if there are none.

        make: begin to keep some. Raises StoreError if that can't be done.
        """
        name = _LEARNT if salt is None else f"{_LEARNT}-{hashlib.sha256(salt.encode()).hexdigest()[:32]}"
        if name in self._learnt:
            self._learnt.move_to_end(name)
            return self._learnt[name]
        if not make and not self._home.catalog_of(name).exists():
            return None
        catalog = self._home.open_catalog(name)
        if make:
            self._home.claim(catalog, self._owner)
            catalog.put_setting(NUM_CONTEXTS_SETTING, str(self._documents.kv.num_contexts))
            catalog.put_setting(ANCHOR_SETTING, self._documents.kv.anchor_hash)
        self._learnt[name] = self._open(catalog)
        while len(self._learnt) > _MOST_OPEN:
            self._learnt.popitem(last=False)[1].catalog.close()
        return self._learnt[name]

    def put(self, learnt: Chunks, token_ids: Sequence[int]) -> None:
        """Have a passage found from now on, whose KV is stored. Raises StoreError."""
        text = self.layout.text(token_ids)
        name, none = chunk_hash(token_ids, learnt.catalog.scope), np.zeros((1, 1), np.float32)
        learnt.catalog.put_document(name, _title(text), name, [ChunkText(text, tuple(token_ids))], none)

    def _open(self, catalog: Catalog) -> Chunks:
        return Chunks(catalog, *self._named, self._num_contexts, joins=self._joins)


def first_chunk(spans: Sequence[Span]) -> int | None:
    """Return which of the spans is the first chunk's, if it stands near the beginning; the anchor's isn't one."""
    at = 1 if spans and spans[0].anchor_hash == ROOT_HASH else 0
    return at if at < len(spans) and spans[at].start < _BEGINNING else None


def _begins_at(span: Span) -> int | None:
    """Return where a chunk's own first token would be; None if that isn't there, or not nearly."""
    begin = span.start - span.offset
    return begin if span.offset <= SEAM and begin >= 0 else None


def _title(text: str) -> str:
    """Return how a passage begins."""
    words = " ".join(text.split())
    return words if len(words) <= 60 else f"{words[:59]}…"
