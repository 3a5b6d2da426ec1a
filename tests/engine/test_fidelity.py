"""Every policy, averaged contexts and the evaluation of both, on the real SmolLM2 through real vLLM, in float32."""

import asyncio
import copy
import functools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from engine_harness import CHUNK_TOKENS, FINGERPRINT, NUM_LAYERS, QUESTIONS, assert_same, lay_out

from ragkv.config import Config
from ragkv.engine.engine import Engine
from ragkv.engine.task import ROOT_HASH, FuseTask, MeanTask, Span
from ragkv.evals import datasets
from ragkv.evals.arms import Arm
from ragkv.evals.experiment import Progress
from ragkv.evals.workloads import quality
from ragkv.evals.workloads.quality_bench import Settings
from ragkv.policies import FULL, Policy
from ragkv.retriever.hashing import chunk_hash, mean_hash
from ragkv.store.disk_store import DiskStore
from ragkv.store.record import ChunkKey

pytestmark = pytest.mark.engine

NUM_CHUNKS, CAPTURES = 5, 4


@pytest.fixture(scope="module")
def chunks(harness, anchor, text):
    chunks = [text[i * CHUNK_TOKENS : (i + 1) * CHUNK_TOKENS] for i in range(NUM_CHUNKS)]
    harness.precompute(anchor, chunks)
    return chunks


def span_of(anchor, chunk, before=None):
    return Span(len(anchor), len(anchor) + len(chunk), chunk_hash(chunk), before or chunk_hash(anchor))


def averaging(harness, anchor, chunk, others, name):
    root = Span(0, len(anchor), chunk_hash(anchor), ROOT_HASH)
    """others: chunks, or lists of chunks one behind another."""
    contexts = []
    for other in others:
        context, end = [], len(anchor)
        for each in other if isinstance(other[0], list) else [other]:
            context.append(replace(span_of(anchor, each), start=end, end=(end := end + len(each))))
        contexts.append(tuple(context))
    task = MeanTask(root, span_of(anchor, chunk), span_of(anchor, chunk, name), tuple(contexts))
    return harness.engine.precompute([*anchor, *chunk], task)


def average(*args):
    args[0].run(averaging(*args))


def stored(harness, chunk, before):
    extra = harness.engine._llm.vllm_config.kv_transfer_config.kv_connector_extra_config
    store = DiskStore(Path(extra["store"]))
    key = ChunkKey(chunk_hash(chunk), before, FINGERPRINT, harness.engine.kv_heads)
    with store.snapshot() as snapshot:
        layers = [copy.deepcopy(snapshot.get(key, layer)) for layer in range(NUM_LAYERS)]
    store.close()
    return layers


@pytest.mark.parametrize(
    "policy", ["cacheblend:1", "cacheblend-k:1", "cacheblend-gradual:1", "epic:1", "query+shift:1", "epic+shift:1"]
)
def test_recomputing_everything_is_exact_whoever_chooses(harness, anchor, chunks, question, policy):
    token_ids, task = lay_out(anchor, chunks[:3], question, policy)
    found = harness.ask_now(token_ids, task)
    assert found.report.policy == Policy.parse(policy)
    assert found.report.tokens.reused == len(anchor) + CHUNK_TOKENS
    assert_same(found, harness.ask_now(token_ids))


@pytest.mark.parametrize(
    "policy", ["cacheblend", "cacheblend-k", "cacheblend-gradual", "epic", "query", "query+shift", "guided"]
)
def test_budgets_are_kept_and_what_is_exact_is_left(harness, anchor, chunks, question, policy):
    token_ids, task = lay_out(anchor, chunks, question, f"{policy}:0.1")
    report = harness.ask_now(token_ids, task, max_tokens=1).report
    cached = len(anchor) + NUM_CHUNKS * CHUNK_TOKENS
    recomputed = sum(end - start for start, end in report.tokens.recomputed_runs)
    assert recomputed == report.tokens.recomputed - (len(question) - 1)
    assert recomputed <= int(0.1 * cached)
    assert recomputed >= 0.08 * cached
    assert all(start >= len(anchor) + CHUNK_TOKENS for start, _ in report.tokens.recomputed_runs)


def test_a_larger_budget_covers_more_of_the_questions_attention(harness, anchor, chunks, question):
    covered = []
    for policy in ("query:0.02", "query:0.2", "query:1", "epic:0.2"):
        token_ids, task = lay_out(anchor, chunks, question, policy)
        covered.append(harness.ask_now(token_ids, task, max_tokens=1).report.votes.covered)
    assert 0.02 < covered[0] < covered[1] < covered[2] == pytest.approx(1)
    assert covered[3] is None


def test_the_evenness_of_the_votes_is_reported(harness, anchor, chunks, question):
    token_ids, task = lay_out(anchor, chunks, question, "query+shift:0.05")
    report = harness.ask_now(token_ids, task, max_tokens=1).report
    assert (report.policy, report.problem) == (task.policy, None)
    assert 0.3 < report.votes.evenness < 0.98


def test_epic_recomputes_the_heads(harness, anchor, chunks, question):
    token_ids, task = lay_out(anchor, chunks[:3], question, "epic:0.05")
    runs = harness.ask_now(token_ids, task, max_tokens=1).report.tokens.recomputed_runs
    assert [run[0] for run in runs] == [span.start for span in task.spans[2:]]


def test_scores_of_full_prefill_are_vllms_own(harness, anchor, chunks, question):
    token_ids, _ = lay_out(anchor, chunks[:3], question, "none")
    plain = harness.ask_now(token_ids, max_tokens=12, logprobs=-1)
    task = FuseTask((), FULL)
    other = [5, 6, 7]
    (rows, other_rows), _ = harness.run(harness.engine.score(token_ids, task, (plain.token_ids, other)))
    expected = np.array([[step[t] for t in range(rows.shape[1])] for step in plain.logprobs])
    assert rows.shape == expected.shape
    np.testing.assert_allclose(rows, expected, atol=2e-3)
    assert other_rows.shape == (3, rows.shape[1])
    np.testing.assert_allclose(other_rows[0], rows[0], atol=2e-3)


def test_scores_where_the_prefix_cache_has_it_all(harness, text):
    block_size = harness.engine._llm.vllm_config.cache_config.block_size
    token_ids = text[: block_size - 15]  # with 16 more, all but the last token is one block
    greedy = harness.ask_now(token_ids, max_tokens=20, salt="shared").token_ids[:16]
    scored = harness.engine.score(token_ids, FuseTask((), FULL), (greedy,), salt="shared")
    (rows,), _ = harness.run(scored)
    assert list(rows.argmax(1)) == greedy


def test_shifts_are_the_same_in_slices(harness, anchor, chunks, question):
    token_ids, task = lay_out(anchor, chunks, question, "query+shift:0.4")
    alone = harness.ask_now(token_ids, task)
    assert alone.report.tokens.recomputed > 256

    async def beside_a_decode():
        other = asyncio.create_task(harness.ask(token_ids[:200], max_tokens=60))
        await asyncio.sleep(0.3)
        return await harness.ask(token_ids, task), await other

    found, _ = harness.run(beside_a_decode())
    assert_same(found, alone)


def test_an_average_over_nothing_else_is_the_capture_itself(harness, anchor, chunks):
    name = mean_hash(chunk_hash(anchor), "test", 1)
    average(harness, anchor, chunks[0], [], name)
    for found, expected in zip(
        stored(harness, chunks[0], name), stored(harness, chunks[0], chunk_hash(anchor)), strict=True
    ):
        np.testing.assert_allclose(found.k, expected.k, atol=1e-5)
        np.testing.assert_allclose(found.v, expected.v, atol=1e-5)
        assert float(found.v_std.max()) < 1e-2


def test_an_average_is_the_mean_of_what_prefill_computes(harness, anchor, chunks):
    """Precomputed by hand: the chunk behind the anchor, and as the tail of one chunk with another before it."""
    name = mean_hash(chunk_hash(anchor), "test", 2)
    average(harness, anchor, chunks[1], [chunks[2]], name)
    before = [*anchor, *chunks[2]]
    harness.precompute(before, [chunks[1]])
    alone = stored(harness, chunks[1], chunk_hash(anchor))
    behind = stored(harness, chunks[1], chunk_hash(before))
    for found, a, b in zip(stored(harness, chunks[1], name), alone, behind, strict=True):
        assert found.base_position == len(anchor)
        np.testing.assert_allclose(found.v, (a.v + b.v) / 2, atol=2e-4)
        v_std = ((a.v - b.v) / 2).square().sum((0, 2)).sqrt()
        np.testing.assert_allclose(found.v_std, v_std, atol=2e-2, rtol=2e-2)
    first, a, b = stored(harness, chunks[1], name)[0], alone[0], behind[0]
    np.testing.assert_allclose(a.k, first.k, atol=2e-3)  # the first layer's keys depend on their position alone
    assert not np.allclose(a.k, b.k, atol=1e-2)


def test_of_two_contexts_or_more_the_capture_by_itself_is_no_part(harness, anchor, chunks):
    name = mean_hash(chunk_hash(anchor), "test", 3)
    average(harness, anchor, chunks[1], [chunks[2], chunks[0]], name)
    behind = []
    for other in (chunks[2], chunks[0]):
        harness.precompute([*anchor, *other], [chunks[1]])
        behind.append(stored(harness, chunks[1], chunk_hash([*anchor, *other])))
    for found, a, b in zip(stored(harness, chunks[1], name), *behind, strict=True):
        np.testing.assert_allclose(found.v, (a.v + b.v) / 2, atol=2e-4)
        np.testing.assert_allclose(found.v_std, ((a.v - b.v) / 2).square().sum((0, 2)).sqrt(), atol=2e-2, rtol=2e-2)


def test_a_context_may_be_several_chunks(harness, anchor, chunks):
    """The second one's KV is as it was precomputed, directly after the anchor, at the place where it stands now."""
    name = mean_hash(chunk_hash(anchor), "several", 3)
    average(harness, anchor, chunks[1], [[chunks[2], chunks[0]], [chunks[3], chunks[2], chunks[0]]], name)
    exact = []
    for others in ([chunks[2], chunks[0]], [chunks[3], chunks[2], chunks[0]]):
        before = [*anchor, *[token for chunk in others for token in chunk]]
        harness.precompute(before, [chunks[1]])
        exact.append(stored(harness, chunks[1], chunk_hash(before)))
    alone = stored(harness, chunks[1], chunk_hash(anchor))

    def distance(layers):
        return sum(float((a.v - (b.v + c.v) / 2).square().sum()) for a, b, c in zip(layers, *exact, strict=True))

    found = stored(harness, chunks[1], name)
    assert {layer.base_position for layer in found} == {len(anchor)}
    assert distance(found) < 0.1 * distance(alone)
    np.testing.assert_allclose(found[1].v, (exact[0][1].v + exact[1][1].v) / 2, atol=0.05)


def test_a_chunk_gone_is_left_out_of_an_average(harness, anchor, chunks, text):
    name = mean_hash(chunk_hash(anchor), "test", 3)
    average(harness, anchor, chunks[3], [text[7000:7100], chunks[2]], name)
    average(harness, anchor, chunks[3], [chunks[2]], expected := mean_hash(chunk_hash(anchor), "test", 2))
    for found, wanted in zip(stored(harness, chunks[3], name), stored(harness, chunks[3], expected), strict=True):
        np.testing.assert_allclose(found.k, wanted.k, atol=1e-5)


def test_averages_made_together_are_those_made_alone(harness, anchor, chunks, text):
    alone, together = (mean_hash(chunk_hash(anchor), name, 3) for name in ("alone", "together"))
    others = {i: [chunks[(i + 1) % 4], text[7000:7100], chunks[(i + 2) % 4]][: 1 + i] for i in range(4)}
    for i in range(4):
        average(harness, anchor, chunks[i], others[i], alone)

    async def all_at_once():
        made = [asyncio.ensure_future(averaging(harness, anchor, chunks[i], others[i], together)) for i in range(4)]
        aborted = asyncio.ensure_future(averaging(harness, anchor, chunks[4], chunks[:3], together))
        decode = asyncio.ensure_future(harness.ask(text[:200], max_tokens=20))
        await asyncio.sleep(0.4)
        aborted.cancel()
        await asyncio.gather(*made, decode)

    harness.run(all_at_once())
    for i in range(4):
        for found, wanted in zip(stored(harness, chunks[i], together), stored(harness, chunks[i], alone), strict=True):
            np.testing.assert_allclose(found.k, wanted.k, atol=1e-3)
            np.testing.assert_allclose(found.v, wanted.v, atol=1e-3)
            np.testing.assert_allclose(found.v_std, wanted.v_std, atol=2e-2, rtol=2e-2)


@pytest.fixture
def own_dataset(tmp_path, layout, text):
    """Prose that everybody has, and questions of it."""
    rows = []
    for i, asked in enumerate(QUESTIONS[:3]):
        pieces = [text[start : start + 160] for start in range(900 * i, 900 * i + 640, 160)]
        chunks = [layout._tokenizer.decode(piece) + "\n\n" for piece in pieces]
        rows.append({"question": asked, "answers": ["the exception is handled by an except clause"], "chunks": chunks})
    file = tmp_path / "own.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return datasets.load(str(file), None)


def evaluate(runner, smollm, dataset, policies, out):
    config = Config(home=smollm.parents[1], model={"dtype": "float32", "kv_cache_gib": 1})
    arms = [Arm.parse(text) for text in policies]
    settings = Settings(num_contexts=3, ttft_examples=1)
    return runner.run(quality.evaluate(config, dataset, arms, settings, out, Progress()))


@pytest.mark.long
def test_the_evaluation_ranks_and_resumes(runner, smollm, own_dataset, tmp_path, monkeypatch):
    """Also with a choice that is broken on purpose: it can't pass unnoticed."""
    out = tmp_path / "out" / "rows.jsonl"
    policies = ["full@anchor", "none@alone", "none@anchor", "query:0.15@anchor", "query+shift:0.15@mixed"]
    full, alone, none, query, near = evaluate(runner, smollm, own_dataset, policies, out)
    assert abs(full["kl"]) < 1e-5
    assert (full["agreement"], full["score"]) == (1.0, full["score_full"])
    assert alone["kl"] > none["kl"] > query["kl"] > near["kl"] > 1e-5
    assert full["baseline_ttft_ms"] > 0 < full["ttft_ms"]

    lines = out.read_text().splitlines()
    assert len(lines) == len(policies) * len(own_dataset.examples)
    out.write_text("\n".join(lines[:-1]) + "\n" + lines[-1][:40])  # killed while it wrote
    start = functools.partial(Engine.start, worker_extension_cls="engine_harness.WorstChoice")
    monkeypatch.setattr(Engine, "start", start)
    again = evaluate(runner, smollm, own_dataset, [*policies, "query:0.14@anchor"], out)
    assert len(out.read_text().splitlines()) == len(lines) + len(own_dataset.examples)
    assert [row["kl"] for row in again[:4]] == [row["kl"] for row in (full, alone, none, query)]
    worst = again[-1]
    assert worst["kl"] > 1.5 * query["kl"]
