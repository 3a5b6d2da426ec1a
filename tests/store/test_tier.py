"""A store and its bucket, a real one: what goes to it, what comes from it, what goes for good, what an outage does."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing, contextmanager

import pytest
from store_samples import make_key, make_layers

from ragkv.config import StoreConfig
from ragkv.errors import StoreError
from ragkv.store import remote as remote_module
from ragkv.store.disk_store import DiskStore
from ragkv.store.fetching import ABSENT, DAMAGED, LATE, OUTAGE
from ragkv.store.remote import Remote
from ragkv.store.tier import RemoteTier, open_tier

MIB = 1 << 20


@contextmanager
def opened(folder, bucket, timeout_s=10, unneeded=lambda hashes: (), **options):
    with closing(DiskStore(folder, **options)) as store:
        tier = RemoteTier(store, Remote(bucket.url, timeout_s), unneeded)
        try:
            yield store, tier
        finally:
            tier.close()


@pytest.fixture
def one(tmp_path, bucket):
    """A store with two chunks, one of them after two anchors, and its tier."""
    with opened(tmp_path / "one", bucket) as (store, tier):
        store.put([(make_key(1), make_layers(1)), (make_key(1, 9), make_layers(2)), (make_key(2), make_layers(3))])
        yield store, tier


@pytest.fixture
def other(tmp_path, bucket):
    with opened(tmp_path / "other", bucket) as (store, tier):
        yield store, tier


def fetch(tier, *keys, longest_s=None):
    return asyncio.run(tier.fetch(keys, longest_s))


def files_of(store):
    return {key: store.entries.read(key) for key in store.entries}


def records_of(store):
    """Return the bytes of K and V of all records, without headers: what is looked for after a deletion."""
    return [bytes(record[128:]) for key in store.entries for record in store.admin.records(key)]


def holders_of(records, folder, bucket):
    """Return the files below a folder, and the objects of a bucket, that have any of these bytes."""
    places = {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()} | bucket.objects()
    return [place for place, data in places.items() if any(record in data for record in records)]


def wait_until(condition):
    for _ in range(200):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("it doesn't come true")


def test_what_one_store_sent_the_other_fetches_bit_by_bit(one, other):
    (store, tier), (there, its_tier) = one, other
    told = []
    assert tier.send(lambda *step: told.append(step)) == 0
    assert told[0] == (0, 3) and told[-1] == (3, 3)
    keys = list(store.entries)
    assert fetch(its_tier, *keys) == 3
    assert files_of(there) == files_of(store) and there.admin.verify().problems == []
    assert its_tier.traffic.entries_read == tier.traffic.entries_sent == 3
    assert its_tier.traffic.bytes_read == tier.traffic.bytes_sent == sum(map(len, files_of(store).values()))
    assert fetch(its_tier, *keys) == 0 and its_tier.traffic.entries_read == 3  # they are stored
    assert its_tier.send() == 0 and its_tier.traffic.entries_sent == 0  # the bucket has them


def test_what_the_bucket_lacks_is_a_miss(other):
    store, tier = other
    assert fetch(tier, make_key(5), make_key(6)) == 0
    assert tier.traffic.misses == {ABSENT: 2} and not list(store.entries)


def test_what_waits_for_another_to_take_its_place_is_not_sent(one, bucket):
    store, tier = one
    asked = []
    tier._sender._waiting = lambda: asked.append(1) or {make_key(1, 9).anchor_hash}
    assert tier.send() == 0 and tier.traffic.entries_sent == 2
    assert len(asked) == 1 and len(list(store.entries)) == 3  # once for all of them


def test_what_no_document_needs_is_neither_sent_nor_kept(tmp_path, one, bucket):
    unneeded = {make_key(1).chunk_hash}
    with opened(tmp_path / "other", bucket, unneeded=lambda hashes: unneeded & set(hashes)) as (store, tier):
        store.put([(make_key(1), make_layers(1)), (make_key(3), make_layers(4))])
        assert tier.send() == 0
        assert len(bucket.objects()) == 1  # of chunk 3
        one[1].send()
        store.delete_keys([make_key(1)])
        fetch(tier, make_key(1), make_key(2))  # 1: its document is deleted while it comes
        assert set(store.entries) == {make_key(2), make_key(3)}


def test_a_fetched_entry_obeys_the_budget_and_evicted_ones_come_back(tmp_path, one, bucket):
    one[1].send()
    size = one[0].entries.size(make_key(1))
    with opened(tmp_path / "other", bucket, disk_bytes=2 * size) as (store, tier):
        for key in (make_key(1), make_key(1, 9), make_key(2)):
            assert fetch(tier, key) == 1
        assert len(list(store.entries)) == 2
        (evicted,) = set(one[0].entries) - set(store.entries)
        assert fetch(tier, evicted) == 1
        assert store.entries.read(evicted) == one[0].entries.read(evicted)


def damages(file, of_another):
    middle = 4300  # in the first record
    return {
        "a bit": file[:middle] + bytes([file[middle] ^ 1]) + file[middle + 1 :],
        "cut off": file[:middle],
        "cut off in its head": file[:20],
        "empty": b"",
        "of another key": of_another,
        "garbage": bytes(range(256)) * 100,
    }


@pytest.mark.parametrize("damage", ["a bit", "cut off", "cut off in its head", "empty", "of another key", "garbage"])
def test_a_damaged_object_is_a_miss_never_gets_a_name_and_is_replaced(one, other, bucket, damage):
    (store, tier), (there, its_tier) = one, other
    tier.send()
    (name,) = [name for name in bucket.objects() if f"/{make_key(2).chunk_hash}/" in name]
    bucket.write(name, damages(store.entries.read(make_key(2)), store.entries.read(make_key(1)))[damage])
    assert len(tier.verify({make_key(n).chunk_hash for n in (1, 2)}).problems) == 1
    assert its_tier.send() == 0  # it has listed what is there
    assert fetch(its_tier, make_key(2)) == 0
    assert its_tier.traffic.misses == {DAMAGED: 1}
    assert not list(there.entries) and not list(there.path.rglob("*.kv*"))
    there.put([(make_key(2), make_layers(3))])  # it is precomputed instead
    assert its_tier.send() == 0
    assert bucket.objects()[name] == there.entries.read(make_key(2)) == store.entries.read(make_key(2))
    assert tier.verify({make_key(n).chunk_hash for n in (1, 2)}).problems == []


def test_a_damaged_entry_is_not_sent(one, bucket, caplog):
    store, tier = one
    file = store.entries.path(make_key(2))
    data = bytearray(file.read_bytes())
    data[4300] ^= 1
    file.write_bytes(data)
    assert tier.send() == 0
    assert len(bucket.objects()) == 2 and "isn't sent: checksum mismatch" in caplog.text


def test_deleted_is_deleted_everywhere(tmp_path, one, bucket):
    store, tier = one
    tier.send()
    records = records_of(store)
    assert len(holders_of(records, tmp_path, bucket)) == 6
    store.delete([make_key(1).chunk_hash])
    assert tier.num_pending_deletions == 1
    assert not tier.delete_pending()
    assert tier.num_pending_deletions == 0
    left = holders_of(records, tmp_path, bucket)
    assert len(left) == 2 and all(make_key(2).prefix().hex() in place.replace("/", "") for place in left)
    store.delete([make_key(2).chunk_hash])
    tier.delete_pending()
    assert holders_of(records, tmp_path, bucket) == []


def test_a_deletion_in_an_outage_is_remembered_and_done_later(tmp_path, bucket, monkeypatch):
    monkeypatch.setattr(remote_module, "REST_S", 0.5)
    with opened(tmp_path / "one", bucket, timeout_s=1) as (store, tier):
        store.put([(make_key(1), make_layers(1)), (make_key(2), make_layers(3))])
        tier.send()
        records = records_of(store)
        bucket.proxy.set("closed")
        store.delete([make_key(1).chunk_hash, make_key(2).chunk_hash])
        begin = time.monotonic()
        assert len(tier.delete_pending()) == 2
        assert time.monotonic() - begin < 3
    with opened(tmp_path / "one", bucket, timeout_s=5) as (store, tier):  # another process, say
        assert tier.num_pending_deletions == 2
        bucket.proxy.set("open")
        assert fetch(tier, make_key(1), make_key(2)) == 0  # although the bucket has them
        store.put([(make_key(2), make_layers(3))])
        assert tier.send() == 0 and tier.traffic.entries_sent == 0
        assert any("is deleted, and may still be in" in line for line in tier.verify(set()).problems)
        tier.start()
        wait_until(lambda: not tier.num_pending_deletions and len(bucket.objects()) == 1)  # indexed again meanwhile
        assert len(holders_of(records, tmp_path, bucket)) == 2
        store.delete([make_key(2).chunk_hash])
        wait_until(lambda: holders_of(records, tmp_path, bucket) == [])


def test_what_is_deleted_while_it_is_sent_goes(one, bucket, monkeypatch):
    store, tier = one
    put = Remote.put

    def put_late(self, key, file):
        store.delete([key.chunk_hash])
        assert not tier.delete_pending()  # before it is there
        put(self, key, file)

    monkeypatch.setattr(Remote, "put", put_late)
    tier.send()
    tier.delete_pending()
    assert bucket.objects() == {}


def test_what_is_deleted_again_while_it_is_deleted_goes(one, bucket, monkeypatch):
    """An entry may arrive after the bucket's objects of its chunk were listed to be deleted, and is noted then."""
    store, tier = one
    tier.send()
    late, delete_chunk = store.entries.read(make_key(1)), Remote.delete_chunk

    def delete_too_early(self, chunk_hash):
        delete_chunk(self, chunk_hash)
        self.put(make_key(1), late)
        tier.note_deletions([chunk_hash])

    store.delete([make_key(1).chunk_hash])
    with monkeypatch.context() as patched:
        patched.setattr(Remote, "delete_chunk", delete_too_early)
        assert not tier.delete_pending()
    assert tier.num_pending_deletions == 1 and len(bucket.objects()) == 2
    tier.delete_pending()
    assert tier.num_pending_deletions == 0 and len(bucket.objects()) == 1


def test_what_is_cleared_while_it_is_sent_goes(one, bucket, monkeypatch):
    store, tier = one
    put = Remote.put

    def put_late(self, key, file):
        if key == make_key(1):
            tier.note_deletions([key.chunk_hash])
            store.control.clear([key])
            assert not tier.delete_pending()  # before it is there
        put(self, key, file)

    monkeypatch.setattr(Remote, "put", put_late)
    tier.send()
    tier.delete_pending()
    assert {key for key, _ in tier.remote.sizes()} == {make_key(2)}


def test_what_is_evicted_while_it_is_sent_stays_in_the_bucket(one, bucket, monkeypatch):
    store, tier = one
    put = Remote.put
    monkeypatch.setattr(Remote, "put", lambda self, key, file: (store.control.clear([key]), put(self, key, file)))
    tier.send()
    tier.delete_pending()
    assert len(bucket.objects()) == 3


@pytest.mark.parametrize("when", ["before the bucket has heard of it", "afterwards", "another"])
def test_what_is_cleared_while_it_is_fetched_does_not_stay(one, other, monkeypatch, when):
    one[1].send()
    (store, tier), get = other, Remote.get

    def get_before_it_is_cleared(self, key):
        file = get(self, key)
        tier.note_deletions([make_key(2 if when == "another" else 1).chunk_hash])
        if when != "before the bucket has heard of it":
            assert not tier.delete_pending()
        return file

    monkeypatch.setattr(Remote, "get", get_before_it_is_cleared)
    stays = when == "another"
    assert fetch(tier, make_key(1)) == stays and list(store.entries) == [make_key(1)] * stays


def test_what_another_machine_cleared_is_sent_once_it_is_made_again(one, other):
    (store, tier), (_, its_tier) = one, other
    tier.send()
    store.delete_keys([make_key(2)])
    its_tier.delete_keys([make_key(2)])
    assert fetch(tier, make_key(2)) == 0
    store.put([(make_key(2), make_layers(3))])
    assert tier.send() == 0 and tier.traffic.entries_sent == 4


def test_an_outage_is_a_miss_a_counter_and_quick_and_it_recovers(tmp_path, one, bucket, monkeypatch):
    monkeypatch.setattr(remote_module, "REST_S", 0.5)
    one[1].send()
    with opened(tmp_path / "other", bucket, timeout_s=1) as (store, tier):
        bucket.proxy.set("silent")
        begin = time.monotonic()
        assert fetch(tier, make_key(1), longest_s=0.2) == 0
        assert 0.1 < time.monotonic() - begin < 0.5 and tier.traffic.misses == {LATE: 1}
        wait_until(lambda: tier.traffic.misses[OUTAGE] == 1)
        begin = time.monotonic()
        assert fetch(tier, make_key(1), make_key(2), longest_s=5) == 0
        assert time.monotonic() - begin < 0.1 and tier.traffic.misses == {LATE: 1, OUTAGE: 3}
        bucket.proxy.set("open")
        time.sleep(0.5)
        assert fetch(tier, make_key(1), longest_s=5) == 1
        assert fetch(tier, make_key(2), longest_s=5) == 1
        assert store.entries.read(make_key(2)) == one[0].entries.read(make_key(2))


def test_nothing_that_is_to_be_sent_is_lost_in_an_outage(one, bucket, monkeypatch):
    monkeypatch.setattr(remote_module, "REST_S", 0.3)
    store, tier = one
    bucket.proxy.set("closed")
    assert tier.send() == tier.num_unsent == 3
    bucket.proxy.set("open")
    tier.start()
    wait_until(lambda: len(bucket.objects()) == 3 and tier.num_unsent == 0)
    store.put([(make_key(4), make_layers(4))])  # nobody has to say so
    wait_until(lambda: len(bucket.objects()) == 4)


def test_a_slow_bucket_holds_nobody_up_and_what_comes_late_is_there_for_the_next(tmp_path, bucket):
    keys = [make_key(n) for n in range(6)]
    with opened(tmp_path / "one", bucket) as (store, tier):
        store.put([(key, make_layers(1, num_tokens=5000)) for key in keys])
        tier.send()
        size = store.entries.size(keys[0])
    bucket.proxy.set(bytes_per_s=2 * size)  # the six take 3 seconds
    with opened(tmp_path / "other", bucket) as (there, its_tier):
        begin = time.monotonic()
        num_come = fetch(its_tier, *keys, longest_s=0.4)
        assert 0.35 < time.monotonic() - begin < 1.5  # nothing is known of the bucket yet
        assert num_come + its_tier.traffic.misses[LATE] == 6
        begin = time.monotonic()
        assert fetch(its_tier, *keys, longest_s=0.4) == 0  # the last wait was in vain
        assert time.monotonic() - begin < 0.35
        wait_until(lambda: all(map(there.contains, keys)))
        there.delete_keys(keys)
        begin, num_read = time.monotonic(), its_tier.traffic.entries_read
        assert fetch(its_tier, *keys, longest_s=0.4) == 0  # not even the first is expected by then
        assert time.monotonic() - begin < 0.35
        time.sleep(1)
        assert its_tier.traffic.entries_read == num_read  # who asked isn't disturbed by what comes late
        its_tier.begin(keys)
        wait_until(lambda: all(map(there.contains, keys)))


def test_what_was_not_listed_is_not_waited_for_and_can_be_fetched_all_the_same(one, other, bucket):
    (_, tier), (there, its_tier) = one, other
    its_tier.send()  # lists what is there: nothing
    tier.send()
    bucket.proxy.set(bytes_per_s=1000)
    begin = time.monotonic()
    assert fetch(its_tier, make_key(1), longest_s=5) == 0
    assert time.monotonic() - begin < 1 and not its_tier.traffic.misses.total()
    bucket.proxy.set()
    its_tier.begin([make_key(1)])
    wait_until(lambda: there.contains(make_key(1)))
    assert fetch(its_tier, make_key(2)) == 1  # an index run waits


def test_a_few_come_in_time_where_all_would_be_late(tmp_path, bucket):
    keys = [make_key(n) for n in range(6)]
    with opened(tmp_path / "one", bucket) as (store, tier):
        store.put([(key, make_layers(1, num_tokens=2000)) for key in keys])
        tier.send()
        size = store.entries.size(keys[0])
    with opened(tmp_path / "other", bucket) as (_, its_tier):
        its_tier._fetcher._mean_bytes = size
        its_tier.remote.link.latency_s = 0.01
        its_tier.remote.link._num_bytes, its_tier.remote.link._seconds = 2 * size, 1.0
        assert its_tier._fetcher.num_in_time(keys, 1.1) == 2
        assert its_tier._fetcher.num_in_time(keys, 0.4) == 0
        assert its_tier._fetcher.num_in_time(keys, 60) == 6


_SENDER = """
import sys
from pathlib import Path
from ragkv.store.disk_store import DiskStore
from ragkv.store.fetching import ABSENT, DAMAGED, LATE, OUTAGE
from ragkv.store.remote import Remote
from ragkv.store.tier import RemoteTier

tier = RemoteTier(DiskStore(Path(sys.argv[1])), Remote(sys.argv[2], 60))
print("sends", flush=True)
tier.send(lambda done, total: print(done, flush=True))
"""


def test_a_killed_sender_leaves_nothing_half_and_the_next_run_sends_the_rest(tmp_path, bucket):
    keys = [make_key(n) for n in range(12)]
    with closing(DiskStore(tmp_path / "one")) as store:
        store.put([(key, make_layers(n, num_tokens=5000)) for n, key in enumerate(keys)])
        files = files_of(store)
    bucket.proxy.set(sent_per_s=4 * MIB)
    process = subprocess.Popen(
        [sys.executable, "-c", _SENDER, str(tmp_path / "one"), bucket.url],
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        stdout=subprocess.PIPE,
    )
    assert process.stdout.readline() == b"sends\n"
    while int(process.stdout.readline()) < 4:
        pass
    time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    bucket.proxy.set()
    time.sleep(0.5)  # for what the proxy still has
    sent = bucket.objects()
    assert 4 <= len(sent) < 12 and set(sent.values()) <= set(files.values()) and bucket.num_unfinished() == 0
    with opened(tmp_path / "one", bucket) as (store, tier):
        assert tier.send() == 0
        assert tier.traffic.entries_sent == 12 - len(sent)
        assert sorted(bucket.objects().values()) == sorted(files.values())


def test_closing_does_not_wait_for_all_that_is_to_be_sent(tmp_path, bucket):
    bucket.proxy.set(sent_per_s=2 * MIB)
    with opened(tmp_path / "one", bucket) as (store, tier):
        store.put([(make_key(n), make_layers(1, num_tokens=2000)) for n in range(40)])
        thread = threading.Thread(target=tier.send)
        thread.start()
        wait_until(lambda: tier.traffic.entries_sent)
        begin = time.monotonic()
    thread.join()
    assert time.monotonic() - begin < 3 and 0 < len(bucket.objects()) < 40


def test_a_store_remembers_that_it_has_a_bucket(tmp_path, bucket):
    with closing(DiskStore(tmp_path / "one")) as store:
        assert open_tier(store, StoreConfig()) is None
        for _ in range(2):
            open_tier(store, StoreConfig(remote=bucket.url)).close()
        for other in (None, "s3://another"):
            with pytest.raises(StoreError, match=f"also in {bucket.url}.*RAGKV_STORE__REMOTE.*or delete"):
                open_tier(store, StoreConfig(remote=other))
        (store.path / "remote" / "url").unlink()
        assert open_tier(store, StoreConfig()) is None
