"""The store of exact prefixes: bounded, apart from chunks' KV, and emptied as a whole."""

import threading

import pytest
import torch

from ragkv.config import Config
from ragkv.home import Home
from ragkv.store.prefixes import clear_prefixes, generation, open_prefixes
from ragkv.store.record import FORMAT_VERSION, ChunkKey, LayerKV


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
