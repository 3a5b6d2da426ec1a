"""Entries in a real bucket, by key: what is put is what is got, all of it, in good time or not at all."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from store_samples import make_key

from ragkv.errors import ConfigError, RemoteError
from ragkv.store import remote as remote_module
from ragkv.store.remote import Breaker, Link, Remote

MIB = 1 << 20


@pytest.fixture(params=["s3", "file"])
def place(request, tmp_path):
    """The URL of an empty bucket, or of a shared folder whose name has to be quoted."""
    if request.param == "s3":
        return request.getfixturevalue("bucket").url
    (tmp_path / "a shared folder").mkdir()
    return (tmp_path / "a shared folder").as_uri()


@pytest.fixture
def remote(place):
    remote = Remote(place, timeout_s=10)
    yield remote
    remote.close()


@pytest.mark.parametrize("size", [0, 1, (4 << 20) - 1, 4 << 20, (4 << 20) + 1, (13 << 20) + 5])
def test_what_is_put_is_what_is_got(remote, size):
    data = bytes(range(256)) * (size // 256) + bytes(size % 256)
    assert remote.get(make_key()) is None
    remote.put(make_key(), data)
    assert remote.get(make_key()) == data
    assert list(remote.sizes()) == [(make_key(), size)]


def test_a_large_object_is_one_request_and_nothing_of_it_is_kept_out_of_sight(bucket):
    remote = Remote(bucket.url, timeout_s=10)
    remote.put(make_key(), bytes(20 << 20))
    assert bucket.num_unfinished() == 0 and len(bucket.objects()) == 1
    remote.close()


def test_names_are_hashes_and_of_this_format_only(bucket):
    remote = Remote(bucket.url, timeout_s=10)
    remote.put(make_key(7), b"x")
    (name,) = bucket.objects()
    key = make_key(7).prefix().hex()
    assert name == f"some/prefix/{key[:32]}/{key[32:]}.v5"
    for other in (name.replace(".v5", ".v4"), name.replace(key[32:], "00"), "some/prefix/notes.txt"):
        bucket.write(other, b"of somebody else")
    assert [key for key, _ in remote.sizes()] == [make_key(7)]
    remote.close()


def test_a_chunk_goes_with_all_that_is_of_it_in_every_format(bucket):
    remote = Remote(bucket.url, timeout_s=10)
    keys = [make_key(1, anchor) for anchor in range(5)] + [make_key(2)]
    for key in keys:
        remote.put(key, b"x")
    older = f"some/prefix/{make_key(1).chunk_hash}/{'0' * 72}.v3"
    bucket.write(older, b"x")
    remote.delete_chunk(make_key(1).chunk_hash)
    assert [key for key, _ in remote.sizes()] == [make_key(2)]
    assert len(bucket.objects()) == 1
    remote.delete_chunk(make_key(1).chunk_hash)  # nothing is left to do
    remote.delete_key(make_key(2))
    remote.delete_key(make_key(2))
    assert not bucket.objects()
    remote.close()


def test_what_a_killed_process_began_to_write_goes_from_a_shared_folder_too(tmp_path):
    remote = Remote(tmp_path.as_uri(), timeout_s=10)
    remote.put(make_key(1), b"secret")
    (file,) = [path for path in tmp_path.rglob("*") if path.is_file()]
    file.with_name(f"{file.name}#1").write_bytes(b"secret too")  # as obstore calls what isn't finished
    assert len(list(remote.sizes())) == 1
    remote.delete_chunk(make_key(1).chunk_hash)
    assert not list(tmp_path.iterdir())
    remote.close()


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("ftp://bucket", "it begins with none of"),
        ("bucket", "it begins with none of"),
        ("s3://", "store.remote = 's3://' can't be used"),
        ("file:///no/such/folder", "folder that is there"),
    ],
)
def test_a_url_that_means_nothing_is_told_with_the_remedy(url, problem):
    with pytest.raises(ConfigError, match=problem):
        Remote(url, timeout_s=10)


def test_a_bucket_that_is_not_there_is_an_error_and_not_a_miss_when_it_is_written_to(bucket):
    remote = Remote("s3://no-such-bucket/x", timeout_s=10)
    with pytest.raises(RemoteError, match="can't write s3://no-such-bucket/x: .*not found"):
        remote.put(make_key(), b"x")
    remote.close()


@pytest.mark.parametrize(("state", "longest_s"), [("closed", 2.0), ("silent", 3.0)])
def test_an_outage_is_told_in_time_then_at_once_and_ends_by_itself(bucket, monkeypatch, state, longest_s):
    monkeypatch.setattr(remote_module, "REST_S", 1.0)
    remote = Remote(bucket.url, timeout_s=1)
    remote.put(make_key(), b"x")
    bucket.proxy.set(state)
    begin = time.monotonic()
    with pytest.raises(RemoteError, match="can't read s3://kv"):
        remote.get(make_key())
    assert time.monotonic() - begin < longest_s
    begin = time.monotonic()
    for _ in range(100):
        with pytest.raises(RemoteError):
            remote.get(make_key())
    assert time.monotonic() - begin < 0.1
    bucket.proxy.set("open")
    time.sleep(1.0)
    assert remote.get(make_key()) == b"x"
    assert not remote.breaker.rests
    remote.close()


def test_after_the_rest_one_call_finds_out_for_the_others(monkeypatch):
    monkeypatch.setattr(remote_module, "REST_S", 0.05)
    breaker = Breaker()
    breaker.failed("gone")
    time.sleep(0.06)
    breaker.check()  # this one may try
    with pytest.raises(RemoteError, match="gone"):
        breaker.check()
    breaker.failed("gone")
    time.sleep(0.06)
    assert breaker.rests  # for twice as long
    time.sleep(0.05)
    breaker.check()
    breaker.succeeded()
    breaker.check()
    assert not breaker.rests


def test_calls_that_fail_together_are_one_outage(monkeypatch):
    monkeypatch.setattr(remote_module, "REST_S", 0.05)
    breaker = Breaker()
    for _ in range(20):
        breaker.failed("gone")
    time.sleep(0.06)
    breaker.check()


def test_it_learns_how_fast_the_bucket_is(bucket):
    remote = Remote(bucket.url, timeout_s=30)
    for n in range(4):
        remote.put(make_key(n), bytes(MIB))
    assert remote.link.expected_s(MIB) == 0
    bucket.proxy.set(bytes_per_s=4 * MIB)
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(remote.get, map(make_key, range(4))))
    assert 0.5 < remote.link.expected_s(4 * MIB) < 2.5
    remote.close()


def test_the_rate_is_that_of_all_that_comes_at_a_time():
    link = Link()
    with link.reading() as one, link.reading() as other:
        time.sleep(0.1)
        one.append(1000)
        other.append(1000)
    assert 10_000 < link.bytes_per_s < 20_001


def test_a_pause_between_reads_does_not_count():
    link = Link()
    for _ in range(2):
        with link.reading() as parts:
            time.sleep(0.05)
            parts.append(1000)
        time.sleep(0.3)
    assert 10_000 < link.bytes_per_s < 20_001
