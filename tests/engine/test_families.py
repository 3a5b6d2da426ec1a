"""Fusion without a line of per-model code: tiny random-weight models of other families, in float32."""

import random
from importlib.util import find_spec

import pytest
import torch
import transformers
from engine_harness import Harness, lay_out
from forked_engines import CONTEXTS, SPAWNING
from test_preemption import preemptions

pytestmark = pytest.mark.engine

SIZES = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 512}
FUSED = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "llama-3.1-rope": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE),
    "llama-yarn": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=YARN_ROPE),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES),
    "gemma2": lambda: transformers.Gemma2Config(**SIZES, sliding_window=64, query_pre_attn_scalar=32),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
}
UNFUSED = {
    "mistral-window": (lambda: transformers.MistralConfig(**SIZES, sliding_window=64), "SlidingWindowSpec"),
    "gpt2": (
        lambda: transformers.GPT2Config(vocab_size=512, n_positions=2048, n_embd=128, n_layer=2, n_head=4),
        "don't follow its rotary table",
    ),
}


def start(runner, config, folder, **engine_args):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder / "model")
    return Harness(runner, folder / "model", folder / "kv", skip_tokenizer_init=True, **engine_args)


def parts():
    numbers = random.Random(3)
    tokens = [numbers.randrange(3, 512) for _ in range(1200)]
    return tokens[:20], [tokens[20 + i * 150 : 170 + i * 150] for i in range(4)], tokens[1000:1012]


def assert_same(found, expected):
    assert found.token_ids == expected.token_ids
    assert found.chosen_logprobs() == pytest.approx(expected.chosen_logprobs(), abs=2e-3)


def check_behind_a_fused_prefix(harness, anchor, chunks, question):
    """A conversation goes on: what vLLM kept of its first prompt is what fusion left there, and not what is stored."""
    found = []
    for own in (True, False):
        harness.tell("use_own_attention", own)
        harness.ask_now(*lay_out(anchor, chunks[:2], question, "query+shift:0.2"), salt=f"goes on {own}")
        harness.tell("places")
        found.append(harness.ask_now(*lay_out(anchor, chunks, question, "query:0.2"), salt=f"goes on {own}"))
        assert found[-1].report.tokens.prefix > len(anchor) + len(chunks[0])
        assert harness.tell("places") == (["PagedBlocks", "PagedBlocks"] if own else [])
    assert_same(*found)


@pytest.mark.parametrize("family", FUSED)
def test_exact_where_it_must_be(runner, tmp_path, family):
    harness = start(runner, FUSED[family](), tmp_path, worker_extension_cls="engine_harness.Switchable")
    try:
        assert harness.engine.unsupported is None
        anchor, chunks, question = parts()
        harness.precompute(anchor, chunks)
        token_ids, _ = lay_out(anchor, chunks, question, "none")
        exact = harness.ask_now(token_ids)
        for policy in ("full", "query:1.0"):
            assert_same(harness.ask_now(*lay_out(anchor, chunks, question, policy)), exact)
        one, task = lay_out(anchor, chunks[:1], question, "none")
        assert_same(harness.ask_now(one, task), harness.ask_now(one))
        for policy in ("query:0.2", "query+shift:0.2", "cacheblend:0.2", "cacheblend-k:0.2", "epic:0.2"):
            some = harness.ask_now(*lay_out(anchor, chunks, question, policy))
            assert some.report.problem is None and 0 < some.report.tokens.recomputed < 0.25 * len(token_ids)
            harness.tell("use_own_attention", False)
            assert_same(some, harness.ask_now(*lay_out(anchor, chunks, question, policy)))
            harness.tell("use_own_attention", True)
            harness.tell("use_slices_of", 30)
            harness.tell("places")
            assert_same(some, harness.ask_now(*lay_out(anchor, chunks, question, policy)))
            assert harness.tell("places")[-2:] == ["PagedBlocks", "PagedBlocks"]
            harness.tell("use_slices_of", None)
        check_behind_a_fused_prefix(harness, anchor, chunks, question)
    finally:
        harness.close()


@pytest.mark.skipif(find_spec("triton") is None, reason="triton isn't installed")
def test_the_passes_that_cuda_gets_answer_the_same(runner, tmp_path, monkeypatch):
    """Triton's kernels, interpreted, in vLLM's own blocks."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # which Triton reads when it is imported
    monkeypatch.setitem(CONTEXTS, "spawn", SPAWNING)
    extension = "engine_harness.Switchable"
    harness = start(runner, FUSED["llama"](), tmp_path, kernels="triton", worker_extension_cls=extension)
    try:
        anchor, chunks, question = parts()
        chunks = [chunk[:60] for chunk in chunks[:3]]
        harness.precompute(anchor, chunks)
        for policy in ("none", "query:0.2", "query+shift:0.2", "cacheblend:0.2"):
            expected = harness.ask_now(*lay_out(anchor, chunks, question, policy))
            harness.tell("use_blocks_of_vllm", True)
            for slice_tokens in (None, 30) if "shift" in policy else (None,):
                harness.tell("use_slices_of", slice_tokens)
                harness.tell("places")
                found = harness.ask_now(*lay_out(anchor, chunks, question, policy))
                assert_same(found, expected)
                assert found.report.tokens.recomputed_runs == expected.report.tokens.recomputed_runs
                assert set(harness.tell("places")) == {"PagedBlocks"}
            harness.tell("use_slices_of", None)
            harness.tell("use_blocks_of_vllm", False)
    finally:
        harness.close()


@pytest.mark.parametrize("family", UNFUSED)
def test_what_cannot_be_fused_is_prefilled_in_full_and_says_why(runner, tmp_path, family, caplog):
    config, reason = UNFUSED[family]
    with caplog.at_level("WARNING", logger="ragkv"):
        harness = start(runner, config(), tmp_path)
    try:
        assert reason in harness.engine.unsupported
        assert len([record for record in caplog.records if reason in record.getMessage()]) == 1
        anchor, chunks, question = parts()
        token_ids, task = lay_out(anchor, chunks, question, "query:0.2")
        found = harness.ask_now(token_ids, task)
        assert found.report is None
        assert_same(found, harness.ask_now(token_ids))
        assert harness.engine.counters == {f"full_prefill: {harness.engine.unsupported}": 1}
    finally:
        harness.close()


def test_preempted_requests_and_a_restarted_engine_answer_the_same(runner, tmp_path):
    anchor, chunks, question = parts()
    requests = [lay_out(anchor, random.Random(i).sample(chunks, 4), question, "query:0.2") for i in range(6)]
    harness = start(runner, FUSED["llama"](), tmp_path)
    harness.precompute(anchor, chunks)
    expected = [harness.ask_now(*request, max_tokens=60) for request in requests]
    harness.close()
    # 16 blocks of 128 tokens: three requests of 632 tokens have 15 and want 18, so that others wait or are preempted
    small = Harness(
        runner,
        tmp_path / "model",
        tmp_path / "kv",
        skip_tokenizer_init=True,
        num_gpu_blocks_override=16,
        max_model_len=1500,
        disable_log_stats=False,
    )
    try:

        async def together():
            import asyncio

            return await asyncio.gather(*(small.ask(*request, max_tokens=60) for request in requests))

        before = preemptions()
        for found, alone in zip(small.run(together()), expected, strict=True):
            assert_same(found, alone)
        assert preemptions() > before
    finally:
        small.close()
