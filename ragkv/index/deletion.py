"""What `ragkv store` deletes from a home: documents by name, and KV that nothing uses. Starts no model.

As in an ingest, documents leave the catalogue first and their KV after: where a process is killed in between,
`collect_garbage` deletes the rest.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace

from ragkv.config import MAIN, StoreConfig
from ragkv.engine.task import ROOT_HASH
from ragkv.errors import StoreError, UnknownDocumentError
from ragkv.home import ANCHOR_SETTING, NUM_CONTEXTS_SETTING, Home
from ragkv.operations.selection import find_documents
from ragkv.retriever.catalog import Catalog
from ragkv.retriever.hashing import CONTEXTS, mean_hash
from ragkv.store.disk_store import DiskStore
from ragkv.store.record import ChunkKey
from ragkv.store.tier import RemoteTier

NO_DOCUMENT = "no document has it"
OTHER_MODEL = "of another model"
OTHER_CONTEXT = "precomputed after another anchor, or averaged over another number of contexts"
REPLACED = "beside what took its place: as store.codec has it, with one entry for a chunk or with two"
_NO_BUCKET = StoreConfig()  # a home that has one refuses it


@dataclass(frozen=True)
class Deletion:
    """What was deleted with some documents. num_chunks: those whose KV was deleted; num_shared: those that stay,
    because other documents have them. size_bytes: of the deleted KV, on disk. num_unreached: chunks whose KV may still
    be in the bucket, which couldn't be reached, all exact prefixes as one: it isn't used, and its deletion is tried
    again."""

    documents: list[str]
    num_chunks: int
    num_shared: int
    size_bytes: int
    num_unreached: int


@dataclass(frozen=True)
class Garbage:
    """KV that nothing uses, for one reason. size_bytes: on disk."""

    reason: str
    num_chunks: int
    size_bytes: int


def delete_documents(
    home: Home, names: Sequence[str], tenant: str = MAIN, settings: StoreConfig = _NO_BUCKET
) -> Deletion:
    """Delete documents, by id or by the path of a file or folder: none of them is on disk when it returns, nor in the
    bucket unless the deletion says so.

    Raises StoreError, having deleted nothing, for a name that no document has.
    """
    if not home.catalog_of(tenant).exists():
        raise StoreError(f"nothing is indexed in {home.folder(tenant)}; `ragkv index PATH` indexes documents")
    with home.indexing(), home.open_catalog(tenant) as catalog, _opened(home, settings) as (store, tier):
        try:
            ids = find_documents(catalog, names, str(home.path), on_disk=True)
        except UnknownDocumentError as error:
            raise UnknownDocumentError(f"{error}\nnothing was deleted") from error
        return delete_for_good(catalog, store, ids, tier=tier)


def delete_for_good(
    catalog: Catalog,
    store: DiskStore,
    ids: Collection[str],
    kept: Collection[str] = (),
    tier: RemoteTier | None = None,
) -> Deletion:
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
    num_unreached = 0 if tier is None else len(tier.delete_pending(unused))
    return Deletion(deleted, len(unused), len(hashes) - len(unused), size_bytes, num_unreached)


def collect_garbage(
    home: Home, settings: StoreConfig = _NO_BUCKET, *, dry_run: bool = False, remote: bool = False
) -> list[Garbage]:
    """Delete the KV that nothing in the home uses, and return how much it was; with dry_run only return it.

    remote: also in the bucket, where other homes' KV is nothing that this one uses.

    Opening the store frees, in any case, what killed processes had deleted and not freed. Raises StoreError for a home
    that nothing was indexed in: there all KV would be garbage, also what was just imported.
    """
    if home.fingerprint() is None:
        raise StoreError(
            f"nothing was indexed in {home.path} yet, so all of its KV would go; `ragkv index PATH` first, or delete "
            f"{home.kv}"
        )
    with home.indexing(), home.open_catalog() as catalog, _opened(home, settings) as (store, tier):
        joins = settings.joins
        garbage = _garbage(home, catalog, store.admin.sizes(), joins=joins)
        shared = _garbage(home, catalog, dict(tier.remote.sizes()), joins=joins) if tier is not None and remote else {}
        if not dry_run:
            store.delete({key.chunk_hash for key in garbage[NO_DOCUMENT]})
            store.delete_keys(key for keys in garbage.values() for key in keys)
            for each in home.catalogs():
                each.empty_log()
            if tier is not None:
                tier.delete_keys(key for keys in shared.values() for key in keys)
                tier.delete_pending()
    shared = {f"{reason}, in {settings.remote}": keys for reason, keys in shared.items()}
    return [
        Garbage(reason, len({key.chunk_hash for key in keys}), sum(keys.values()))
        for reason, keys in (garbage | shared).items()
    ]


@contextmanager
def _opened(home: Home, settings: StoreConfig) -> Iterator[tuple[DiskStore, RemoteTier | None]]:
    with closing(home.open_store()) as store:
        tier = home.open_tier(store, settings)
        with nullcontext() if tier is None else closing(tier):
            yield store, tier


def _garbage(
    home: Home, catalog: Catalog, sizes: Mapping[ChunkKey, int], *, joins: bool
) -> dict[str, dict[ChunkKey, int]]:
    """Return those of these entries that nothing in the home uses, by reason, with their sizes.

    joins: whether one entry is to hold a chunk's mean and its KV after the anchor alone.
    """
    fingerprint, anchor = home.fingerprint(), catalog.get_setting(ANCHOR_SETTING)
    num_contexts = int(catalog.get_setting(NUM_CONTEXTS_SETTING) or 1)
    forms = _forms(anchor, num_contexts) if anchor else ()
    contexts, wanted = set[str]().union(*forms), forms[joins and num_contexts > 1] if forms else set()
    hashes = home.chunk_hashes()
    garbage: dict[str, dict[ChunkKey, int]] = {NO_DOCUMENT: {}, OTHER_MODEL: {}, OTHER_CONTEXT: {}, REPLACED: {}}
    for key, size in sizes.items():
        is_anchor = key.anchor_hash == ROOT_HASH
        if not is_anchor and key.chunk_hash not in hashes:
            reason = NO_DOCUMENT
        elif key.fingerprint != fingerprint:
            reason = OTHER_MODEL
        elif contexts and (key.chunk_hash != anchor if is_anchor else key.anchor_hash not in contexts):
            reason = OTHER_CONTEXT
        elif wanted and not is_anchor and key.anchor_hash not in wanted and _all_stored(key, wanted, sizes):
            reason = REPLACED
        else:
            continue
        garbage[reason][key] = size
    return garbage


def _forms(anchor: str, num_contexts: int) -> tuple[set[str], set[str]]:
    """Return what stands in the anchor's place in the keys of a chunk's entries, where it has two, and where it has
    one."""
    alone, joined = {anchor}, mean_hash(anchor, CONTEXTS, num_contexts, joins=True)
    return alone | ({mean_hash(anchor, CONTEXTS, num_contexts)} if num_contexts > 1 else set()), {joined}


def _all_stored(key: ChunkKey, anchor_hashes: Collection[str], sizes: Mapping[ChunkKey, int]) -> bool:
    return all(replace(key, anchor_hash=anchor_hash) in sizes for anchor_hash in anchor_hashes)
