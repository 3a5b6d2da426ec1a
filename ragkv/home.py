"""The home folder: where everything lives, and whom it belongs to."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock

from ragkv.errors import StoreError
from ragkv.retriever.catalog import Catalog
from ragkv.store.segment_store import SegmentStore

# In the catalogue. Captures: how many are averaged; anchor: the hash of what chunks are captured behind.
CAPTURES_SETTING, ANCHOR_SETTING = "captures", "anchor"
_MODEL_SETTING, _EMBEDDER_SETTING = "model", "embedder"


@dataclass(frozen=True)
class Owner:
    """The models that a home was indexed with. Chunks are cut by the generator's tokens, vectors are the embedder's."""

    model: str
    fingerprint: str
    embedder: str


class Home:
    """Paths under `home`, and the check that it belongs to the models in use."""

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().absolute()
        self.kv = self.path / "kv"
        self.catalog = self.path / "catalog.sqlite"
        self.index = self.path / "index.faiss"

    def make(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(
                f"can't make the home folder {self.path}: {error.strerror}; choose another --home"
            ) from error

    def open_catalog(self) -> Catalog:
        self.make()
        return Catalog(self.catalog)

    def open_store(self, **options: Any) -> SegmentStore:
        return SegmentStore(self.kv, **options)

    def check_owner(self, catalog: Catalog, owner: Owner) -> None:
        """Raise StoreError if the home holds documents that other models indexed."""
        fingerprint, embedder = catalog.get_setting(_MODEL_SETTING), catalog.get_setting(_EMBEDDER_SETTING)
        if fingerprint is None or not catalog.documents():
            return
        name, _, digest = fingerprint.rpartition(" ")
        remedy = f"Use that one, another --home, or delete {self.catalog} and index again"
        if digest != owner.fingerprint:
            raise StoreError(
                f"{self.path} was indexed with the model {name} (fingerprint {digest[:8]}), not with {owner.model} "
                f"(fingerprint {owner.fingerprint[:8]}). {remedy}"
            )
        if embedder != owner.embedder:
            raise StoreError(f"{self.path} was indexed with the embedder {embedder}, not {owner.embedder}. {remedy}")

    def fingerprint(self, catalog: Catalog) -> str | None:
        """Of the model that the home was indexed with, None before the first time."""
        setting = catalog.get_setting(_MODEL_SETTING)
        return setting and setting.rpartition(" ")[2]

    def claim(self, catalog: Catalog, owner: Owner) -> None:
        """Record the models that the home's documents are indexed with from now on."""
        catalog.put_setting(_MODEL_SETTING, f"{owner.model} {owner.fingerprint}")
        catalog.put_setting(_EMBEDDER_SETTING, owner.embedder)

    @contextmanager
    def indexing(self) -> Iterator[None]:
        """Hold the home for one command that changes it. Raises StoreError if another one is at work."""
        try:
            with filelock.FileLock(self.path / "index.lock", timeout=0):
                yield
        except filelock.Timeout:
            raise StoreError(
                f"another `ragkv index` or `ragkv store` is at work on {self.path}; wait until it has finished"
            ) from None
