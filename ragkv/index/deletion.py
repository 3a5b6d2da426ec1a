"""What `ragkv store` deletes from a home: documents by name, and KV that nothing uses. Starts no model.

As in an ingest, documents leave the catalogue first and their KV after: where a process is killed in between,
`collect_garbage` deletes the rest.
"""

from collections.abc import Collection, Sequence
from contextlib import closing
from dataclasses import dataclass

from ragkv.config import MAIN
from ragkv.engine.task import ROOT_HASH
from ragkv.errors import StoreError, UnknownDocumentError
from ragkv.home import ANCHOR_SETTING, NUM_CONTEXTS_SETTING, Home
from ragkv.operations.selection import find_documents
from ragkv.retriever.catalog import Catalog
from ragkv.retriever.hashing import CONTEXTS, mean_hash
from ragkv.store.disk_store import DiskStore
from ragkv.store.record import ChunkKey

NO_DOCUMENT = "no document has it"
OTHER_MODEL = "of another model"
OTHER_CONTEXT = "precomputed after another anchor, or averaged over another number of contexts"


@dataclass(frozen=True)
class Deletion:
    """What was deleted with some documents. num_chunks: those whose KV was deleted; num_shared: those that stay,
    because other documents have them. size_bytes: of the deleted KV, on disk."""

    documents: list[str]
    num_chunks: int
    num_shared: int
    size_bytes: int


@dataclass(frozen=True)
class Garbage:
    """KV that nothing uses, for one reason. size_bytes: on disk."""

    reason: str
    num_chunks: int
    size_bytes: int


def delete_documents(home: Home, names: Sequence[str], tenant: str = MAIN) -> Deletion:
    """Delete documents, by id or by the path of a file or folder: none of them is on disk when it returns.

    Raises StoreError, having deleted nothing, for a name that no document has.
    """
    if not home.catalog_of(tenant).exists():
        raise StoreError(f"nothing is indexed in {home.folder(tenant)}; `ragkv index PATH` indexes documents")
    with home.indexing(), home.open_catalog(tenant) as catalog, closing(home.open_store()) as store:
        try:
            ids = find_documents(catalog, names, str(home.path), on_disk=True)
        except UnknownDocumentError as error:
            raise UnknownDocumentError(f"{error}\nnothing was deleted") from error
        return delete_for_good(catalog, store, ids)


def delete_for_good(catalog: Catalog, store: DiskStore, ids: Collection[str], kept: Collection[str] = ()) -> Deletion:
    """Delete documents with their vectors, and the KV of chunks that only they have.

    kept: hashes of chunks whose KV stays, because documents with them are just being indexed.
    """
    hashes = catalog.chunk_hashes_of(ids)
    deleted = [id for id in ids if catalog.delete_document(id)]
    unused = catalog.unreferenced(hashes) - set(kept)
    size_bytes = sum(store.admin.sizes(key for hash in unused for key in store.entries.keys_of(hash)).values())
    if unused:
        store.delete(unused)
    catalog.empty_log()
    return Deletion(deleted, len(unused), len(hashes) - len(unused), size_bytes)


def collect_garbage(home: Home, *, dry_run: bool = False) -> list[Garbage]:
    """Delete the KV that nothing in the home uses, and return how much it was; with dry_run only return it.

    Opening the store frees, in any case, what killed processes had deleted and not freed. Raises StoreError for a home
    that nothing was indexed in: there all KV would be garbage, also what was just imported.
    """
    if home.fingerprint() is None:
        raise StoreError(
            f"nothing was indexed in {home.path} yet, so all of its KV would go; `ragkv index PATH` first, or delete "
            f"{home.kv}"
        )
    with home.indexing(), home.open_catalog() as catalog, closing(home.open_store()) as store:
        garbage = _garbage(home, catalog, store)
        if not dry_run:
            store.delete_keys(key for keys in garbage.values() for key in keys)
            for each in home.catalogs():
                each.empty_log()
    return [
        Garbage(reason, len({key.chunk_hash for key in keys}), sum(keys.values())) for reason, keys in garbage.items()
    ]


def _garbage(home: Home, catalog: Catalog, store: DiskStore) -> dict[str, dict[ChunkKey, int]]:
    """Return the records that nothing uses, by reason, with their sizes on disk."""
    fingerprint, anchor = home.fingerprint(), catalog.get_setting(ANCHOR_SETTING)
    num_contexts = int(catalog.get_setting(NUM_CONTEXTS_SETTING) or 1)
    means = {mean_hash(anchor, CONTEXTS, num_contexts, joins=joins) for joins in (False, True)} if anchor else set()
    contexts = {anchor, *means} if anchor else None
    hashes = home.chunk_hashes()
    garbage: dict[str, dict[ChunkKey, int]] = {NO_DOCUMENT: {}, OTHER_MODEL: {}, OTHER_CONTEXT: {}}
    for key, size in store.admin.sizes().items():
        is_anchor = key.anchor_hash == ROOT_HASH
        if not is_anchor and key.chunk_hash not in hashes:
            reason = NO_DOCUMENT
        elif key.fingerprint != fingerprint:
            reason = OTHER_MODEL
        elif contexts and (key.chunk_hash != anchor if is_anchor else key.anchor_hash not in contexts):
            reason = OTHER_CONTEXT
        else:
            continue
        garbage[reason][key] = size
    return garbage
