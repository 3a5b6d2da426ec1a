"""Anybody's vLLM with ragkv's connector, for experiments: as `ragkv vllm-config --learn` starts it."""

from typing import Any

from ragkv.config import Config
from ragkv.home import Home
from ragkv.vllm_config import configuration


def connector(config: Config, home: Home) -> dict[str, Any]:
    """Return the connector's part of vLLM's configuration, with which it learns, and keeps everything in `home`."""
    learning = config.learning.model_copy(update={"on": True})
    found = configuration(config.model_copy(update={"learning": learning}))["kv-transfer-config"]
    prefixes = config.store.prefix_options(home.prefixes)
    own = {"home": str(home.path), "store": str(home.kv), "prefixes": prefixes}
    return {**found, "kv_connector_extra_config": {**found["kv_connector_extra_config"], **own}}


def num_learnt(home: Home) -> int:
    """Return how many passages have been learnt."""
    return sum(len(catalog.chunk_ids()) for catalog in home.catalogs())
