"""The simulator, on systems small enough to be followed by hand, and the product's own decisions in it."""

import json
import random
import tracemalloc
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ragkv.config import Config
from ragkv.controller.cost_model import Chunk, Load, Profile, longest_wait_s, plan
from ragkv.engine.task import ROOT_HASH, FuseTask, Span
from ragkv.errors import ConfigError
from ragkv.evals.simulated_tier import Tier
from ragkv.evals.simulation import TIERS, Request, Simulation, System, expected
from ragkv.evals.workloads import simulate
from ragkv.policies import Policy, Selection
from ragkv.store.entries import Layout
from ragkv.store.memory import Pool
from ragkv.store.record import ChunkKey, LayerKV

# 1 s for a thousand tokens prefilled, a tenth of that fused, and as much again from disk.
NONE = Policy(Selection.NONE)
PROFILE = Profile(NONE, prefill=(0.0, 1000.0, 0.0), fused=(10.0, 90.0, 0.0, 1000.0, 0.0, 0.0), cold_ms=100.0)


SYSTEM = System(
    num_engines=1,
    profile=PROFILE,
    policy=NONE,
    kv_bytes=1,
    kv_tokens=1 << 40,
    memory_bytes=1 << 40,
)


def ask(arrived_s, *keys, tokens=1000, answer=1, **more):
    return Request(arrived_s, tuple((key, tokens) for key in keys), 100, answer, **more)


def answers(system, requests):
    return sorted(Simulation(system).run(requests), key=lambda each: each.arrived_s)


def tiers(answered):
    return {tier: tokens for tier, tokens in zip(TIERS, answered.tokens, strict=True) if tokens}


def test_one_engine_and_one_chunk_by_hand():
    first, second = answers(replace(SYSTEM, token_s=0.5), [ask(0, "a", answer=3), ask(10, "a", answer=1)])
    assert (first.way, tiers(first)) == ("prefill", {"none": 1000})
    assert first.ttft_ms == pytest.approx(1100)  # 1,000 and 100 tokens
    assert first.ended_s == pytest.approx(1.1 + 2 * 0.5)  # two more tokens
    assert (second.way, tiers(second)) == ("fuse", {"memory": 1000})
    assert second.ttft_ms == pytest.approx(10 + 90 + 100)  # by the profile's coefficients
    assert second.ended_s == second.first_token_s


def test_from_disk_it_takes_longer_and_is_in_memory_then():
    simulation = Simulation(SYSTEM)
    simulation.index([("a", 1000)])
    first, second = sorted(simulation.run([ask(0, "a"), ask(10, "a")]), key=lambda each: each.arrived_s)
    assert (tiers(first), first.disk_bytes) == ({"disk": 1000}, 1000)
    assert (tiers(second), second.disk_bytes) == ({"memory": 1000}, 0)
    assert first.ttft_ms - second.ttft_ms == pytest.approx(PROFILE.cold_ms)


def test_the_way_and_its_time_are_the_product_s_plan():
    slow_disk = replace(SYSTEM, profile=replace(PROFILE, cold_ms=5000.0))
    simulation = Simulation(slow_disk)
    simulation.index([("a", 1000), ("b", 1000)])
    simulation.engines[0].memory.put("a", 1000, 1000)
    (answered,) = simulation.run([ask(0, "a", "b", anchor_tokens=50)])
    chosen = plan(slow_disk.profile, 2150, [Chunk(50), Chunk(1000), Chunk(1000, is_cold=True)], NONE)
    assert (answered.way, answered.ttft_ms) == ("fuse warm", pytest.approx(chosen.predicted_ms))
    assert answered.ttft_ms == pytest.approx(slow_disk.profile.fused_ms(Load(2150, 1050, 0, 0, 1100)))
    assert answered.disk_bytes == 0  # "b" was computed, and didn't come into memory
    assert "b" not in simulation.engines[0].memory


@pytest.mark.parametrize(("full", "then"), [("memory_bytes", "disk"), ("disk_bytes", "none")])
def test_a_full_tier_evicts_what_the_product_s_policy_says(full, then):
    def last_time(eviction):
        system = replace(SYSTEM, **{full: 2000}, eviction=eviction)
        return tiers(answers(system, [ask(10 * i, key) for i, key in enumerate("aaabca")])[-1])

    assert last_time("lfu") == {"memory": 1000}  # "b" went for "c"
    assert last_time("lru") == {then: 1000}  # "a" did


def test_what_the_request_itself_uses_is_not_evicted():
    simulation = Simulation(replace(SYSTEM, memory_bytes=2000))
    simulation.index([(key, 1000) for key in "abc"])
    (answered,) = simulation.run([ask(0, *"abc")])
    assert tiers(answered) == {"disk": 3000}
    assert [key in simulation.engines[0].memory for key in "abc"] == [True, True, False]  # no room was made for "c"
    assert simulation.engines[0].memory.size_bytes == 2000


def test_what_leaves_the_disk_leaves_memory():
    requests = [ask(10 * i, key) for i, key in enumerate("aba")]
    (*_, last) = answers(replace(SYSTEM, disk_bytes=1000), requests)
    assert tiers(last) == {"none": 1000}


def test_the_disk_remembers_uses_of_what_it_evicted():
    def evicted_in_the_end(remembers):
        tier = Tier(2000, "lfu", remembers=remembers)
        for key, touches in (("a", 2), ("b", 3), ("c", 0), ("a", 2)):  # "c" takes the place of "a", and "a" that of "c"
            tier.put(key, 1000, 1)
            for _ in range(touches):
                tier.touch(key)
        return tier.put("d", 1000, 1)

    assert evicted_in_the_end(remembers=True) == ["b"]  # 4 uses, and "a" 6
    assert evicted_in_the_end(remembers=False) == ["a"]  # 3 since it came back


@pytest.mark.parametrize("seed", range(3))
def test_a_memory_with_gaps_holds_what_the_pool_holds(seed):
    chance = random.Random(seed)
    keys = [ChunkKey(f"{i:032x}", "0" * 32, "1" * 32, (0, 2)) for i in range(16)]
    layouts = {key: Layout((chance.randint(90_000, 110_000),), (0, 0)) for key in keys}
    kv = LayerKV(*torch.zeros(2, 2, 64, 8), base_position=0)
    pool, tier, even = Pool(470_000), Tier(470_000, "gdsf", has_gaps=True), Tier(470_000, "gdsf")
    num_found, num_found_even = 0, 0
    for _ in range(300):
        wanted = chance.sample(keys, 3)
        num_found += sum(key in tier for key in wanted)
        num_found_even += sum(key in even for key in wanted)
        pool.request(dict.fromkeys(wanted))
        for key in wanted:
            tier.touch(key)
            even.touch(key)
        for key in wanted:
            if key not in pool and pool.slot(key, layouts[key], 0, set()) is not None:
                pool.keep(key, 0, kv)
            tier.put(key, layouts[key].size_bytes, 64, spared=wanted)
            even.put(key, layouts[key].size_bytes, 64, spared=wanted)
        assert [key in tier for key in keys] == [key in pool for key in keys]
    assert tier.size_bytes == sum(pool.sizes().values())
    assert 0 < num_found < num_found_even  # the gaps cost hits


def test_a_second_engine_halves_the_queue():
    def mean_wait_ms(num_engines):
        burst = [ask(0.0, f"{i}") for i in range(40)]
        ttfts = [each.ttft_ms for each in answers(replace(SYSTEM, num_engines=num_engines), burst)]
        return np.mean(ttfts) - 1100

    assert mean_wait_ms(1) == pytest.approx(1100 * 39 / 2)
    assert mean_wait_ms(2) == pytest.approx(1100 * 19 / 2)


def test_equally_busy_engines_take_turns():
    simulation = Simulation(replace(SYSTEM, num_engines=3))
    for i in range(6):
        list(simulation.run([ask(10.0 * i, f"{i}")]))
    assert [engine.disk.size_bytes for engine in simulation.engines] == [2000] * 3


def test_the_engine_with_the_fewest_requests_comes_before_the_next_in_turn():
    simulation = Simulation(replace(SYSTEM, num_engines=2, token_s=1.0))
    list(simulation.run([ask(0.0, "a", answer=100), ask(0.1, "b"), ask(10.0, "c")]))
    assert [[key for key in "abc" if key in engine.disk] for engine in simulation.engines] == [["a"], ["b", "c"]]


def test_affine_requests_go_where_their_chunk_is_unless_that_engine_is_overloaded():
    system = replace(SYSTEM, num_engines=4)
    apart = [ask(10.0 * i, f"{i % 10}") for i in range(40)]
    hits = {affine: [tiers(a) for a in answers(replace(system, is_affine=affine), apart)] for affine in (True, False)}
    assert hits[True].count({"memory": 1000}) == 30  # each chunk was computed once
    assert hits[False].count({"memory": 1000}) < 30
    at_once = answers(replace(system, is_affine=True), [ask(0.0, "a") for _ in range(12)])
    assert len({a.first_token_s for a in at_once}) < 12  # another engine worked at the same time


def test_requests_wait_for_memory_of_those_that_are_decoded():
    system = replace(SYSTEM, kv_tokens=2300, token_s=1.0)
    first, second, third = answers(system, [ask(0.0, key, answer=11) for key in "abc"])
    assert second.first_token_s == pytest.approx(1.1 + 0.5 + 1 + 1.1)  # after a step and a half of the first's, too
    assert first.ended_s == pytest.approx(1.1 + 10 + 1.1)  # it has waited for the second
    assert third.first_token_s == pytest.approx(first.ended_s + 0.5 + 1 + 1.1)  # there is room once the first has ended
    (alone,) = answers(replace(system, kv_tokens=10), [ask(0.0, "a")])  # larger than all memory, but nobody else is in
    assert alone.ttft_ms == pytest.approx(1100)


def test_a_bucket_brings_what_another_engine_stored():
    requests = [ask(0, "a"), ask(10, "a", "b"), ask(20, "b")]  # by turns to engines 0, 1 and 0
    system = replace(SYSTEM, num_engines=2)
    assert [tiers(each) for each in answers(system, requests)][1:] == [{"none": 2000}, {"none": 1000}]
    quick = replace(system, bucket_bytes_s=1e6, bucket_latency_s=0.01)
    _, second, third = answers(quick, requests)
    assert (tiers(second), second.bucket_bytes) == ({"bucket": 1000, "none": 1000}, 1000)
    assert second.ttft_ms == pytest.approx(11 + 10 + 90 + 1100)  # latency and transfer, then fusion: nothing is cold
    assert tiers(third) == {"bucket": 1000}


def test_nobody_waits_longer_for_the_bucket_than_in_the_product():
    longest_s = longest_wait_s(PROFILE, 1100, 1000)
    requests = [ask(0, "a"), ask(10, "a"), ask(20, "b"), ask(30, "a")]
    for seconds, second, fourth in ((0.99, "bucket", "memory"), (1.01, "none", "memory")):
        system = replace(SYSTEM, num_engines=2, bucket_bytes_s=1000 / (seconds * longest_s))
        found = [tiers(each) for each in answers(system, requests)]
        assert (found[1], found[3]) == ({second: 1000}, {fourth: 1000})


def test_what_comes_too_late_from_the_bucket_is_on_the_disk_for_the_next():
    system = replace(SYSTEM, num_engines=2, bucket_bytes_s=500.0)  # two seconds for the chunk, and 1.1 to compute it
    simulation = Simulation(replace(system, memory_bytes=0))
    found = [tiers(each) for each in simulation.run([ask(10.0 * i, "a") for i in range(4)])]
    assert found == [{"none": 1000}, {"none": 1000}, {"disk": 1000}, {"disk": 1000}]


def test_of_a_prefix_only_what_is_whole_from_the_beginning_counts(tmp_path):
    file = tmp_path / "trace.jsonl"
    lines = [
        (0, 2100, [*range(5)]),
        (5000, 2100, [0, 1, 9, 3, 4]),
        (9000, 1024, [7, 1]),
        (20000, 2100, [0, 1, 2, 3, 8]),
    ]
    names = ("timestamp", "input_length", "hash_ids")
    file.write_text(
        "".join(json.dumps(dict(zip(names, line, strict=True)) | {"output_length": 5}) + "\n" for line in lines)
    )
    trace = simulate.blocks(file)
    assert [len(each.chunks) for each in trace.requests] == [4, 4, 1, 4]  # full blocks, and something to compute
    assert [each.question_tokens for each in trace.requests] == [52, 52, 512, 52]
    assert [each.arrived_s for each in trace.requests] == [0, 5, 9, 20]
    assert trace.num_chunks == 6
    assert [tiers(each) for each in answers(SYSTEM, trace.requests)] == [
        {"none": 2048},
        {"memory": 1024, "none": 1024},  # the fourth block is stored, too, but behind one that isn't
        {"none": 512},
        {"memory": 2048},
    ]
    with pytest.raises(ConfigError, match="nowhere"):
        simulate.blocks(tmp_path / "nowhere")


def test_the_end_of_a_prefix_is_evicted_first():
    system = replace(SYSTEM, disk_bytes=3000, eviction="lru")
    for times in (1, 2):  # when it was stored, and when it was loaded
        before = [ask(i, *"abc", is_exact=True) for i in range(times)]
        *_, last = answers(system, [*before, ask(10, "x", is_exact=True), ask(20, *"abc", is_exact=True)])
        assert tiers(last) == {"memory": 2000, "none": 1000}  # "c" went


def test_of_a_prefix_no_part_is_loaded_alone():
    simulation = Simulation(replace(SYSTEM, profile=replace(PROFILE, cold_ms=5000.0)))
    simulation.index([("a", 1000), ("b", 1000)])
    simulation.engines[0].memory.put("b", 1000, 1000)
    apart, exact = simulation.run([ask(0, "a", "b"), ask(10, "a", "b", is_exact=True)])
    assert (apart.way, exact.way) == ("fuse warm", "prefill")


WANTED = SimpleNamespace(
    trace="zipf",
    engines=(1, 3),
    chunks=(200,),
    stores=("local", "bucket"),
    routings=("least", "affine"),
    profile=None,
    load=0.7,
    requests=60,
    exponent=0.9,
    top_k=4,
    tokens=8,
    uncounted=0.5,
    indexed=False,
    token_ms=1.0,
    bucket_mib_s=200.0,
    bucket_ms=5.0,
    kv_bytes=1000,
    kv_tokens=100_000,
    seed=0,
)


def rows(tmp_path, **changes):
    wanted = SimpleNamespace(**{**vars(WANTED), "profile": tmp_path / "profile.json", **changes})
    wanted.profile.write_text(json.dumps(PROFILE.as_dict()))
    store = {"memory_gib": 0.01, "disk_gib": 0.05}
    config = Config(home=tmp_path, store=store, answer={"policy": "none"})
    profile = simulate.profile_of(config, wanted.profile)
    system = simulate.system_of(config, wanted, profile, is_exact=False)
    found = []
    for engines in wanted.engines:
        trace = simulate.questions(wanted.chunks[0], wanted.requests * engines, wanted)
        for bytes_s in (None, 2e8):
            chosen = replace(system, num_engines=engines, bucket_bytes_s=bytes_s)
            found.append(simulate.simulated(chosen, trace, wanted.load, wanted.uncounted))
    return found


def test_rows_are_the_same_for_the_same_seed_only(tmp_path):
    first = rows(tmp_path)
    assert first == rows(tmp_path)
    assert first != rows(tmp_path, seed=1)


def test_rows_add_up(tmp_path):
    alone, also_alone, local, shared = rows(tmp_path)
    assert alone["ttft_p50_ms"] == also_alone["ttft_p50_ms"]  # a bucket is of no use to one engine with a large disk
    assert shared["bucket_share"] > 0 and shared["none_share"] < local["none_share"]
    for row in (alone, local, shared):
        assert sum(row[f"{tier}_share"] for tier in TIERS) == pytest.approx(1, abs=1e-3)
        assert row["ttft_p50_ms"] <= row["ttft_p90_ms"] <= row["ttft_p99_ms"]
        assert row["answered_per_s"] <= row["arriving_per_s"]
    assert (alone["requests"], local["requests"]) == (30, 90)
    assert local["memory_bytes"] <= 3 * 0.01 * (1 << 30) and local["disk_bytes"] <= 3 * 0.05 * (1 << 30)
    assert local["bucket_bytes"] == 0 < shared["bucket_bytes"]


def test_what_was_indexed_is_found(tmp_path):
    local, shared = rows(tmp_path, engines=(1,), indexed=True)
    cold, _ = rows(tmp_path, engines=(1,))
    assert local["none_share"] < 0.8 * cold["none_share"]  # as much as fits on the disk
    assert shared["none_share"] < 0.01
    assert shared["bucket_bytes"] > cold["disk_bytes"]


def test_load_is_the_share_of_the_time_that_full_prefill_takes():
    trace = simulate.Trace("some", 2, [ask(0.0, "a"), ask(1.0, "b"), ask(4.0, "c")])
    stretched = list(trace.under(0.5, 2, PROFILE))
    assert [each.arrived_s for each in stretched] == pytest.approx([0.0, 3.3 / 4, 3.3])  # 3.3 s of work for two
    assert list(trace.under(0.0, 2, PROFILE)) == trace.requests


def test_popular_documents_are_asked_for_as_zipf_s_law_says():
    trace = simulate.questions(1000, 4000, SimpleNamespace(**{**vars(WANTED), "exponent": 1.0, "top_k": 1}))
    counts = np.bincount([each.chunks[0][0] for each in trace.requests[:400]], minlength=1000)
    assert counts.max() / 400 == pytest.approx(1 / np.sum(1 / np.arange(1, 1001)), abs=0.05)
    assert {tokens for each in trace.requests for _, tokens in each.chunks} <= set(range(64, 1025))


def test_popularity_moves():
    trace = simulate.questions(30, 20_000, SimpleNamespace(**{**vars(WANTED), "exponent": 1.0, "top_k": 1}))
    keys = np.array([each.chunks[0][0] for each in trace.requests])
    first, again, last = (
        np.bincount(part).argsort()[-3:].tolist() for part in (keys[:1000], keys[1000:2000], keys[-2000:])
    )
    assert first == again != last


def test_a_million_chunks_take_little_memory(tmp_path):
    tracemalloc.start()
    (local, shared) = rows(tmp_path, engines=(10,), chunks=(1_000_000,), requests=40)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 64 << 20  # lists of a million floats take half of that each
    assert local["none_share"] > 0.5 and shared["requests"] == 200


def test_real_tasks_are_replayed():
    span = lambda start, name, mean="": Span(start, start + 1000, name, "anchor", mean)  # noqa: E731
    anchor = Span(0, 50, "anchor", ROOT_HASH)
    tasks = [
        FuseTask((anchor, span(50, "a"), span(1050, "b")), NONE),
        FuseTask((anchor, span(50, "b", "mean"), span(1050, "a")), NONE),
    ]
    requests = simulate.of_tasks([(2150, task) for task in tasks], [1.0, 10.0], answer_tokens=4)
    assert [each.arrived_s for each in requests] == [1.0, 11.0]
    assert requests[1].chunks == ((("b", "mean"), 1000), (("a", "anchor"), 1000))
    assert {(each.num_tokens, each.anchor_tokens, each.question_tokens) for each in requests} == {(2150, 50, 100)}
    found = expected(requests, replace(SYSTEM, is_indexed=True))
    assert found.memory_share == 0.25  # "a" the second time
    assert found.ttft_mean_ms == pytest.approx(10 + 90 * 2.05 + 100 + 150)  # 200 ms and 100 ms from disk
    assert expected(requests, replace(SYSTEM, is_indexed=True), [1]).memory_share == 0.5


def test_a_profile_is_read_from_a_file_or_the_lack_is_told(tmp_path):
    file, config = tmp_path / "profile.json", Config(home=tmp_path, answer={"policy": "none"})
    file.write_text(json.dumps({"one": PROFILE.as_dict()}))
    assert simulate.profile_of(config, file) == PROFILE
    file.write_text(json.dumps({"one": PROFILE.as_dict(), "two": PROFILE.as_dict()}))
    with pytest.raises(ConfigError, match="2 profiles.*ragkv profile --json"):
        simulate.profile_of(config, file)
    file.write_text("[]")
    with pytest.raises(ConfigError, match="can't read a profile"):
        simulate.profile_of(config, file)
    with pytest.raises(ConfigError, match="not of guided"):
        simulate.system_of(Config(), WANTED, PROFILE, is_exact=False)
    assert simulate.system_of(Config(), WANTED, PROFILE, is_exact=True).eviction == "lru"


def test_the_size_of_kv_is_the_model_s(tmp_path):
    model = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 256}
    (tmp_path / "config.json").write_text(json.dumps(model))
    config = Config(model={"name": str(tmp_path), "dtype": "bfloat16"})
    raw, int8 = (simulate.kv_bytes_of(config, codec) for codec in ("raw", "int8"))
    assert 2 * 2 * 2 * 64 * 2 <= raw <= 1.05 * 2 * 2 * 2 * 64 * 2  # layers, K and V, heads, head size, bytes
    assert 0.5 * raw < int8 < 0.6 * raw
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="--kv-bytes"):
        simulate.kv_bytes_of(config, "raw")
