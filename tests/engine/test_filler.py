"""The passes that fill blocks, the fusion over them and the worker's queues, on a small model without vLLM."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tiny_forward import BLOCK_SIZE, NUM_LAYERS, TinyForward

from ragkv.engine import fusion
from ragkv.engine.device_copy import PARTS, CopiedParts, StagedEntry
from ragkv.engine.exact import ExactKV
from ragkv.engine.filler import BlockFiller, PassPlan
from ragkv.engine.fusion import Fusion, StepBudget
from ragkv.engine.held import HeldKV
from ragkv.engine.loader import BadSpanError, KVLoader
from ragkv.engine.positions import covered, end_of_slice, exact_until, runs_of
from ragkv.engine.precompute import Precompute
from ragkv.engine.preemption import Hold
from ragkv.engine.shift import MeanShift, Recomputed, averaging, mean_shifts, shift_weights
from ragkv.engine.task import ROOT_HASH, FuseTask, Job, MeanTask, PrecomputeTask, Report, ScoreTask, Span
from ragkv.engine.worker import WorkerSide
from ragkv.errors import StoreError
from ragkv.kernels.dispatch import choose
from ragkv.policies import Policy
from ragkv.retriever.hashing import chunk_hash, mean_hash
from ragkv.store.codecs import INT4, RAW
from ragkv.store.disk_store import DiskStore
from ragkv.store.entries import ALIGNMENT
from ragkv.store.record import LayerKV

ANCHOR, FIRST, SECOND = [1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11, 12], [13, 14, 15, 16, 17, 18, 19, 20, 21]
QUESTION = [30, 31, 32]
TOKENS = ANCHOR + FIRST + SECOND + QUESTION
BLOCKS = [9, 3, 7, 1, 8, 2, 5]
A_SPAN = Span(0, 5, chunk_hash(ANCHOR), ROOT_HASH)
F_SPAN = Span(5, 12, chunk_hash(FIRST), chunk_hash(ANCHOR))
S_SPAN = Span(12, 21, chunk_hash(SECOND), chunk_hash(ANCHOR))
SPANS = (A_SPAN, F_SPAN, S_SPAN)
FIRST_HASH = F_SPAN.chunk_hash


def job(policy="none", spans=SPANS, num_prefix=0, token_ids=TOKENS, **fields):
    return Job("r", FuseTask(spans, Policy.parse(policy), **fields), list(token_ids), BLOCKS, num_prefix)


def precompute_jobs():
    jobs = [Job("anchor", PrecomputeTask(A_SPAN), ANCHOR, BLOCKS, 0)]
    for chunk in (FIRST, SECOND):
        span = Span(5, 5 + len(chunk), chunk_hash(chunk), chunk_hash(ANCHOR))
        jobs.append(Job(span.chunk_hash, PrecomputeTask(span), ANCHOR + chunk, BLOCKS, 0))
    return jobs


@pytest.fixture(params=["torch", "separate"])
def loader(request, tmp_path):
    """`separate`: a layer is put together in memory of ours, as on CPU, and not in the model's blocks."""
    forward = TinyForward()
    store = DiskStore(tmp_path)
    loader = KVLoader(forward, [forward.rotation] * NUM_LAYERS, store, "f" * 32, choose("torch", forward.device))
    for one in precompute_jobs():
        Precompute(loader).precompute([one])
    for layer in forward.layers:
        layer.kv_cache.zero_()
    if request.param != "separate":
        own = loader.blocks
        loader.blocks = lambda job: 2 * own(job)[1:]
    return loader


def loader_kv(loader, span, layer):
    with loader.snapshot() as snapshot:
        return loader.read(snapshot, layer, span).kv.map(torch.clone).decoded()


def expected_kv(tokens=TOKENS):
    """What a plain forward over all tokens writes, by layer."""
    forward = TinyForward()
    forward.run([_piece(tokens)])
    return [forward.read(layer, len(tokens), BLOCKS) for layer in range(NUM_LAYERS)]


def _piece(tokens):
    from ragkv.engine.forward import Piece

    return Piece(torch.tensor(tokens), torch.arange(len(tokens)), torch.tensor(BLOCKS))


def finish(steps):
    num_steps = 1
    while True:
        try:
            next(steps)
            num_steps += 1
        except StopIteration as stop:
            return stop.value, num_steps


def fuse(loader, *args, slice_tokens=1000, **kwargs):
    """The report, and in how many steps it was done."""
    return finish(Fusion(loader).fuse(job(*args, **kwargs), StepBudget(slice_tokens)))


def kv(loader, layer, end=24):
    return [x[:end] for x in loader.forward.read(layer, len(TOKENS), BLOCKS)]


def run(loader, report=None, num_prefix=0, **plan):
    filler = BlockFiller(loader, job(num_prefix=num_prefix), report or Report())
    filler.run(PassPlan(**{"positions": torch.arange(21, 24), "spans_at": lambda _: SPANS, **plan}))
    return filler


def test_a_pass_over_exact_spans_writes_what_prefill_writes(loader):
    report = Report()
    run(loader, report, positions=torch.arange(12, 24), spans_at=lambda _: SPANS[:2])
    for layer, expected in enumerate(expected_kv()):
        torch.testing.assert_close(kv(loader, layer), expected, rtol=1e-4, atol=1e-4)
    assert loader.forward.num_computed[-1] == 12
    assert report.stages.load_ms > 0 and report.stages.recompute_ms > 0 and report.stages.probe_ms == 0


def test_keys_are_rotated_to_where_the_chunk_is_and_values_are_not_touched(loader):
    run(loader)
    with loader.snapshot() as snapshot:
        stored = loader.read(snapshot, 1, S_SPAN)
    k, v = kv(loader, 1)
    assert stored.distance == 7
    torch.testing.assert_close(k[12:21], loader.forward.rotation.rotate(stored.kv.k, 7).transpose(0, 1))
    assert torch.equal(v[12:21], stored.kv.v.transpose(0, 1))


def test_an_observer_sees_every_key_and_ends_the_pass(loader):
    seen = []

    def observe(view):
        seen.append((view.layer, view.q.shape[0], [item.span for item in view.loaded]))
        torch.testing.assert_close(view.keys[:, 21:], view.k.transpose(0, 1))
        assert view.key_positions.tolist() == list(range(24))
        return view.layer == 1

    run(loader, observe=observe, stage="probe_ms")
    assert seen == [(0, 3, list(SPANS)), (1, 3, list(SPANS))]
    assert kv(loader, 1, 5)[0].any() and not kv(loader, 2)[0][5:12].any()


def test_positions_without_a_key_come_after_every_query(loader):
    def observe(view):
        assert (view.key_positions[5:12] > 10**6).all() and view.key_positions[12:].tolist() == list(range(12, 24))
        return True

    run(loader, spans_at=lambda _: (A_SPAN, S_SPAN), observe=observe)


def test_a_pass_that_is_not_flushed_leaves_nothing_of_its_spans(loader):
    filler = BlockFiller(loader, job(), Report())
    before = kv(loader, 0)[1][12:21].clone()
    attend_in = filler.blocks
    filler.run(PassPlan(torch.arange(21, 24), lambda _: SPANS, attend_in=attend_in, flush=False))
    is_left_alone = torch.equal(kv(loader, 0)[1][12:21], before)
    assert filler.is_transient(attend_in) == filler.is_separate == is_left_alone


def test_tokens_of_a_loaded_span_attend_to_each_other_in_the_model_s_blocks(loader):
    positions, found = torch.tensor([13, 14, 18, 21, 22, 23]), []
    for is_own in (False, True):
        for layer in loader.forward.layers:
            layer.kv_cache.fill_(-1)
        filler = BlockFiller(loader, job(), Report())
        filler.run(PassPlan(positions, lambda _: SPANS, attend_in=filler.paged if is_own else None))
        found.append([x for layer in range(NUM_LAYERS) for x in kv(loader, layer)])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_what_vllm_s_prefix_cache_has_is_not_written(loader):
    for layer in loader.forward.layers:
        layer.kv_cache.fill_(-1)
    run(loader, num_prefix=8)
    k, v = kv(loader, 0)
    assert (k[:8] == -1).all() and (v[:8] == -1).all() and (v[8:] != -1).any(dim=-1).all()


def test_spans_can_be_loaded_from_one_layer_on(loader):
    for layer in loader.forward.layers:
        layer.kv_cache.fill_(-1)
    run(loader, spans_at=lambda layer: SPANS if layer >= 2 else ())
    assert (kv(loader, 1)[1][:21] == -1).all() and (kv(loader, 2)[1][:21] != -1).any(dim=-1).all()


def test_where_all_is_cached_nothing_is_computed(loader):
    num_forwards = len(loader.forward.num_computed)
    run(loader, positions=torch.arange(0))
    assert len(loader.forward.num_computed) == num_forwards and kv(loader, 2, 21)[0].any(dim=-1).all()


def test_a_trace_has_a_row_for_each_layer(loader):
    report = Report()
    report.stages.trace = []
    run(loader, report, stage="probe_ms")
    assert [(stage, layer) for stage, layer, _, _ in report.stages.trace] == [
        ("probe_ms", n) for n in range(NUM_LAYERS)
    ]
    assert all(begin < end for _, _, begin, end in report.stages.trace)


def test_a_missing_or_unfitting_span_is_named(loader):
    missing = Span(12, 21, "0" * 31 + "1", chunk_hash(ANCHOR))
    with pytest.raises(BadSpanError, match="layer 0 is missing") as error:
        run(loader, spans_at=lambda _: (A_SPAN, missing))
    assert error.value.span == missing and error.value.corrupt is None
    unfitting = Span(12, 20, S_SPAN.chunk_hash, S_SPAN.anchor_hash)
    with pytest.raises(BadSpanError, match=r"has shape \(2, 9, 8\), expected \(2, 8, 8\)") as error:
        run(loader, spans_at=lambda _: (A_SPAN, unfitting))
    assert error.value.corrupt == loader.key(unfitting)


def test_the_mean_shift_moves_the_other_tokens(loader):
    positions = torch.tensor([13, 15, 21, 22, 23])
    run(loader, positions=positions, shift=True)
    with loader.snapshot() as snapshot:
        stored = loader.read(snapshot, 0, S_SPAN).kv
    rotate, offsets = loader.forward.rotation.rotate, torch.tensor([1, 3])
    k, v = (x.transpose(0, 1) for x in kv(loader, 0))
    fresh = [rotate(k[:, [13, 15]], -torch.tensor([13, 15])), v[:, [13, 15]]]
    cached = [rotate(stored.k[:, offsets], -(5 + offsets)), stored.v[:, offsets]]
    changes = torch.stack([new - old for new, old in zip(fresh, cached, strict=True)])
    ((mean_k, mean_v),) = mean_shifts(changes, averaging([2]))
    weight = shift_weights(torch.ones(9), Recomputed([9], [offsets], torch.device("cpu")))[0]
    torch.testing.assert_close(v[:, 17], stored.v[:, 5] + weight * mean_v)
    moved = rotate(stored.k[:, 5:6], 7) + weight * rotate(mean_k[:, None], torch.tensor([17]))
    torch.testing.assert_close(k[:, 17:18], moved)


def test_a_span_without_recomputed_tokens_is_not_shifted(loader):
    with loader.snapshot() as snapshot:
        loaded = [loader.read(snapshot, 0, span) for span in SPANS]
    shift = MeanShift(loader, torch.tensor([13, 22]))
    k, v = torch.randn(2, 2, 2, 8)
    anchor, first, second = shift.shifts(loaded, k, v, loader.rotations[0])
    assert anchor is None and first is None and second is not None
    assert MeanShift(loader, torch.tensor([22])).shifts(loaded, k[:1], v[:1], None) == [None] * 3


@pytest.mark.parametrize("slice_tokens", [1000, 4])
@pytest.mark.parametrize("policy", ["full", "query:1.0", "cacheblend:1.0", "epic:1.0", "guided:1.0"])
def test_recomputing_everything_is_exact(loader, policy, slice_tokens):
    report, num_steps = fuse(loader, policy, slice_tokens=slice_tokens)
    for layer, expected in enumerate(expected_kv()):
        torch.testing.assert_close(kv(loader, layer), expected, rtol=1e-4, atol=1e-4)
    assert report.policy == Policy.parse(policy) and report.problem is None
    assert (report.tokens.recomputed == (24 if policy == "full" else 12) and num_steps == 1) or slice_tokens == 4


def test_part_of_the_budget_recomputes_part_of_the_tokens(loader):
    report, _ = fuse(loader, "query:0.2")
    num_chosen = sum(end - start for start, end in report.tokens.recomputed_runs)
    assert 2 <= num_chosen <= 4  # of 21 cached tokens; never more, and fewer where gaps are filled
    assert (report.tokens.recomputed, report.tokens.reused) == (3 + num_chosen, 21 - num_chosen)
    assert all(12 <= start < end <= 21 for start, end in report.tokens.recomputed_runs)
    assert 0 < report.votes.covered < 1 and 0 < report.votes.evenness <= 1
    assert report.tokens.loaded == [(span.start, span.end, False) for span in SPANS]


def test_a_chunk_without_kv_is_computed_like_other_text(loader):
    loader.store.discard(loader.key(S_SPAN))
    report, _ = fuse(loader, "none")
    for layer, expected in enumerate(expected_kv()):  # anchor and first chunk are exact
        torch.testing.assert_close(kv(loader, layer), expected, rtol=1e-4, atol=1e-4)
    assert (report.chunks.missing, report.chunks.unusable) == (1, [S_SPAN.chunk_hash])
    assert report.problem == "1 of 3 chunks had no usable KV in the store"


def test_with_most_of_the_prompt_uncached_a_vote_does_not_pay(loader):
    report, _ = fuse(loader, "query:0.2", spans=(A_SPAN,))
    assert report.policy.is_full and report.problem == "less than half of the prompt is cached"


def test_a_probe_that_others_would_wait_long_for_gives_way_to_a_prefill_in_slices(loader, monkeypatch):
    monkeypatch.setattr("ragkv.engine.fusion._MOST_PROBED", 2)
    for alone, is_full in ((True, False), (False, True)):
        report, _ = finish(Fusion(loader).fuse(job("query:0.2"), StepBudget(1000, alone)))
        assert report.policy.is_full == is_full
    assert report.problem == "3 tokens without KV are too many to probe while others wait"


def test_scores_are_those_of_a_plain_forward_when_all_is_recomputed(loader):
    task = ScoreTask(job("full").task, len(TOKENS), ((4, 5), (6,)))
    one = Job("r", task, [*TOKENS, 0, 0], BLOCKS, 0)
    steps = Fusion(loader).score(one, StepBudget(1000))
    with pytest.raises(StopIteration) as stop:
        next(steps)
    found = torch.frombuffer(bytearray(stop.value.value.logprobs[0]), dtype=torch.float32).view(2, -1)
    expected = TinyForward().logprobs([_piece([*TOKENS, 4])])[-2:]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


class Step:
    def __init__(self, jobs=(), aborted=(), num_others=0, num_scheduled=0):
        self.jobs, self.aborted = list(jobs), set(aborted)
        self.num_others, self.num_scheduled = num_others, num_scheduled
        self.saves = []


def test_a_fusion_goes_before_precomputing_and_means_come_last(loader):
    worker = WorkerSide(loader, 64)
    contexts = ((Span(5, 14, chunk_hash(SECOND), chunk_hash(ANCHOR)),),)
    mean = MeanTask(A_SPAN, F_SPAN, Span(5, 12, chunk_hash(FIRST), mean_hash(chunk_hash(ANCHOR), "", 2)), contexts)
    jobs = [Job("mean", mean, ANCHOR + FIRST + [0] * 9, BLOCKS, 0), *precompute_jobs(), job("none")]
    ended = []
    worker.step(Step(jobs))
    while len(ended) < 3:
        ended.append(worker.take_finished()[1])
        worker.step(Step())
    assert ended == [{"r"}, {one.request_id for one in precompute_jobs()}, {"mean"}]
    assert {id: report.failed for id, report in worker.take_reports().reports.items()} == dict.fromkeys(
        ["r", "mean", *(one.request_id for one in precompute_jobs())], False
    )
    assert loader.store.contains(loader.key(mean.span)) and not worker.take_bad_blocks()


@pytest.mark.parametrize(("tokens", "other"), [(FIRST, SECOND), (SECOND, FIRST)])
def test_a_mean_is_what_prefill_computes_whoever_attends(loader, tokens, other):
    """Our kernel attends for `FIRST`, where blocks are separate, else the model: torch's pays for few tokens only."""
    start = 5 + len(other)
    before = Span(5, start, chunk_hash(other), chunk_hash(ANCHOR))
    alone = Span(5, 5 + len(tokens), chunk_hash(tokens), chunk_hash(ANCHOR))
    mean = replace(alone, anchor_hash=mean_hash(chunk_hash(ANCHOR), "", 3))
    task = MeanTask(A_SPAN, alone, mean, ((before,), (before,)))
    worker = WorkerSide(loader, 64)
    worker.step(Step([Job("mean", task, ANCHOR + tokens + [0] * 9, BLOCKS, 0)]))
    while worker.take_finished()[1] is None:
        worker.step(Step())
    for layer, (k, v) in enumerate(expected_kv(ANCHOR + other + tokens)):
        k = loader.forward.rotation.rotate(k[start:].transpose(0, 1), 5 - start)
        torch.testing.assert_close(loader_kv(loader, mean, layer), (k, v[start:].transpose(0, 1)), rtol=1e-4, atol=1e-4)


def joined(loader, span):
    """Have the span's chunk averaged behind the other one, in place of its entry after the anchor alone."""
    alone = replace(span, mean_hash=mean_hash(span.anchor_hash, "", 2, joins=True))
    (tokens, other) = (FIRST, S_SPAN) if span.chunk_hash == F_SPAN.chunk_hash else (SECOND, F_SPAN)
    alone = replace(alone, start=5, end=5 + len(tokens))
    other = replace(other, start=5, end=5 + other.end - other.start, mean_hash=alone.mean_hash)
    mean = replace(alone, anchor_hash=alone.mean_hash, mean_hash="")
    worker = WorkerSide(loader, 64)
    worker.step(Step([Job("mean", MeanTask(A_SPAN, alone, mean, ((other,),)), ANCHOR + tokens + [0] * 9, BLOCKS, 0)]))
    while worker.take_finished()[1] is None:
        worker.step(Step())
    return alone, mean


def test_a_joined_mean_takes_the_place_of_the_chunks_entry_and_gives_its_kv_back(loader):
    expected = [loader_kv(loader, F_SPAN, layer) for layer in range(NUM_LAYERS)]
    alone, mean = joined(loader, F_SPAN)
    assert not loader.store.contains(loader.key(alone)) and loader.has(alone) and loader.find(alone) == loader.key(mean)
    for layer, (k, v) in enumerate(expected):
        found_k, found_v = loader_kv(loader, alone, layer)
        mean_k, mean_v = loader_kv(loader, mean, layer)
        assert (found_k - k).norm() <= (mean_k - k).norm() and (found_v - v).norm() <= (mean_v - v).norm()
    last = loader_kv(loader, alone, NUM_LAYERS - 1)[1]
    assert (last - expected[-1][1]).norm() < 0.7 * (loader_kv(loader, mean, NUM_LAYERS - 1)[1] - expected[-1][1]).norm()


def test_a_chunk_whose_entry_was_joined_still_stands_before_others(loader):
    joined(loader, F_SPAN)
    alone, _ = joined(loader, S_SPAN)
    assert loader.has(alone) and not loader.store.contains(loader.key(alone))


@pytest.mark.parametrize("policy", ["none", "guided:0.3", "query-std:0.3", "cacheblend:0.3", "cacheblend-k:0.3"])
def test_means_in_4_bits_are_fused_like_the_numbers_that_they_stand_for(loader, policy):
    loader.store.codec = INT4
    (first, entry), (_, mean) = joined(loader, F_SPAN), joined(loader, S_SPAN)
    spans = (A_SPAN, first, replace(mean, start=12, end=21))
    found, fused = fuse(loader, policy, spans)[0], [kv(loader, layer) for layer in range(NUM_LAYERS)]
    loader.store.codec = RAW
    for key in map(loader.key, (entry, mean)):
        with loader.snapshot() as snapshot:
            layers = [snapshot.get(key, layer).map(torch.clone) for layer in range(NUM_LAYERS)]
        assert all(each.k.dtype == torch.uint8 for each in layers)
        same = [replace(LayerKV(*x.mean().decoded(), 5, x.v_std), difference=x.difference) for x in layers]
        loader.store.put([(key, same)])
    assert fuse(loader, policy, spans)[0].tokens.recomputed_runs == found.tokens.recomputed_runs
    for layer, expected in enumerate(fused):
        torch.testing.assert_close(kv(loader, layer), expected, rtol=1e-4, atol=1e-4)


def test_a_damaged_joined_entry_is_discarded_and_the_chunk_computed(loader):
    alone, mean = joined(loader, F_SPAN)
    path = loader.store.entries.path(loader.key(mean))
    data = bytearray(path.read_bytes())
    data[ALIGNMENT + 200] ^= 1  # in the first record
    path.write_bytes(data)
    report, _ = fuse(loader, spans=(A_SPAN, alone, S_SPAN))
    assert report.chunks.corrupt == 1 and report.chunks.unusable == [FIRST_HASH] and not loader.has(alone)


def test_beside_requests_that_decode_chunks_are_precomputed_by_slices(loader):
    worker = WorkerSide(loader, 64)
    jobs = [Job(str(i), PrecomputeTask(A_SPAN), ANCHOR * 5, BLOCKS, 0) for i in range(5)]
    ended = []
    worker.step(Step(jobs, num_others=3, num_scheduled=40))
    while sum(map(len, ended)) < 5:
        ended.append(worker.take_finished()[1])
        worker.step(Step(num_others=3, num_scheduled=40))
    assert ended == [{"0", "1"}, {"2", "3"}, {"4"}]


@pytest.mark.parametrize(("seconds", "ended"), [(60.0, [{"0", "1", "2"}]), (0.0, [{"0"}, {"1"}, {"2"}])])
def test_exact_kv_of_as_many_requests_is_loaded_in_a_step_as_it_has_time_for(loader, monkeypatch, seconds, ended):
    monkeypatch.setattr("ragkv.engine.worker._LOADS_S", seconds)
    caches = [layer.kv_cache for layer in loader.forward.layers]
    for cache in caches:
        cache.normal_()
    before, held = [cache.clone() for cache in caches], HeldKV(loader.forward, num_blocks=40)
    for number in range(3):
        held.hold(Hold(str(number), BLOCKS[2 * number :][:2], 8))
    for cache in caches:
        cache.zero_()
    worker = WorkerSide(loader, 64, held=held)
    loads = [Job(str(number), None, [1] * 8, BLOCKS[2 * number :][:2], 0, held=8) for number in range(3)]
    found, jobs = [], [*loads, job("none")]
    while len(found) < len(ended):
        worker.step(Step(jobs, num_others=3, num_scheduled=40))
        found.append(worker.take_finished()[1])
        jobs = []
    assert found == ended
    for cache, expected in zip(caches, before, strict=True):
        assert torch.equal(cache[:, BLOCKS[:6]], expected[:, BLOCKS[:6]])
    worker.step(Step())
    assert worker.take_finished()[1] == {"r"}


def test_what_others_compute_between_two_steps_isnt_time_of_a_load(loader, monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("ragkv.engine.exact.time", SimpleNamespace(perf_counter=lambda: clock.now))
    exact = ExactKV(loader, loader.store, 0)
    load_span = exact._load

    def load(*args):
        clock.now += 0.002
        load_span(*args)

    monkeypatch.setattr(exact, "_load", load)
    loading = exact.load(Job("r", None, TOKENS, BLOCKS, 0, SPANS), StepBudget(64, alone=False))
    for _ in SPANS[:-1]:
        next(loading)
        clock.now += 1.0
    ms, _ = finish(loading)
    assert ms == pytest.approx(2 * len(SPANS))


def test_a_fault_of_ours_leaves_the_request_to_vllm(loader, caplog):
    worker = WorkerSide(loader, 64)
    loader.store.contains = lambda key: (_ for _ in ()).throw(StoreError("the disk is on fire"))
    worker.step(Step([job(num_prefix=BLOCK_SIZE)]))
    assert worker.take_finished()[1] == {"r"} and worker.take_bad_blocks() == set(BLOCKS[1:])
    report = worker.take_reports().reports["r"]
    assert report.failed and report.problem == "the disk is on fire"
    assert worker.take_finished()[1] is None and not worker.take_reports()


def test_an_aborted_job_is_dropped_wherever_it_waits(loader):
    worker = WorkerSide(loader, 64)
    jobs = [*precompute_jobs(), job("none")]
    worker.step(Step(jobs, aborted={one.request_id for one in jobs}))
    assert worker.take_finished()[1] == {one.request_id for one in jobs} and not worker.take_reports()


def test_runs_and_slices_of_positions():
    assert runs_of(torch.tensor([1, 2, 3, 7, 9, 10])) == [(1, 4), (7, 8), (9, 11)] and runs_of(torch.arange(0)) == []
    selected = torch.tensor([3, 12, 14, 20, 22])
    assert [end_of_slice(selected, end, SPANS) for end in (1, 2, 3, 4, 5)] == [1, 4, 4, 4, 5]
    assert covered(8, torch.tensor([7]), [A_SPAN]).tolist() == [True] * 5 + [False, False, True]


def test_exactness_ends_after_the_first_chunk():
    tokens = list(range(30))
    assert exact_until(SPANS, tokens) == 12 and exact_until([A_SPAN, S_SPAN], tokens) == 5
    assert exact_until(SPANS[1:], tokens) == 5  # what is computed before it


def test_a_chunk_is_exact_behind_the_beginning_that_it_was_precomputed_after():
    tokens = list(range(30))
    behind = Span(7, 15, "c", chunk_hash(tokens[:7]))
    assert exact_until([behind, Span(15, 20, "d", "mean")], tokens) == 15
    assert exact_until([replace(behind, anchor_hash="mean")], tokens) == 7
    assert exact_until([replace(behind, start=9, offset=2, num_tokens=8)], tokens) == 7
    assert exact_until([], tokens) == 0


@pytest.mark.parametrize("policy", ["none", "query:0.3"])
def test_a_long_beginning_is_computed_once_and_counts_for_nothing(loader, monkeypatch, policy):
    monkeypatch.setattr(fusion, "_LONG_BEGINNING", 8)
    beginning, length = ANCHOR + FIRST, len(ANCHOR + FIRST)
    span = Span(length, 21, chunk_hash(SECOND), chunk_hash(beginning))
    Precompute(loader).precompute([Job("b", PrecomputeTask(span), beginning + SECOND, BLOCKS, 0)])
    for layer in loader.forward.layers:
        layer.kv_cache.zero_()
    loader.forward.num_computed.clear()
    report, _ = fuse(loader, policy, spans=(span,))
    assert report.problem is None and loader.forward.num_computed[0] == length
    assert sum(loader.forward.num_computed[1:]) <= 2 * 3  # the question, by each pass: the chunk is exact there
    assert report.tokens.recomputed == length + 3 and report.tokens.reused == 9
    for layer, expected in enumerate(expected_kv()):
        for found, wanted in zip(kv(loader, layer), expected, strict=True):
            torch.testing.assert_close(found, wanted[:24])


@pytest.mark.parametrize("slice_tokens", [1000, 4])
@pytest.mark.parametrize("policy, is_kept", [("query:0.2", True), ("guided:0.2", True), ("query:0.3", False)])
def test_what_has_no_kv_before_the_last_chunk_is_computed_by_the_probe(loader, policy, is_kept, slice_tokens):
    again = Span(23, 30, F_SPAN.chunk_hash, F_SPAN.anchor_hash)
    tokens, blocks = [*ANCHOR, *FIRST, *SECOND, 40, 41, *FIRST, *QUESTION], [*BLOCKS, 4, 6]

    def computed(policy, slice_tokens):
        loader.forward.num_computed.clear()
        for layer in loader.forward.layers:
            layer.kv_cache.zero_()
        task = FuseTask((*SPANS, again), Policy.parse(policy))
        report, _ = finish(Fusion(loader).fuse(Job("r", task, tokens, blocks, 0), StepBudget(slice_tokens)))
        assert report.problem is None
        return report, [loader.forward.read(layer, len(tokens), blocks) for layer in range(NUM_LAYERS)]

    _, probed = computed("none", 1000)
    _, at_once = computed(policy, 1000)
    report, found = computed(policy, slice_tokens)
    num_chosen = sum(end - start for start, end in report.tokens.recomputed_runs)
    assert report.tokens.recomputed == 5 + num_chosen
    probe, *rest = loader.forward.num_computed
    assert probe == 5 and sum(rest) == num_chosen + (3 if is_kept else 5)
    for layer in range(NUM_LAYERS):
        torch.testing.assert_close(found[layer], at_once[layer], rtol=1e-4, atol=1e-4)
        same = torch.allclose(found[layer][1][21:23], probed[layer][1][21:23], atol=1e-5)
        assert same == (is_kept or layer < 2)  # KV of the first layer is exact, and so what the second makes of it


def test_what_is_staged_is_what_the_store_has_in_memory(tmp_path):
    """On CUDA a whole entry is copied in parts; a layer is used as soon as its own part is there."""
    forward = TinyForward()
    store = DiskStore(tmp_path, codec="int8", memory_bytes=1 << 24)
    loader = KVLoader(forward, [forward.rotation] * NUM_LAYERS, store, "f" * 32, choose("torch", forward.device))
    for one in precompute_jobs():
        Precompute(loader).precompute([one])
    key = loader.key(F_SPAN)
    store.touch([key])
    waited = []
    with loader.snapshot() as snapshot:
        layers = [snapshot.get(key, layer) for layer in range(NUM_LAYERS - 1)]
        assert snapshot.whole(key) is None
        layers.append(snapshot.get(key, NUM_LAYERS - 1))
        whole = snapshot.whole(key)
        parts = CopiedParts(SimpleNamespace(wait_event=waited.append))
        staged = StagedEntry(whole, forward.device, parts)
        for part in range(PARTS):
            parts.copied.append(part)
            staged.copy(whole.memory, part)
        assert not staged.has(layers[0].map(torch.clone))
        for kv in layers:
            assert staged.has(kv)
            copy = staged.layer(kv)
            assert copy.k.data_ptr() != kv.k.data_ptr()
            for name in ("k", "v", "k_scale", "v_scale"):
                assert torch.equal(getattr(copy, name), getattr(kv, name))
            end = kv.v.data_ptr() + kv.v.nbytes - whole.memory.data_ptr()
            assert (waited[-1] + 1) * len(whole.memory) // PARTS >= end
    assert len(set(waited)) == len(waited) == NUM_LAYERS
    store.put([(key, [kv.map(torch.clone) for kv in store_raw(layers)])])
    with loader.snapshot() as snapshot:
        assert snapshot.whole(key) is None
    store.close()


def store_raw(layers):
    return [LayerKV(*kv.decoded(), kv.base_position) for kv in layers]
