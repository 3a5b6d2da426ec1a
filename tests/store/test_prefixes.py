"""The store of exact prefixes: bounded, apart from chunks' KV, and emptied as a whole."""

import asyncio
import threading
import time
from contextlib import closing, contextmanager

import pytest
import torch

from ragkv.config import Config, StoreConfig
from ragkv.home import Home
from ragkv.store import remote as remote_module
from ragkv.store.fetching import DAMAGED, OUTAGE
from ragkv.store.prefixes import clear_prefixes, generation, open_prefixes
from ragkv.store.record import FORMAT_VERSION, ChunkKey, LayerKV
from ragkv.store.remote import Remote
from ragkv.store.remote_state import ALL


def key(i, anchor="e"):
    return ChunkKey(f"{i:032x}", anchor * 32, "f" * 32, (0, 2))


def layers(i):
    kv = torch.full((2, 16, 8), float(i))
    return [LayerKV(kv, kv, 0)] * 2


def files_in(folder):
    return [file for file in folder.rglob("*.kv*") if file.is_file()]


def test_all_are_deleted_and_none_comes_later_of_a_request_that_began_before(tmp_path):
    folder = tmp_path / "prefixes"
    assert clear_prefixes(folder) == 0 and not folder.exists() and generation(folder) == 0
    store = open_prefixes(folder, 1 << 30)
    before = generation(folder)
    is_wanted = lambda: generation(folder) == before  # noqa: E731
    store.put([(key(0), layers(0)), (key(1), layers(1))], is_wanted)
    assert len(files_in(folder)) == 2
    assert clear_prefixes(folder) == 2
    assert generation(folder) != before
    store.put([(key(2), layers(2))], is_wanted)
    assert files_in(folder) == [] and store.keys(evicted=True) == []
    before = generation(folder)
    store.put([(key(2), layers(2))], is_wanted)
    assert store.contains(key(2))


def test_what_is_just_being_written_while_all_is_deleted_gets_no_name(tmp_path):
    folder = tmp_path / "prefixes"
    store = open_prefixes(folder, 1 << 30)
    write, clearing = store.entries.write, threading.Event()

    def slow(key, records):
        file = write(key, records)
        clearer.start()
        clearing.wait(0.2)
        return file

    clearer = threading.Thread(target=lambda: (clearing.set(), clear_prefixes(folder)))
    store.entries.write = slow
    before = generation(folder)
    publish = store.entries.publish
    store.entries.publish = lambda files: (published.append(list(files)), publish(files))
    published = []
    writing = store._usage.writing
    calls = []

    def in_turn():
        calls.append(1)
        if len(calls) == 2:  # the transaction in which files get their names: after the deletion
            clearer.join()
        return writing()

    store._usage.writing = in_turn
    store.put([(key(0), layers(0))], lambda: generation(folder) == before)
    assert published == [[]] and files_in(folder) == []


def test_those_unused_longest_are_evicted(tmp_path):
    store = open_prefixes(tmp_path, 3 * 12288)
    for i in range(3):
        store.put([(key(i), layers(i))])
    store.touch([key(0)])
    store.put([(key(3), layers(3))])
    assert [store.contains(key(i)) for i in range(4)] == [True, False, True, True]


def test_other_formats_are_replaced_and_trouble_costs_the_prefixes_only(tmp_path, caplog):
    old = tmp_path / "prefixes" / f"v{FORMAT_VERSION - 1}"
    old.mkdir(parents=True)
    (old / "data.kv").write_bytes(b"of an old release")
    assert open_prefixes(tmp_path / "prefixes", 1 << 20) is not None
    assert not old.exists()
    (tmp_path / "file").write_text("")
    assert open_prefixes(tmp_path / "file", 1 << 20) is None
    assert "prefixes aren't kept" in caplog.text


def test_deleting_a_chunk_deletes_all_prefixes(tmp_path):
    home = Home(tmp_path)
    prefixes = open_prefixes(home.prefixes, 1 << 30)
    prefixes.put([(key(0), layers(0))])
    store = home.open_store()
    store.put([(key(5, "a"), layers(5)), (key(6, "a"), layers(6))])
    store.delete_keys([key(5, "a")])  # a codec was changed, say: its text stays
    assert prefixes.contains(key(0))
    store.delete([key(6).chunk_hash])
    assert not prefixes.contains(key(0))
    store.close()


@pytest.mark.parametrize("gib", [0, 2])
def test_the_settings_reach_vllm_as_plain_data(gib, tmp_path):
    config = Config(store={"prefix_gib": gib, "prefix_gib_per_hour": 1})
    options = config.store.prefix_options(tmp_path)
    assert options == {"folder": str(tmp_path), "disk_bytes": gib << 30, "bytes_per_hour": 1 << 30}


@contextmanager
def shared(folder, bucket, timeout_s=10, *, is_shared=True):
    """A store of chunks' KV and one of prefixes, as one home has them, and the bucket behind both."""
    home = Home(folder)
    settings = StoreConfig(remote=bucket.url, remote_timeout_s=timeout_s, remote_prefixes=is_shared)
    with closing(home.open_store()) as store, closing(home.open_tier(store, settings)) as tier:
        yield store, tier


def prefixes_in(bucket):
    return [name for name in bucket.objects() if "/prefixes/" in name]


def fetch(tier, *keys, **options):
    return asyncio.run(tier.fetch(keys, **options))


def wait_until(condition):
    for _ in range(400):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("it doesn't come true")


def fill(store, tier):
    """A chunk and three segments."""
    store.put([(key(5, "a"), layers(5))])
    tier.derived.store.put([(key(i), layers(i)) for i in range(3)])


def test_what_one_machine_sent_another_loads_and_chunks_stay_apart(tmp_path, bucket):
    with shared(tmp_path / "one", bucket) as (store, tier), shared(tmp_path / "two", bucket) as (there, its_tier):
        fill(store, tier)
        assert tier.send() == tier.derived.send() == 0
        assert len(prefixes_in(bucket)) == 3 and len(bucket.objects()) == 4
        assert {each for each, _ in tier.remote.sizes()} == {key(5, "a")}
        assert {each for each, _ in tier.derived.remote.sizes()} == {key(0), key(1), key(2)}
        its = its_tier.derived
        assert not its.is_listed(key(0))  # it hasn't looked
        its.send(), its_tier.send()
        assert its.is_listed(key(0)) and not its.is_listed(key(5, "a")) and not its_tier.is_listed(key(0))
        assert fetch(its, key(0), key(1), longest_s=10) == 2
        own = tier.derived.store.entries
        assert all(its.store.entries.read(key(i)) == own.read(key(i)) for i in (0, 1)) and not list(there.entries)
        assert (its.traffic.entries_read, its_tier.traffic.entries_read) == (2, 0)


def test_where_they_arent_shared_none_is_sent_and_a_deletion_reaches_them_all_the_same(tmp_path, bucket):
    with shared(tmp_path / "one", bucket) as (store, tier):
        fill(store, tier)
        tier.derived.send()
    with shared(tmp_path / "two", bucket, is_shared=False) as (store, tier):
        fill(store, tier)
        tier.derived.store.put([(key(8), layers(8))])
        assert tier.send() == tier.derived.send() == 0
        assert len(prefixes_in(bucket)) == 3
        store.delete([key(5, "a").chunk_hash])
        assert not tier.delete_pending() and not bucket.objects()


@pytest.mark.parametrize("is_folder", [False, True])
def test_deleting_a_chunk_deletes_all_prefixes_in_the_bucket_and_they_dont_come_back(tmp_path, bucket, is_folder):
    if is_folder:
        (tmp_path / "bucket").mkdir()
        bucket.url = (tmp_path / "bucket").as_uri()
    with shared(tmp_path / "one", bucket) as (store, tier), shared(tmp_path / "two", bucket) as (_, its_tier):
        fill(store, tier)
        its = its_tier.derived.store
        its.put([(key(7), layers(7))])
        for each in (tier, tier.derived, its_tier.derived):
            assert each.send() == 0
        assert len([*tier.derived.remote.sizes()]) == 4
        store.delete([key(5, "a").chunk_hash])
        assert tier.num_pending_deletions == 2 and not tier.derived.store.keys()
        assert not tier.delete_pending() and tier.num_pending_deletions == 0
        assert not [*tier.derived.remote.sizes()] and not [*tier.remote.sizes()]
        assert tier.derived.send() == 0 and not [*tier.derived.remote.sizes()]
        assert fetch(its_tier.derived, key(0), longest_s=10) == 0  # the other machine still has it in its list
        assert not its.contains(key(0)) and its.contains(key(7))  # what it has is its own


def test_a_deletion_in_an_outage_is_told_and_done_later(tmp_path, bucket, monkeypatch):
    monkeypatch.setattr(remote_module, "REST_S", 0.5)
    with shared(tmp_path / "one", bucket, timeout_s=1) as (store, tier):
        fill(store, tier)
        assert tier.send() == tier.derived.send() == 0
        bucket.proxy.set("closed")
        store.delete([key(5, "a").chunk_hash])
        begin = time.monotonic()
        assert tier.delete_pending() == {key(5, "a").chunk_hash, ALL}
        assert time.monotonic() - begin < 3 and len(prefixes_in(bucket)) == 3
    with shared(tmp_path / "one", bucket) as (store, tier):  # another process
        assert tier.num_pending_deletions == 2
        bucket.proxy.set()
        assert fetch(tier.derived, key(0)) == 0 and not tier.derived.traffic.misses.total()
        tier.derived.store.put([(key(4), layers(4))])  # of the new generation
        assert tier.derived.send() == 0 and len(prefixes_in(bucket)) == 3
        assert any("exact prefixes are deleted, and may still be" in line for line in tier.verify(set()).problems)
        tier.start()
        wait_until(lambda: not tier.num_pending_deletions and len(bucket.objects()) == 1)
        assert {each for each, _ in tier.derived.remote.sizes()} == {key(4)}


@pytest.mark.parametrize("comes_back", [False, True])
def test_what_comes_while_all_is_deleted_isnt_stored(tmp_path, bucket, monkeypatch, comes_back):
    """comes_back: another machine, which still has the document, sends it again meanwhile."""
    with shared(tmp_path / "one", bucket) as (store, tier), shared(tmp_path / "two", bucket) as (there, its_tier):
        fill(store, tier)
        tier.derived.send()
        its, before, get = its_tier.derived, generation(tmp_path / "two" / "prefixes"), Remote.get
        there.put([(key(6, "a"), layers(6))])

        def get_before_it_is_deleted(self, wanted):
            file = get(self, wanted)
            there.delete([key(6, "a").chunk_hash])
            assert not its_tier.delete_pending()
            if comes_back:
                self.put(wanted, file)
            return file

        monkeypatch.setattr(Remote, "get", get_before_it_is_deleted)
        is_wanted = lambda: generation(its.store.path) == before  # noqa: E731
        assert fetch(its, key(0), is_wanted=is_wanted) == 0
        assert not its.store.keys(evicted=True) and len(prefixes_in(bucket)) == comes_back


def test_what_is_deleted_while_it_is_sent_goes(tmp_path, bucket, monkeypatch):
    with shared(tmp_path / "one", bucket) as (store, tier):
        fill(store, tier)
        put = Remote.put

        def put_late(self, wanted, file):
            store.delete([key(5, "a").chunk_hash])
            assert not tier.delete_pending()  # before it is there
            put(self, wanted, file)

        monkeypatch.setattr(Remote, "put", put_late)
        tier.derived.send()
        tier.delete_pending()
        assert bucket.objects() == {}


def test_damage_is_a_miss_and_an_outage_is_one_for_both(tmp_path, bucket):
    with shared(tmp_path / "one", bucket) as (store, tier):
        fill(store, tier)
        assert tier.send() == tier.derived.send() == 0
    name = next(name for name in bucket.objects() if f"/prefixes/{key(1).chunk_hash}/" in name)
    bucket.write(name, bucket.objects()[name][:5000])
    with shared(tmp_path / "two", bucket, timeout_s=1) as (_, tier):
        tier.derived.send()
        assert fetch(tier.derived, key(0), key(1), longest_s=10) == 1
        assert tier.derived.traffic.misses == {DAMAGED: 1} and name not in bucket.objects()
        bucket.proxy.set("silent")
        begin = time.monotonic()
        assert fetch(tier.derived, key(2), longest_s=0.2) == 0
        assert time.monotonic() - begin < 1
        wait_until(lambda: tier.remote.breaker.rests)
        assert fetch(tier, key(5, "a"), longest_s=10) == 0
        assert tier.derived.traffic.misses[OUTAGE] == 1 and tier.traffic.misses == {OUTAGE: 1}
