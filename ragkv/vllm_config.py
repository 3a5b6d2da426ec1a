"""The configuration with which anybody's `vllm serve` finds a home's chunks in prompts (`ragkv.plain_vllm`)."""

from typing import Any

from ragkv import models
from ragkv.config import Config
from ragkv.home import Home
from ragkv.policies import Policy


def configuration(config: Config) -> dict[str, Any]:
    """Return what `vllm serve` is to be started with, as its configuration file has it.

    Raises RagKVError if the model isn't there.
    """
    model, home = config.model, Home(config.home)
    extra = {
        "home": str(home.path),
        "store": str(home.kv),
        "store_options": config.store.worker_options(),
        "prefixes": config.store.prefix_options(home.prefixes),
        "kernels": model.kernels,
        "preemption": model.preemption_options(),
        "joins": config.store.joins,
        "num_contexts": config.index.num_contexts,
        "learning": config.learning.model_dump(),
        "policy": Policy.of(config.answer.policy, config.answer.budget).label,
        "codec": config.store.codec,
        "controller": config.answer.controller,
    }
    connector = {
        "kv_connector": "RagKV",
        "kv_connector_module_path": "ragkv.plain_vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }
    limits = {} if model.max_model_len is None else {"max-model-len": model.max_model_len}
    folder = models.resolve(model.name, home.path)
    return {"model": str(folder), "dtype": model.dtype, **limits, "kv-transfer-config": connector}
