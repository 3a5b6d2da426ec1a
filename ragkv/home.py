"""The home folder: where everything is stored, and which models it belongs to.

Models, KV and the profile are the home's; documents and vectors are each tenant's. The tenant `MAIN` has them in the
home itself, the others in `tenants/NAME`. Chunk hashes are keyed by the tenant's name, so that the store, which all of
them share, holds a text of two tenants twice, and neither can find the other's.
"""

import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock

from ragkv.config import MAIN, TENANT_NAME, StoreConfig
from ragkv.errors import BusyError, ConfigError, StoreError
from ragkv.retriever.catalog import Catalog
from ragkv.store.disk_store import DiskStore
from ragkv.store.fetching import Unneeded
from ragkv.store.prefixes import clear_prefixes, open_prefix_tier
from ragkv.store.tier import RemoteTier, open_tier

# Rows of the catalogue: how many contexts a chunk is precomputed in, and the hash of the anchor before it.
NUM_CONTEXTS_SETTING, ANCHOR_SETTING = "captures", "anchor"
_MODEL_SETTING, _EMBEDDER_SETTING = "model", "embedder"


@dataclass(frozen=True)
class Owner:
    """The models that a home was indexed with. Chunks are cut by the generator's tokens, vectors are the embedder's.

    embedder: empty where chunks have no vectors, as passages that were learnt.
    """

    model: str
    fingerprint: str
    embedder: str


class Home:
    """One home folder: its paths, its lock, and the check that it belongs to the models in use."""

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().absolute()
        self.kv, self.prefixes, self.profiles = self.path / "kv", self.path / "prefixes", self.path / "profile.json"
        self._lock = filelock.FileLock(self.path / "index.lock", timeout=0, thread_local=False)

    def folder(self, tenant: str) -> Path:
        """Return the folder of a tenant's documents and vectors. Raises ConfigError for a name that can't be one."""
        if not re.match(TENANT_NAME, tenant):
            raise ConfigError(
                f"{tenant!r} can't be a tenant's name; use up to 63 small letters, digits, - and _, and begin with a "
                "letter or a digit"
            )
        return self.path if tenant == MAIN else self.path / "tenants" / tenant

    def catalog_of(self, tenant: str) -> Path:
        return self.folder(tenant) / "catalog.sqlite"

    def tenants(self) -> list[str]:
        """Return the names of the tenants that have, or had, documents."""
        others = sorted(path.parent.name for path in self.path.glob("tenants/*/catalog.sqlite"))
        return [tenant for tenant in (MAIN, *others) if self.catalog_of(tenant).exists()]

    def make(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            why = error.strerror
            raise StoreError(f"can't make the home folder {self.path}: {why}; choose another --home") from error

    def open_catalog(self, tenant: str = MAIN) -> Catalog:
        self.make()
        catalog = Catalog(self.catalog_of(tenant), scope="" if tenant == MAIN else tenant)
        for file in self.folder(tenant).glob("index.faiss*"):
            file.unlink(missing_ok=True)  # of an earlier release: it has deleted documents' vectors
        return catalog

    def open_store(self, **options: Any) -> DiskStore:
        """Open the store of chunks' KV. Where it deletes chunks, it deletes all exact prefixes: any may have their
        text."""
        store = DiskStore(self.kv, **options)
        store.clear_derived = lambda: clear_prefixes(self.prefixes)
        return store

    def open_tier(
        self,
        store: DiskStore,
        settings: StoreConfig,
        unneeded: Unneeded = lambda hashes: (),
        is_quiet: Callable[[], bool] = lambda: True,
        waiting: Callable[[], Collection[str]] = lambda: (),
    ) -> RemoteTier | None:
        """Open the bucket behind the store of chunks' KV, and behind that of exact prefixes: see
        `ragkv.store.tier.open_tier`."""
        tier = open_tier(store, settings, unneeded, is_quiet, waiting)
        if tier is not None:
            disk_bytes = settings.prefix_options(self.prefixes)["disk_bytes"]
            is_shared = settings.shares_prefixes
            tier.derived = open_prefix_tier(self.prefixes, tier.remote, disk_bytes, is_quiet, is_shared=is_shared)
        return tier

    def catalogs(self) -> Iterator[Catalog]:
        """Yield every tenant's catalogue, open until the next one."""
        for tenant in self.tenants():
            with self.open_catalog(tenant) as catalog:
                yield catalog

    def chunk_hashes(self) -> set[str]:
        """Return the chunk hashes of every tenant's documents."""
        return set[str]().union(*(catalog.chunk_hashes() for catalog in self.catalogs()))

    def check_owner(self, owner: Owner) -> None:
        """Raise StoreError if the home holds documents that other models indexed."""
        for catalog in self.catalogs():
            fingerprint, embedder = catalog.get_setting(_MODEL_SETTING), catalog.get_setting(_EMBEDDER_SETTING)
            if fingerprint is None or not catalog.has_documents:
                continue
            name, _, indexed = fingerprint.rpartition(" ")
            where = catalog.path.parent
            remedy = f"Use that one, another --home, or delete {catalog.path} and index again"
            if indexed != owner.fingerprint:
                raise StoreError(
                    f"{where} was indexed with the model {name} (fingerprint {indexed[:8]}), not with {owner.model} "
                    f"(fingerprint {owner.fingerprint[:8]}). {remedy}"
                )
            if embedder and embedder != owner.embedder:
                raise StoreError(f"{where} was indexed with the embedder {embedder}, not {owner.embedder}. {remedy}")

    def fingerprint(self) -> str | None:
        """Return the fingerprint of the model that the documents were indexed with, None if none ever was."""
        fingerprint = None
        for catalog in self.catalogs():
            setting = catalog.get_setting(_MODEL_SETTING)
            if setting and (fingerprint is None or catalog.has_documents):
                fingerprint = setting.rpartition(" ")[2]
        return fingerprint

    def claim(self, catalog: Catalog, owner: Owner) -> None:
        """Record the models that a tenant's documents are indexed with from now on."""
        catalog.put_setting(_MODEL_SETTING, f"{owner.model} {owner.fingerprint}")
        catalog.put_setting(_EMBEDDER_SETTING, owner.embedder)

    @contextmanager
    def indexing(self) -> Iterator[None]:
        """Hold the home for this process, which changes it. Raises BusyError if another process holds it.

        Within one `Home` it may be held several times at once: its holders order their changes themselves.
        """
        try:
            self._lock.acquire()
        except filelock.Timeout:
            raise BusyError(
                f"another `ragkv` is changing {self.path} (index, store, or a server that indexes uploads); wait until "
                "it has finished"
            ) from None
        try:
            yield
        finally:
            self._lock.release()
