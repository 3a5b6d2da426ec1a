"""Which documents an operator means, and the chunks that they have. Knows nothing about KV."""

import difflib
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ragkv.config import MAIN
from ragkv.errors import UnknownDocumentError
from ragkv.home import Home
from ragkv.retriever.catalog import Catalog
from ragkv.retriever.documents import document_name, source_file

_NUM_NEAREST, _NUM_TOLD = 3, 10


@dataclass(frozen=True)
class Selection:
    """The documents of a tenant that these names mean, all of a tenant's, or with neither all of the home's.

    on_disk: names may also be paths of files and folders, from the current folder on.
    """

    names: tuple[str, ...] = ()
    tenant: str | None = None
    on_disk: bool = False


@dataclass
class Chosen:
    """The documents of a selection, ids by tenant, and the hashes of their chunks.

    hashes_of_others: all chunks of each other document that shares one with these.
    """

    documents: dict[str, list[str]] = field(default_factory=dict)
    chunk_hashes: set[str] = field(default_factory=set)
    hashes_of_others: dict[str, set[str]] = field(default_factory=dict)

    @property
    def num_documents(self) -> int:
        return sum(map(len, self.documents.values()))

    @property
    def shared(self) -> set[str]:
        """Those of the chunks that other documents have too."""
        return self.chunk_hashes & set[str]().union(*self.hashes_of_others.values())


def choose(home: Home, selection: Selection) -> Chosen:
    """Find the documents of a selection. Raises UnknownDocumentError for a tenant or a name that means none."""
    tenants = home.tenants()
    if selection.names or selection.tenant is not None:
        tenants = [known_tenant(home, selection.tenant or MAIN)]
    chosen = Chosen()
    for tenant in tenants:
        with home.open_catalog(tenant) as catalog:
            if selection.names:
                ids = find_documents(catalog, selection.names, str(home.path), on_disk=selection.on_disk)
                _add_others(chosen, catalog, ids)
            else:
                ids = catalog.document_ids()
                chosen.chunk_hashes |= catalog.chunk_hashes()
            chosen.documents[tenant] = ids
    return chosen


def _add_others(chosen: Chosen, catalog: Catalog, ids: Sequence[str]) -> None:
    """Add the chunks of these documents, and what other documents share with them."""
    chosen.chunk_hashes |= catalog.chunk_hashes_of(ids)
    others = catalog.documents_with(chosen.chunk_hashes) - set(ids)
    chosen.hashes_of_others = {id: set(hashes) for id, hashes in catalog.hashes_by_document(others).items()}


def known_tenant(home: Home, tenant: str) -> str:
    """Return a tenant's name. Raises UnknownDocumentError if it has, and had, no documents."""
    if not home.catalog_of(tenant).exists():
        known = ", ".join(home.tenants()) or "none: `ragkv index PATH` indexes documents"
        raise UnknownDocumentError(f"nothing is indexed in {home.folder(tenant)}; tenants with documents: {known}")
    return tenant


def find_documents(catalog: Catalog, names: Sequence[str], where: str, *, on_disk: bool) -> list[str]:
    """Return the ids of all documents that these names mean: an id, a JSONL file or a folder with all that is in it.

    where: what the message calls the home. on_disk: a name may also be a path, from the current folder on. Raises
    UnknownDocumentError for a name that means none.
    """
    ids = catalog.document_ids()
    named: dict[str, None] = {}
    unknown = []
    for name in dict.fromkeys(names):
        path = document_name(str(Path(name).resolve()) if on_disk else name.rstrip("/") or "/")
        meant = {*_meant(ids, document_name(name)), *_below(ids, path)} if name else set()
        if meant:
            named.update(dict.fromkeys(sorted(meant)))
        else:
            unknown.append((name, path))
    if unknown:  # to look for what is near to a name takes a while
        told = [
            f"no document {n!r} in {where}; the nearest by name: {_nearest(p, ids)}" for n, p in unknown[:_NUM_TOLD]
        ]
        more = [f"nor {len(unknown) - _NUM_TOLD} other documents"] if len(unknown) > _NUM_TOLD else []
        raise UnknownDocumentError("\n".join([*told, *more]))
    return list(named)


def _meant(ids: Sequence[str], name: str) -> list[str]:
    """Return of the sorted ids the document of this name, or the records of a JSONL file of this name."""
    exact = ids[bisect_left(ids, name) : bisect_left(ids, f"{name}\0")]
    records = ids[bisect_left(ids, f"{name}#") : bisect_left(ids, f"{name}$")]  # '$' comes after '#'
    return [*exact, *(id for id in records if source_file(id) == name)]


def _below(ids: Sequence[str], path: str) -> list[str]:
    """Return of the sorted ids those of a file, or of files below a folder."""
    folder = path.rstrip("/")
    return [*_meant(ids, path), *ids[bisect_left(ids, f"{folder}/") : bisect_left(ids, f"{folder}0")]]  # '0': after '/'


def _nearest(path: str, ids: Sequence[str]) -> str:
    by_name = {Path(id).name: id for id in ids}
    close = difflib.get_close_matches(Path(path).name, by_name, _NUM_NEAREST, cutoff=0)
    return ", ".join(by_name[each] for each in close) or "none: nothing is indexed"
