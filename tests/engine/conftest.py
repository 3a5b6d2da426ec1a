"""Real vLLM engines, each started once for its module."""

import asyncio
import json
import os
import shutil
from pathlib import Path

import pytest
from engine_harness import NUM_LAYERS, QUESTIONS, Harness
from forked_engines import fork_instead_of_spawn
from safetensors.torch import load_file, save_file

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
if "PYTEST_XDIST_WORKER" in os.environ:  # threads of two engines on the same core spin against each other
    worker, workers = (os.environ[name] for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT"))
    share = sorted(os.sched_getaffinity(0))[int(worker.removeprefix("gw")) :: int(workers)]
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, share)) or "auto")

from ragkv import models
from ragkv.config import EMBEDDED_EMBEDDER, EMBEDDED_MODEL
from ragkv.controller.profile import text_tokens
from ragkv.errors import ModelError
from ragkv.evals.bucket import new_bucket, s3_server
from ragkv.prompt import PromptLayout
from ragkv.store import remote as remote_module

fork_instead_of_spawn()


@pytest.fixture(scope="session")
def runner():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="session")
def smollm():
    """The embedded model's folder, where `ragkv models fetch` put it."""
    home = Path(os.environ.get("RAGKV_HOME", "~/.ragkv")).expanduser()
    try:
        return models.resolve(EMBEDDED_MODEL, home)
    except ModelError as error:
        pytest.skip(f"{error} (`make models` fetches it)")


@pytest.fixture(scope="session")
def small_smollm(smollm, tmp_path_factory):
    """The folder of a model of the embedded one's first NUM_LAYERS layers, beside the embedder.

    All else is as it is in the whole model. Its text makes little sense, and comes several times as soon.
    """
    folder = tmp_path_factory.mktemp("models") / smollm.name
    shutil.copytree(smollm, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    (folder.parent / EMBEDDED_EMBEDDER).symlink_to(smollm.parent / EMBEDDED_EMBEDDER)
    config = json.loads((smollm / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": NUM_LAYERS}))
    left_out = tuple(f"model.layers.{layer}." for layer in range(NUM_LAYERS, config["num_hidden_layers"]))
    weights = load_file(smollm / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if not name.startswith(left_out)}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def home(small_smollm, tmp_path_factory):
    """A home of its own, whose embedded model is the small one."""
    return home_with(small_smollm, tmp_path_factory)


@pytest.fixture(scope="module")
def whole_home(smollm, tmp_path_factory):
    """A home of its own that shares the fetched models, for what compares text or times prefills."""
    return home_with(smollm, tmp_path_factory)


def home_with(model, tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    (home / "models").symlink_to(model.parent)
    return home


@pytest.fixture(scope="module")
def harness(runner, small_smollm, tmp_path_factory):
    harness = Harness(runner, small_smollm, tmp_path_factory.mktemp("kv"), max_model_len=8192)
    yield harness
    harness.close()


@pytest.fixture(scope="module")
def text(smollm):
    return text_tokens(smollm, 8192)


@pytest.fixture(scope="module")
def layout(smollm):
    return PromptLayout(smollm)


@pytest.fixture(scope="module")
def anchor(layout):
    return layout.anchor


@pytest.fixture(scope="module")
def question(layout):
    return layout.question_tokens(QUESTIONS[0])


@pytest.fixture
def bucket(monkeypatch):
    """A bucket of a real S3 server, which is asked again soon after it was away."""
    monkeypatch.setattr(remote_module, "REST_S", 0.5)
    monkeypatch.setattr(remote_module, "LONGEST_REST_S", 1.0)
    with s3_server() as port, new_bucket(port) as bucket:
        yield bucket
