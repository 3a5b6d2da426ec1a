from collections.abc import Iterator

import httpx
import pytest
from server_harness import ScriptedPipeline, running


@pytest.fixture(scope="module")
def module_pipeline() -> Iterator[tuple[ScriptedPipeline, httpx.Client]]:
    pipeline = ScriptedPipeline()
    with running(pipeline) as client:
        yield pipeline, client


@pytest.fixture
def pipeline(module_pipeline) -> ScriptedPipeline:
    pipeline, _ = module_pipeline
    pipeline.__init__()
    return pipeline


@pytest.fixture
def client(module_pipeline, pipeline) -> httpx.Client:
    return module_pipeline[1]
