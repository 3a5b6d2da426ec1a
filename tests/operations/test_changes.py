"""What operators look up and change, on a real home and store."""

import asyncio
import errno
import shutil
from contextlib import closing

import pytest
from operator_home import (
    ANCHOR,
    ANCHOR_KEY,
    AVERAGE,
    DOCUMENTS,
    ENTRY_BYTES,
    LAYERS,
    OTHER_MODEL,
    hash_of,
    key_of,
    make_home,
)

from ragkv.config import StoreConfig
from ragkv.errors import ConfigError, RemoteError, UnknownDocumentError
from ragkv.index.deletion import collect_garbage, delete_documents
from ragkv.operations import changes
from ragkv.operations.health import examine
from ragkv.operations.lookup import TierKV, pages
from ragkv.operations.selection import Selection, choose
from ragkv.retriever.hashing import CONTEXTS, mean_hash
from ragkv.store.prefixes import open_prefixes
from ragkv.store.record import ChunkKey
from ragkv.store.remote import Remote
from ragkv.store.tier import open_tier

BEES, TEA = "/papers/bees.md", "/papers/tea.md"
ALONE = lambda key: None  # noqa: E731 - no entry is one of a pair


@pytest.fixture
def home(tmp_path):
    return make_home(tmp_path / "home")


@pytest.fixture
def store(home):
    with closing(home.open_store()) as store:
        yield store


def chosen(home, *names, tenant=None):
    return choose(home, Selection(names, tenant))


def look_up(home, store, *names, held=None, after="", size=100):
    return list(pages(home, store, Selection(names), lambda: held, after, size))


def hint_of(store, text, tenant="main"):
    return store.control.hints([hash_of(text, tenant)])[hash_of(text, tenant)]


def test_a_document_is_looked_up(home, store):
    held = {key_of("wax"): 1000, key_of("flush"): 2000}
    store.control.demote([key_of("wax"), key_of("wax", anchor=AVERAGE), key_of("shared")])
    store.touch([key_of("wax")])
    store._usage.flush()
    store.hint([hash_of("shared")], "session")
    ((bees,),) = look_up(home, store, BEES, held=held)
    assert (bees.tenant, bees.name, bees.num_chunks, bees.codecs) == ("main", BEES, 2, {"raw": 3})
    assert bees.tiers.disk == TierKV(2, 3 * ENTRY_BYTES) and bees.tiers.memory == TierKV(1, 1000)
    assert bees.tiers.page_cache.num_chunks in (0, 2) and bees.tiers.remote is None  # 2: where files are memory
    assert (bees.uses, bees.hints) == (5, {"session": 1})  # stored four times, one used
    ((bees,),) = look_up(home, store, BEES)
    assert bees.tiers.memory is None


def test_what_has_no_kv_or_damaged_kv_is_looked_up(home, store):
    store.control.clear([key_of("two")])
    store.entries.path(key_of("one")).write_bytes(b"nothing")
    ((one, two),) = look_up(home, store, "all.jsonl")
    assert one.codecs == {"damaged": 1} and one.tiers.disk.num_chunks == 1
    assert (two.tiers.disk, two.codecs, two.uses, two.used_at) == (TierKV(0, 0), {}, 0, None)


@pytest.mark.parametrize("size", [1, 2, 3, 10])
def test_pages_cover_all_tenants_in_order(home, store, size):
    names = [(tenant, name) for tenant in sorted(DOCUMENTS) for name in sorted(DOCUMENTS[tenant])]
    found = [(each.tenant, each.name) for page in look_up(home, store, size=size) for each in page]
    assert found == names
    for i, (tenant, name) in enumerate(names):
        rest = [(each.tenant, each.name) for page in look_up(home, store, after=f"{tenant}:{name}") for each in page]
        assert rest == names[i + 1 :]
    with pytest.raises(UnknownDocumentError):
        look_up(home, store, "none")


def test_pins_are_counted_and_refused_beyond_the_budget(home, store):
    done = changes.pin(store, chosen(home, TEA), 4 * ENTRY_BYTES)
    assert (done.num_documents, done.num_chunks, done.num_without_kv) == (1, 2, 0)
    assert done.pinned_bytes == 3 * ENTRY_BYTES  # with the anchor
    with pytest.raises(ConfigError, match="store.disk_gib is"):
        changes.pin(store, chosen(home, BEES), 4 * ENTRY_BYTES)
    assert hint_of(store, "wax") is None
    store.delete([hash_of("one")])
    done = changes.pin(store, chosen(home, "all.jsonl"), None)
    assert (done.num_chunks, done.num_without_kv) == (1, 1)


def test_unpinning_keeps_what_other_pinned_documents_share(home, store):
    changes.pin(store, chosen(home, "/papers"), None)
    done = changes.unpin(store, chosen(home, BEES), None)
    assert (done.num_chunks, done.kept) == (1, [TEA])
    assert (hint_of(store, "wax"), hint_of(store, "shared")) == (None, "pin")
    done = changes.unpin(store, chosen(home, TEA), None)
    assert (done.num_chunks, done.kept, hint_of(store, "shared")) == (2, [], None)


def test_unpinning_all_leaves_the_anchor(home, store):
    changes.pin(store, choose(home, Selection()), None)
    assert changes.unpin(store, choose(home, Selection()), None).pinned_bytes == ENTRY_BYTES
    assert store.control.hints([ANCHOR_KEY.chunk_hash]) == {ANCHOR_KEY.chunk_hash: "pin"}


def test_warm_and_demote_say_how_many_bytes(home, store):
    store.control.demote([key_of("flush"), key_of("shared")])
    done = changes.warm(store, chosen(home, TEA))
    assert (done.num_entries, done.size_bytes, done.num_left_out) == (2, 2 * ENTRY_BYTES, 0)
    done = changes.demote(store, chosen(home, TEA))
    assert done.page_cache_bytes in (0, 2 * ENTRY_BYTES) and done.memory_bytes is None  # 0: files are memory
    assert store.contains(key_of("flush"))


def test_what_does_not_stay_near_is_told(home, store, monkeypatch):
    is_cached = store.control.is_cached
    monkeypatch.setattr(store.control, "is_cached", lambda key: key != key_of("flush") and is_cached(key))
    done = changes.warm(store, chosen(home, TEA))
    assert (done.num_entries, done.num_left_out, done.left_out_bytes) == (1, 1, ENTRY_BYTES)


def test_recoding_goes_on_where_it_stopped(home, store):
    keys = changes.keys_to_recode(store, None)
    assert set(keys) == set(store.keys()) and len(keys) == 10
    first = changes.recode(store, keys[:4], ALONE, "int8")
    done = changes.recode(store, keys, ALONE, "int8")
    assert (first.num_recoded, done.num_recoded, done.num_same) == (4, 6, 4)
    assert done.bytes_after < done.bytes_before < 10 * ENTRY_BYTES
    assert done.bytes_after == sum(store.admin.sizes().values()) == store.admin.gauges()["disk_bytes"]
    again = changes.recode(store, keys, ALONE, "fp8")
    assert (again.num_recoded, again.num_no_smaller) == (0, 10)
    assert store.admin.verify().problems == []


def test_recoding_makes_one_entry_of_two_where_the_codec_wants_one(home, store):
    joined = key_of("wax", anchor=mean_hash(ANCHOR, CONTEXTS, 2, joins=True))
    store.hint([hash_of("wax")], "pin")
    store.touch([key_of("wax", anchor=AVERAGE)] * 3)
    keys = changes.keys_to_recode(store, None)
    assert changes.recode(store, keys, changes.pairs(home, StoreConfig(codec="raw")), "int8").num_joined == 0
    for each in (key_of("wax"), key_of("wax", anchor=AVERAGE)):
        store.put([(each, LAYERS)])
    done = changes.recode(store, keys, changes.pairs(home, StoreConfig(codec="int8")), "int8")
    assert (done.num_joined, done.num_recoded, done.num_same, done.problems) == (1, 0, 8, [])
    assert set(store.entries.keys_of(hash_of("wax"))) == {joined, key_of("wax", model=OTHER_MODEL)}
    (info,) = [info for info in store.control.describe([hash_of("wax")])[hash_of("wax")] if info.key == joined]
    assert (info.hint, info.codec) == ("pin", "int8") and info.uses >= 4
    assert done.bytes_after == sum(store.admin.sizes().values()) == store.admin.gauges()["disk_bytes"]
    assert collect_garbage(home, dry_run=True)[-1].num_chunks == 0 and store.admin.verify().problems == []


def test_recoding_names_what_is_damaged(home, store):
    store.entries.path(key_of("one")).write_bytes(b"nothing")
    done = changes.recode(store, changes.keys_to_recode(store, chosen(home, "all.jsonl")), ALONE, "int8")
    assert done.num_recoded == 1 and done.problems == [
        f"chunk {hash_of('one')}: it is damaged; `ragkv store verify` says how"
    ]


def test_recoding_stops_at_a_full_disk_and_loses_nothing(home, store, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    before = store.admin.sizes()
    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(Exception, match="Free some space"):
        changes.recode(store, store.keys(), ALONE, "int8")
    assert store.admin.sizes() == before and store.admin.verify().problems == []


def test_clearing_spares_what_others_share_and_the_documents(home, store):
    prefixes = open_prefixes(home.prefixes, 1 << 30)
    prefixes.put([(key_of("wax"), LAYERS)])  # a prompt that began with it
    dry = changes.clear(store, None, chosen(home, BEES), dry_run=True)
    before = set(store.keys())
    assert len(prefixes.keys()) == 1
    done = changes.clear(store, None, chosen(home, BEES))
    assert prefixes.keys() == []
    assert (done.num_documents, done.num_chunks, done.num_shared, done.size_bytes) == (1, 1, 1, 3 * ENTRY_BYTES)
    assert (dry.num_chunks, dry.size_bytes, dry.dry_run) == (1, 3 * ENTRY_BYTES, True)
    assert {key.chunk_hash for key in before - set(store.keys())} == {hash_of("wax")}
    with home.open_catalog() as catalog:
        assert BEES in catalog.document_ids()
    assert store.contains(key_of("wax", "acme"))


def test_clearing_a_tenant_and_everything(home, store):
    done = changes.clear(store, None, chosen(home, tenant="acme"))
    assert (done.num_documents, done.num_chunks) == (1, 2) and not store.contains(key_of("honey", "acme"))
    assert len(store.keys()) == 8
    assert changes.clear_all(store, None, choose(home, Selection())).size_bytes == 8 * ENTRY_BYTES
    assert store.keys() == [] and store.admin.verify().problems == []
    store.put([(ANCHOR_KEY, LAYERS)])
    assert store.control.hints([ANCHOR_KEY.chunk_hash]) == {ANCHOR_KEY.chunk_hash: "pin"}


@pytest.mark.parametrize("model", ["other", OTHER_MODEL[:4], OTHER_MODEL])
def test_clearing_a_model(home, store, model):
    assert changes.clear_model(home, store, None, model, dry_run=True).num_chunks == 1
    assert store.contains(key_of("wax", model=OTHER_MODEL))
    assert changes.clear_model(home, store, None, model).size_bytes == ENTRY_BYTES
    assert len(store.keys(evicted=True)) == 9 and store.contains(key_of("wax"))


@pytest.fixture
def tier(tmp_path, store):
    """A folder as the bucket behind the store, with all of its entries."""
    (tmp_path / "bucket").mkdir()
    with closing(open_tier(store, StoreConfig(remote=(tmp_path / "bucket").as_uri()))) as tier:
        assert tier.send() == 0
        yield tier


def in_bucket(tier):
    return {key for key, _ in tier.remote.sizes()}


def unreachable(*_):
    raise RemoteError("the bucket is away")


def test_what_is_cleared_is_cleared_in_the_bucket_also_what_is_not_on_the_disk(home, store, tier):
    store.control.clear([key_of("wax")])  # as if it had been evicted
    dry = changes.clear(store, tier, chosen(home, BEES), dry_run=True)
    assert dry.remote == tier.remote.url and len(in_bucket(tier)) == 10
    done = changes.clear(store, tier, chosen(home, BEES))
    assert (done.remote, done.num_unreached, done.num_shared) == (tier.remote.url, 0, 1)
    assert {key.chunk_hash for key in in_bucket(tier)} == set(store.chunk_hashes())
    assert hash_of("wax") not in {key.chunk_hash for key in in_bucket(tier)}
    assert asyncio.run(tier.fetch([key_of("wax")])) == 0
    store.put([(key_of("wax"), LAYERS)])  # it is made again
    assert tier.send() == 0 and key_of("wax") in in_bucket(tier)
    assert changes.clear_all(store, tier, choose(home, Selection())).num_unreached == 0
    assert in_bucket(tier) == set(store.keys()) == set()


def test_without_the_bucket_only_the_disk_is_cleared(home, store, tier):
    done = changes.clear(store, None, chosen(home, BEES))
    assert (done.remote, done.num_chunks) == (None, 1) and len(in_bucket(tier)) == 10
    assert asyncio.run(tier.fetch([key_of("wax")])) == 1


def test_clearing_in_an_outage_is_told_and_done_later(home, store, tier, monkeypatch):
    with monkeypatch.context() as outage:
        outage.setattr(Remote, "delete_chunk", unreachable)
        done = changes.clear(store, tier, chosen(home, BEES))
    assert (done.num_unreached, done.num_chunks) == (1, 1) and not store.contains(key_of("wax"))
    assert asyncio.run(tier.fetch([key_of("wax")])) == 0  # although the bucket has it
    assert tier.send() == 0 and tier.num_pending_deletions == 1
    assert not tier.delete_pending() and key_of("wax") not in in_bucket(tier)


def test_a_model_is_cleared_in_the_bucket(home, store, tier, monkeypatch):
    foreign = ChunkKey("f" * 32, ANCHOR, OTHER_MODEL, heads=(0, 2))  # of another home
    tier.remote.put(foreign, b"its KV")
    store.delete_keys([key_of("wax", model=OTHER_MODEL)])
    with monkeypatch.context() as outage:
        outage.setattr(Remote, "sizes", unreachable)
        with pytest.raises(RemoteError, match="the bucket is away. Nothing was cleared; .*--local"):
            changes.clear_model(home, store, tier, "other")
        assert changes.clear_model(home, store, None, "other").num_chunks == 0
    with monkeypatch.context() as outage:
        outage.setattr(Remote, "delete_key", unreachable)
        with pytest.raises(RemoteError, match="The disk is cleared, but not all of the bucket; clear the model again"):
            changes.clear_model(home, store, tier, OTHER_MODEL[:4])
    assert changes.clear_model(home, store, tier, OTHER_MODEL[:4]).remote == tier.remote.url
    assert in_bucket(tier) == {*store.keys(), foreign}


@pytest.mark.parametrize("model", ["", "b", "cccc", "aaaa"])
def test_models_that_are_not_cleared(home, store, model):
    with pytest.raises(ConfigError, match="Stored: aaaaaaaa .*, bbbbbbbb|is the model that .* was indexed with"):
        changes.clear_model(home, store, None, model)
    assert len(store.keys()) == 10


def test_what_was_cleared_is_deleted_with_its_document(home):
    with closing(home.open_store()) as store:
        changes.clear(store, None, chosen(home, TEA))
    delete_documents(home, [TEA])
    with closing(home.open_store()) as store:
        assert hash_of("flush") not in {key.chunk_hash for key in store.keys(evicted=True)}


def test_health(home, store):
    found = examine(home, store, 20 * ENTRY_BYTES, damaged=0)
    assert found.prefix_bytes == 0
    with closing(open_prefixes(home.prefixes, 1 << 30)) as prefixes:
        prefixes.put([(key_of("one"), LAYERS)])
    found = examine(home, store, 20 * ENTRY_BYTES, damaged=0)
    assert found.prefix_bytes > 0 and found.is_well and found.readable and found.writable and not found.warnings
    assert (found.used_bytes, found.pinned_bytes, found.verified) == (10 * ENTRY_BYTES, ENTRY_BYTES, None)
    assert found.free_bytes == pytest.approx(shutil.disk_usage(home.path).free, rel=0.5)
    store.entries.path(key_of("one")).write_bytes(b"nothing")
    store.admin.verify()
    found = examine(home, store, ENTRY_BYTES - 1, damaged=3)
    assert found.is_well and found.verified.num_problems == 1
    assert [text.split()[0] for text in found.warnings] == ["more", "3", "the"]


def test_a_store_that_cannot_be_written_is_not_well(home, store, monkeypatch):
    monkeypatch.setattr("os.fsync", lambda descriptor: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")))
    found = examine(home, store, None)
    assert (found.is_well, found.readable, found.writable) == (False, True, False)
    assert "can't write to the KV store" in found.problems[0] and "Input/output error" in found.problems[0]
    monkeypatch.undo()
    full = shutil.disk_usage(home.path)._replace(free=1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    found = examine(home, store, None)
    assert not found.is_well and found.problems[0].startswith("1 MiB are free on the disk of")
