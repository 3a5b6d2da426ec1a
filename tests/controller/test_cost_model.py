"""The controller, on profiles whose answer is known."""

import json
from dataclasses import replace

import pytest

from ragkv.controller.cost_model import GIVEN_SHARE, WAIT_SHARE, Chunk, Load, Profile, Sample, longest_wait_s, plan
from ragkv.controller.profile_file import ProfileFile
from ragkv.policies import Policy, Selection

# Roughly two CPU cores and a small model: 1 s and 0.1 s for a thousand tokens, prefilled and fused.
QUERY = Policy(Selection.QUERY, 0.05)
PROFILE = Profile(QUERY, prefill=(20.0, 1000.0, 100.0), fused=(60.0, 30.0, 800.0, 1500.0, 50.0, 90.0), cold_ms=50.0)


def samples(times):
    loads = [
        Load(n, loaded, 0, int(budget * loaded), n - loaded)
        for n in (200, 500, 1300, 3000)
        for budget, share in ((0.05, 0.9), (0.15, 0.9), (0.05, 0.5))
        for loaded in (int(share * n),)
    ]
    return [Sample(load, times(load)) for load in loads]


def test_a_fit_finds_the_coefficients_again():
    fitted = Profile.fit(
        QUERY,
        samples(lambda load: PROFILE.prefill_ms(load.prompt)),
        samples(lambda load: PROFILE.fused_ms(load)),
        PROFILE.cold_ms,
    )
    assert fitted.prefill == pytest.approx(PROFILE.prefill, rel=1e-3)
    for load in (Load(4000, 3900, 0, 195, 100), Load(700, 350, 0, 17, 350)):
        assert fitted.fused_ms(load) == pytest.approx(PROFILE.fused_ms(load), rel=1e-3)


def test_a_fit_has_no_negative_part():
    rising = samples(lambda load: 500 - 0.05 * load.prompt)
    fitted = Profile.fit(QUERY, rising, rising, 0.0)
    assert min(*fitted.prefill, *fitted.fused) >= 0


def test_short_prompts_are_left_to_vllm_and_long_ones_fused():
    ways = {n: plan(PROFILE, n, [Chunk(n - 50)], QUERY).way for n in (60, 80, 300, 1000, 8000)}
    assert ways == {60: "prefill", 80: "prefill", 300: "fuse", 1000: "fuse", 8000: "fuse"}


def test_what_is_quicker_to_compute_than_to_load_is_computed():
    chunks = [Chunk(500), Chunk(500, is_cold=True), Chunk(500)]
    assert plan(PROFILE, 1600, chunks, QUERY).way == "fuse"
    slow = replace(PROFILE, cold_ms=5000.0)
    assert plan(slow, 1600, chunks, QUERY).way == "fuse warm"
    assert plan(slow, 1600, chunks, QUERY).chunks == (0, 2)
    assert plan(slow, 1600, [Chunk(500, is_cold=True)] * 3, QUERY).way == "prefill"


def test_a_tie_is_left_to_vllm():
    def way(fused_ms):
        return plan(replace(PROFILE, fused=(fused_ms, 0, 0, 0, 0, 0)), 1000, [Chunk(900)], QUERY).way

    prefill_ms = PROFILE.prefill_ms(1000)
    assert [way(share * prefill_ms) for share in (0.94, 0.96, 1.0)] == ["fuse", "prefill", "prefill"]


def test_what_would_be_computed_in_full_anyway_is_left_to_vllm():
    free = replace(PROFILE, fused=(1.0, 0.0, 0.0, 0.0, 0.0, 0.0))
    assert plan(free, 1000, [Chunk(501)], QUERY).way == "fuse"
    assert plan(free, 1000, [Chunk(500)], QUERY).way == "prefill"
    assert plan(free, 1000, [Chunk(500)], Policy("none")).way == "fuse"  # takes no vote


def test_nothing_to_load_is_left_to_vllm():
    assert plan(PROFILE, 500, [], QUERY).way == "prefill"


@pytest.mark.parametrize("budget", [0.0, 0.05, 0.5, 1.0])
@pytest.mark.parametrize("cold_ms", [0.0, 100.0, 3000.0])
def test_no_plan_is_expected_to_be_slower_than_prefill(budget, cold_ms):
    profile = replace(PROFILE, cold_ms=cold_ms)
    for num_tokens in (64, 200, 1000, 7000):
        chunks = [Chunk(num_tokens // 4, is_cold=i % 2 == 0) for i in range(3)]
        found = plan(profile, num_tokens, chunks, Policy("query", budget))
        assert found.predicted_ms <= found.prefill_ms == profile.prefill_ms(num_tokens)


def test_a_profile_is_kept_for_its_machine_model_codec_and_policy(tmp_path):
    file = tmp_path / "profile.json"
    kept = ProfileFile(file, "f" * 32, "raw", Policy("query"))
    assert kept.load() is None
    kept.save(PROFILE)
    assert ProfileFile(file, "f" * 32, "raw", Policy("query", 0.2)).load() == PROFILE
    others = [
        ("e" * 32, "raw", Policy("query")),
        ("f" * 32, "int8", Policy("query")),
        ("f" * 32, "raw", Policy("none")),
    ]
    assert all(ProfileFile(file, *other).load() is None for other in others)
    ProfileFile(file, *others[0]).save(replace(PROFILE, cold_ms=1.0))
    assert kept.load() == PROFILE


@pytest.mark.parametrize("name", ["query", "query:0.15"])
def test_a_profile_is_read_with_its_policy_named_with_or_without_a_budget(name):
    read = Profile.from_dict({**PROFILE.as_dict(), "policy": name})
    assert read.policy.is_like(QUERY) and replace(read, policy=QUERY) == PROFILE


@pytest.mark.parametrize("name", ["query-spread+learned", "adaptive:0.1", None, 3, ["query"]])
def test_a_profile_of_a_policy_that_is_unknown_is_measured_anew(tmp_path, name):
    file = tmp_path / "profile.json"
    kept = ProfileFile(file, "f" * 32, "raw", QUERY)
    kept.save(PROFILE)
    (key,) = json.loads(file.read_text())
    file.write_text(json.dumps({key: {**PROFILE.as_dict(), "policy": name}}))
    assert kept.load() is None


@pytest.mark.parametrize("text", ["", "[]", "{", json.dumps({"x": 1})])
def test_a_file_that_is_damaged_is_as_none(tmp_path, text):
    file = tmp_path / "profile.json"
    file.write_text(text)
    kept = ProfileFile(file, "f" * 32, "raw", Policy("query"))
    assert kept.load() is None
    kept.save(PROFILE)
    assert kept.load() == PROFILE


def test_a_request_waits_for_a_bucket_for_a_small_part_of_what_prefill_takes():
    profile = Profile(Policy.parse("none"), prefill=(0.0, 1000.0, 0.0), fused=(0.0,) * 6, cold_ms=0.0)
    assert longest_wait_s(profile, 4000, 3000) == pytest.approx(4 * WAIT_SHARE)
    assert longest_wait_s(profile, 4000, 40) == pytest.approx(0.04)  # where little is missing, little is gained
    assert longest_wait_s(None, 4000, 3000) == 0
    assert longest_wait_s(profile, 4000, 3000, GIVEN_SHARE) == pytest.approx(4 * GIVEN_SHARE)
    assert WAIT_SHARE < 0.1 < GIVEN_SHARE < 1
