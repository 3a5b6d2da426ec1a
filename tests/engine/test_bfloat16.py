"""Fusion in bfloat16, of a model with random weights, with KV from the disk and from memory.

`evals/gpu.sh` runs it on CUDA, where what is in memory is copied to the device ahead.
"""

import random

import numpy as np
import pytest
import torch
import transformers
from engine_harness import Harness, lay_out

pytestmark = pytest.mark.engine

CONFIG = transformers.LlamaConfig(
    vocab_size=1024,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=4096,
    initializer_range=0.12,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
CONTINUATION = [11, 12, 13, 14]


@pytest.fixture(scope="module")
def harness(runner, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bfloat16")
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16).save_pretrained(folder / "model")
    harness = Harness(
        runner,
        folder / "model",
        folder / "kv",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        store_options={"memory_bytes": 1 << 28},
    )
    yield harness
    harness.close()


@pytest.fixture(scope="module")
def parts(harness):
    numbers = random.Random(3)
    tokens = [numbers.randrange(3, CONFIG.vocab_size) for _ in range(2500)]
    anchor, question = tokens[:20], tokens[-12:]
    chunks = [tokens[20 + i * 300 : 320 + i * 300] for i in range(6)]
    harness.precompute(anchor, chunks)
    return anchor, chunks, question


def rows(harness, parts, policy):
    """Log-probabilities `[m, V]` after the prompt, and how many of its spans' KV was in memory."""
    token_ids, task = lay_out(*parts, policy)
    (logprobs,), report = harness.run(harness.engine.score(token_ids, task, [CONTINUATION]))
    assert report.chunks.missing == report.chunks.corrupt == 0
    return logprobs.astype(np.float64), sum(in_memory for *_, in_memory in report.tokens.loaded)


def kl(exact, found):
    return float((np.exp(exact) * (exact - found)).sum(-1).mean())


def test_from_disk_or_memory_it_is_the_same_and_all_recomputed_it_is_exact(harness, parts):
    assert harness.engine.unsupported is None
    exact, _ = rows(harness, parts, "full")
    from_disk, num_in_memory = rows(harness, parts, "guided:0.1")
    assert num_in_memory == 0
    from_memory, num_in_memory = rows(harness, parts, "guided:0.1")
    assert num_in_memory == 1 + len(parts[1])
    np.testing.assert_allclose(from_memory, from_disk, atol=1e-3)
    drift = {policy: kl(exact, rows(harness, parts, policy)[0]) for policy in ("none", "query:1.0", "guided:1.0")}
    assert drift["query:1.0"] < 0.1 * drift["none"] and drift["guided:1.0"] < 0.1 * drift["none"]
    assert drift["query:1.0"] < 0.02
