"""The clients of `ragkv eval uploads`, against a scripted pipeline behind the real server."""

import asyncio

import httpx
import pytest
from server_harness import ScriptedPipeline, running

from ragkv.config import MAIN
from ragkv.errors import RagKVError
from ragkv.evals.experiment import Progress
from ragkv.evals.parameters import Uploads
from ragkv.evals.workloads import uploads


def test_uploads_and_answers_are_timed_and_a_large_file_that_is_done_too_soon_is_told(tmp_path):
    pipeline = ScriptedPipeline(tmp_path)

    async def clients(url):
        async with httpx.AsyncClient(base_url=url) as client:
            assert 0 < await uploads._upload(client, "a.txt", "text") < 10
            gaps = await uploads._gaps_ms(client, 10, 3)
            assert len(gaps) == 3 and min(gaps) >= 0  # of two pieces each
        with pytest.raises(RagKVError, match="give more --mib"):
            await uploads._measure(url, Uploads(mib=0.5, uploads=1, answers=1), Progress())

    with running({MAIN: pipeline}, tmp_path) as client:
        asyncio.run(clients(str(client.base_url)))
