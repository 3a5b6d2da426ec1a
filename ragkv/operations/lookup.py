"""Where documents' KV is, and how it is used."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ragkv.config import MAIN
from ragkv.home import Home
from ragkv.operations.selection import Selection, find_documents, known_tenant
from ragkv.store.control import EntryInfo
from ragkv.store.disk_store import DiskStore
from ragkv.store.record import ChunkKey

Held = Mapping[ChunkKey, int]  # the entries in the worker's memory, with the bytes that they take


@dataclass(frozen=True)
class TierKV:
    """What a tier has of a document. num_chunks: those of which it has any entry."""

    num_chunks: int
    size_bytes: int


@dataclass(frozen=True)
class Tiers:
    """A document's KV in each tier, the fastest first; None where it isn't known, or there is no such tier."""

    memory: TierKV | None
    page_cache: TierKV
    disk: TierKV
    remote: TierKV | None = None


@dataclass(frozen=True)
class DocumentKV:
    """A document's KV, of all its chunks. Chunks that documents share count for each of them.

    codecs: entries by codec. uses: of the entries, their storing among them. used_at: when one was used last, in
    seconds since 1970. hints: chunks by hint, those without one left out.
    """

    tenant: str
    name: str
    num_chunks: int
    tiers: Tiers
    codecs: dict[str, int]
    uses: int
    used_at: float | None
    hints: dict[str, int]


def pages(
    home: Home,
    store: DiskStore,
    selection: Selection,
    held: Callable[[], Held | None],
    after: str = "",
    size: int = 100,
) -> Iterator[list[DocumentKV]]:
    """Yield the documents of a selection in pages, by tenant and name.

    held: called for each page; None if nobody knows what is in memory. after: the `tenant:name` that the pages follow.
    Raises UnknownDocumentError as `choose` does.
    """
    first, _, name = after.partition(":")
    tenants = home.tenants()
    if selection.names or selection.tenant is not None:
        tenants = [known_tenant(home, selection.tenant or MAIN)]
    tenants.sort()
    model = home.fingerprint()
    for tenant in (each for each in tenants if each >= first):
        with home.open_catalog(tenant) as catalog:
            ids = catalog.document_ids()
            if selection.names:
                ids = sorted(find_documents(catalog, selection.names, str(home.path), on_disk=selection.on_disk))
            if after and tenant == first:
                ids = [id for id in ids if id > name]
            for start in range(0, len(ids), size):
                page = ids[start : start + size]
                yield describe(store, tenant, catalog.hashes_by_document(page), page, model, held())


def describe(
    store: DiskStore,
    tenant: str,
    hashes: Mapping[str, Sequence[str]],
    ids: Iterable[str],
    model: str | None,
    held: Held | None,
) -> list[DocumentKV]:
    """Describe documents. hashes: of each one's chunks. model: the fingerprint of the one whose KV counts."""
    described = store.control.describe({chunk_hash for each in hashes.values() for chunk_hash in each})
    entries = {name: [info for info in own if info.key.fingerprint == model] for name, own in described.items()}
    return [_document(tenant, id, set(hashes.get(id, ())), entries, held) for id in ids]


def _document(
    tenant: str, id: str, hashes: set[str], entries: Mapping[str, Sequence[EntryInfo]], held: Held | None
) -> DocumentKV:
    own = [info for chunk_hash in hashes for info in entries[chunk_hash]]
    codecs: dict[str, int] = {}
    for info in own:
        name = info.codec or "damaged"
        codecs[name] = codecs.get(name, 0) + 1
    hints = {info.key.chunk_hash: info.hint for info in own if info.hint}
    memory = None
    if held is not None:
        memory = _tier([(info.key, held[info.key]) for info in own if info.key in held])
    return DocumentKV(
        tenant,
        id,
        len(hashes),
        Tiers(
            memory,
            page_cache=_tier([(info.key, info.size_bytes) for info in own if info.is_cached]),
            disk=_tier([(info.key, info.size_bytes) for info in own]),
        ),
        codecs,
        sum(info.uses for info in own),
        max((info.used_at for info in own if info.uses), default=None),
        {hint: list(hints.values()).count(hint) for hint in sorted(set(hints.values()))},
    )


def _tier(sized: Sequence[tuple[ChunkKey, int]]) -> TierKV:
    return TierKV(len({key.chunk_hash for key, _ in sized}), sum(size for _, size in sized))
