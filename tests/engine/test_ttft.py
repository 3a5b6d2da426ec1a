"""`ragkv eval ttft` on a real engine."""

import shutil

import pytest
import transformers
from test_families import SIZES

from ragkv.config import Config, IndexConfig, ModelConfig
from ragkv.evals.experiment import Progress
from ragkv.evals.parameters import Ttft
from ragkv.evals.workloads import ttft
from ragkv.policies import Policy

pytestmark = pytest.mark.engine


def test_a_model_without_its_weights_is_timed(runner, smollm, tmp_path):
    folder = tmp_path / "model"
    transformers.LlamaConfig(**{**SIZES, "vocab_size": 49152}, architectures=["LlamaForCausalLM"]).save_pretrained(
        folder
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(smollm / name, folder)
    config = Config(
        home=tmp_path,
        model=ModelConfig(name=str(folder), dtype="float32", max_model_len=1024, kv_cache_gib=1),
        index=IndexConfig(chunk_tokens=128),
    )
    policies = (Policy.parse("guided:0.05"), Policy.parse("none"))
    wanted = Ttft((512,), policies, repeats=1, random_weights=True)

    async def measured():
        return [row async for row in ttft.run(config, wanted, Progress())]

    rows = runner.run(measured())
    assert [row["policy"] for row in rows] == ["guided", "none"]
    for row in rows:
        assert row["random_weights"] and row["tokens"] == row["reused_tokens"] + row["recomputed_tokens"] == 512
        assert row["ttft_ms"] > 0 and row["baseline_ttft_ms"] > 0
    assert rows[0]["recompute_ms"] > rows[1]["recompute_ms"] == 0
