from collections.abc import Iterator

import httpx
import pytest
from server_harness import ScriptedPipeline, running


@pytest.fixture(scope="module")
def module_pipeline(tmp_path_factory) -> Iterator[tuple[ScriptedPipeline, httpx.Client]]:
    folder = tmp_path_factory.mktemp("server")
    pipeline = ScriptedPipeline(folder)
    with running({pipeline.tenant: pipeline}, folder) as client:
        yield pipeline, client


@pytest.fixture
def pipeline(module_pipeline) -> ScriptedPipeline:
    pipeline, _ = module_pipeline
    pipeline.play()
    return pipeline


@pytest.fixture
def client(module_pipeline, pipeline) -> httpx.Client:
    return module_pipeline[1]


@pytest.fixture
def own_pipeline(tmp_path) -> ScriptedPipeline:
    return ScriptedPipeline(tmp_path)


@pytest.fixture
def own_client(own_pipeline, tmp_path) -> Iterator[httpx.Client]:
    """A client of a server that only this test uses."""
    with running({own_pipeline.tenant: own_pipeline}, tmp_path) as client:
        yield client
