"""What operators change of documents' KV: its hint, tier and codec, and clearing it. Documents stay as they are.

Any other process may use the home meanwhile; what a server's worker has in memory is `ragkv.operations.running`'s.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ragkv.config import StoreConfig
from ragkv.errors import ConfigError, RemoteError
from ragkv.home import ANCHOR_SETTING, NUM_CONTEXTS_SETTING, Home
from ragkv.operations.selection import Chosen
from ragkv.retriever.hashing import CONTEXTS, mean_hash
from ragkv.store.codecs import Codec
from ragkv.store.control import Pair, Recoded, codec_named
from ragkv.store.disk_store import DiskStore
from ragkv.store.record import ChunkKey
from ragkv.store.tier import RemoteTier

Progress = Callable[[int], None]  # called with the bytes of each entry that is done
PairOf = Callable[[ChunkKey], Pair | None]
OTHER_MODELS = "other"
_MIN_PREFIX = 4


def _silent(size_bytes: int) -> None: ...


@dataclass(frozen=True)
class Pinning:
    """What was pinned or unpinned.

    num_without_kv: chunks that nobody has made KV of, which can't be pinned yet. kept: documents that are pinned and
    share chunks with those that were unpinned: these chunks stay pinned. pinned_bytes: of all that is pinned now.
    disk_bytes: the store's budget.
    """

    num_documents: int
    num_chunks: int
    num_without_kv: int
    kept: list[str]
    pinned_bytes: int
    disk_bytes: int | None


@dataclass(frozen=True)
class Warming:
    """What is near now: entries and their bytes, in a tier (`page_cache` or `memory`); and what had no room there."""

    tier: str
    num_documents: int
    num_entries: int
    size_bytes: int
    num_left_out: int
    left_out_bytes: int


@dataclass(frozen=True)
class Demotion:
    """What was dropped from each tier, in bytes; memory_bytes: None where the worker can't be asked."""

    num_documents: int
    memory_bytes: int | None
    page_cache_bytes: int


@dataclass
class Recoding:
    """What was encoded anew. num_joined: chunks whose two entries are one now. num_same: entries that had the codec.
    num_no_smaller: those that stay, since they would not get smaller. num_left: not looked at yet, for the time was up.
    problems: a line for each damaged entry."""

    codec: str
    num_recoded: int = 0
    num_joined: int = 0
    num_same: int = 0
    num_no_smaller: int = 0
    num_left: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    problems: list[str] = field(default_factory=list)

    def add(self, key: ChunkKey, entry: Recoded) -> None:
        self.num_recoded += entry.outcome == "recoded"
        self.num_joined += entry.outcome == "joined"
        self.num_same += entry.outcome == "same"
        self.num_no_smaller += entry.outcome == "no smaller"
        if entry.outcome == "damaged":
            self.problems.append(f"chunk {key.chunk_hash}: it is damaged; `ragkv store verify` says how")
        self.bytes_before += entry.bytes_before
        self.bytes_after += entry.bytes_after


@dataclass(frozen=True)
class Clearing:
    """What was cleared, or would be. num_chunks, size_bytes: on the disk. num_shared: chunks that stay, because other
    documents have them. remote: the bucket in which it is cleared too. num_unreached: chunks whose KV may still be
    there, since it couldn't be reached, all exact prefixes as one: it isn't used, and its deletion is tried again."""

    num_documents: int
    num_chunks: int
    num_shared: int
    size_bytes: int
    dry_run: bool
    remote: str | None = None
    num_unreached: int = 0


def pin(store: DiskStore, chosen: Chosen, disk_bytes: int | None) -> Pinning:
    """Pin documents' KV. Raises ConfigError, having pinned nothing, if the budget can't hold all that is pinned."""
    pinned_bytes = store.control.hint(chosen.chunk_hashes, "pin", disk_bytes)
    num_pinned = len(store.control.hints(chosen.chunk_hashes))
    num_without_kv = len(chosen.chunk_hashes) - num_pinned
    return Pinning(chosen.num_documents, num_pinned, num_without_kv, [], pinned_bytes, disk_bytes)


def unpin(store: DiskStore, chosen: Chosen, disk_bytes: int | None) -> Pinning:
    """Let documents' KV be evicted again, but for chunks of other documents that are pinned as a whole."""
    hints = store.control.hints(chosen.chunk_hashes.union(*chosen.hashes_of_others.values()))
    pinned = {chunk_hash for chunk_hash, hint in hints.items() if hint == "pin"}
    kept = sorted(id for id, hashes in chosen.hashes_of_others.items() if hashes & hints.keys() <= pinned)
    unpinned = (chosen.chunk_hashes & pinned) - set[str]().union(*(chosen.hashes_of_others[id] for id in kept))
    pinned_bytes = store.control.unpin(unpinned)
    return Pinning(chosen.num_documents, len(unpinned), 0, kept, pinned_bytes, disk_bytes)


def warm(store: DiskStore, chosen: Chosen, progress: Progress = _silent) -> Warming:
    """Bring documents' KV into the system's page cache."""
    keys = store.control.keys_of(chosen.chunk_hashes)
    sizes = {}
    for key in keys:
        sizes[key] = store.control.warm(key)
        progress(sizes[key])
    return warming("page_cache", chosen, sizes, [key for key in keys if store.control.is_cached(key)])


def warming(tier: str, chosen: Chosen, sizes: dict[ChunkKey, int], there: Sequence[ChunkKey]) -> Warming:
    """Return what a tier has of the entries that were to be brought there. sizes: of all of them."""
    size_bytes = sum(sizes[key] for key in there)
    left_out = sum(sizes.values()) - size_bytes
    return Warming(tier, chosen.num_documents, len(there), size_bytes, len(sizes) - len(there), left_out)


def demote(store: DiskStore, chosen: Chosen) -> Demotion:
    """Drop documents' KV from the system's page cache."""
    page_cache_bytes = store.control.demote(store.control.keys_of(chosen.chunk_hashes))
    return Demotion(chosen.num_documents, None, page_cache_bytes)


def keys_to_recode(store: DiskStore, chosen: Chosen | None) -> list[ChunkKey]:
    """Return the entries of documents, or all of the store's."""
    return store.keys() if chosen is None else store.control.keys_of(chosen.chunk_hashes)


def pairs(home: Home, settings: StoreConfig) -> PairOf:
    """Return what gives the pair that an entry is of, if `store.codec` wants one entry in its place; else None."""
    with home.open_catalog() as catalog:
        anchor, num_contexts = catalog.get_setting(ANCHOR_SETTING), int(catalog.get_setting(NUM_CONTEXTS_SETTING) or 1)
    if not (settings.joins and anchor and num_contexts > 1):
        return lambda key: None
    two = [anchor, mean_hash(anchor, CONTEXTS, num_contexts)]
    hashes = [*two, mean_hash(anchor, CONTEXTS, num_contexts, joins=True)]
    return lambda key: Pair(*(replace(key, anchor_hash=each) for each in hashes)) if key.anchor_hash in two else None


def recode_one(store: DiskStore, key: ChunkKey, pair: Pair | None, codec: Codec) -> Recoded:
    """Encode an entry anew; with the other one of its pair as one entry, if both are stored."""
    if pair is not None and store.contains(pair.alone) and store.contains(pair.mean):
        return store.control.join(pair, codec)
    return store.control.recode(key, codec)


def recode(
    store: DiskStore, keys: Sequence[ChunkKey], pair_of: PairOf, codec: str, progress: Progress = _silent
) -> Recoding:
    """Encode entries anew, one by one; interrupted, call it again. pair_of: of `pairs`.

    Raises ConfigError for a codec that they can't be encoded with.
    """
    done, target = Recoding(codec), codec_named(codec)
    for key in keys:
        entry = recode_one(store, key, pair_of(key), target)
        done.add(key, entry)
        progress(entry.bytes_before)
    return done


def clear(store: DiskStore, tier: RemoteTier | None, chosen: Chosen, *, dry_run: bool = False) -> Clearing:
    """Delete documents' KV, but for chunks that other documents have, and all exact prefixes. The documents stay
    indexed, and their KV is made again once a question finds it missing; it then has the uses and the hint that it had.

    tier: the bucket behind the store, where all that is of these chunks is deleted too, also what isn't on the disk;
    None leaves it.
    """
    return _clear(store, tier, chosen.chunk_hashes - chosen.shared, chosen, dry_run=dry_run)


def clear_all(store: DiskStore, tier: RemoteTier | None, chosen: Chosen, *, dry_run: bool = False) -> Clearing:
    """Delete all KV of the store, whoever's it is. chosen: all documents. tier: as of `clear`."""
    hashes = chosen.chunk_hashes.union(store.chunk_hashes(evicted=True))
    return _clear(store, tier, hashes, chosen, dry_run=dry_run)


def _clear(store: DiskStore, tier: RemoteTier | None, hashes: set[str], chosen: Chosen, *, dry_run: bool) -> Clearing:
    if tier is not None and not dry_run:
        tier.note_deletions(hashes)  # first, so that nothing of it is fetched any more
    if not dry_run:
        store.clear_derived()
    keys = store.control.keys_of(hashes)
    size_bytes = sum(store.admin.sizes(keys).values()) if dry_run else store.control.clear(keys)
    num_unreached = 0 if tier is None or dry_run else len(tier.delete_pending(hashes))
    num_chunks, remote = len({key.chunk_hash for key in keys}), None if tier is None else tier.remote.url
    return Clearing(chosen.num_documents, num_chunks, len(chosen.shared), size_bytes, dry_run, remote, num_unreached)


def clear_model(
    home: Home, store: DiskStore, tier: RemoteTier | None, model: str, *, dry_run: bool = False
) -> Clearing:
    """Delete the KV of a model, by the first characters of its fingerprint, or of all models that aren't the home's.

    tier: the bucket behind the store, where the model's KV of this home's chunks is deleted too; None leaves it. Raises
    ConfigError for a name that means none, or more than one, or the home's own, and RemoteError for an outage.
    """
    own, keys = home.fingerprint(), store.keys()
    shared = [] if tier is None else _in_bucket(tier, home.chunk_hashes().union(store.chunk_hashes(evicted=True)))
    stored = sorted({key.fingerprint for key in (*keys, *shared)})
    meant = [each for each in stored if each.startswith(model) and len(model) >= _MIN_PREFIX]
    if model == OTHER_MODELS:
        if own is None:
            raise ConfigError(f"nothing was indexed in {home.path} yet, so no model is another; name a fingerprint")
        meant = [each for each in stored if each != own]
    elif len(meant) != 1:
        known = ", ".join(f"{each[:8]}{' (the home’s own)' * (each == own)}" for each in stored) or "none"
        raise ConfigError(
            f"{model!r} means {len(meant)} models whose KV is stored; give {_MIN_PREFIX} or more characters of a "
            f"fingerprint, or {OTHER_MODELS!r} for all but the home's. Stored: {known}"
        )
    elif meant == [own]:
        raise ConfigError(f"{model!r} is the model that {home.path} was indexed with; --all clears its KV")
    cleared = [key for key in keys if key.fingerprint in meant]
    size_bytes = sum(store.admin.sizes(cleared).values())
    if not dry_run:
        store.delete_keys(cleared)
        if tier is not None:
            _delete_in_bucket(tier, [key for key in shared if key.fingerprint in meant])
    remote = None if tier is None else tier.remote.url
    return Clearing(0, len({key.chunk_hash for key in cleared}), 0, size_bytes, dry_run, remote)


def _in_bucket(tier: RemoteTier, chunk_hashes: set[str]) -> list[ChunkKey]:
    try:
        return tier.keys_of(chunk_hashes)
    except RemoteError as error:
        raise RemoteError(f"{error}. Nothing was cleared; try again, or clear the disk alone (--local)") from error


def _delete_in_bucket(tier: RemoteTier, keys: Sequence[ChunkKey]) -> None:
    try:
        tier.delete_keys(keys)
    except RemoteError as error:
        raise RemoteError(f"{error}. The disk is cleared, but not all of the bucket; clear the model again") from error
