"""Requests that the schema allows, and some that it doesn't, made by schemathesis over a real socket."""

import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from operator_home import make_home
from server_harness import CONFIG, OperatedPipeline, ScriptedPipeline, Worker, running

from ragkv.config import MAIN, ServerConfig
from ragkv.server.gate import hash_of

KEY = "ragkv-of-the-schema"
# What a schema can't say: which conversations end in a question, which names and texts a document may have.
EXCLUDED = "positive_data_acceptance"


def check(client, folder, *more) -> None:
    """No 500, no status, header or body that the schema lacks; invalid requests and missing keys are refused."""
    url = str(client.base_url).rstrip("/")
    command = [f"{Path(sys.executable).parent}/schemathesis", "run", f"{url}/openapi.json"]
    # One worker: before CPython 3.11.9, two threads that make an AST at once fail (python/cpython#106905).
    options = [f"--header=Authorization: Bearer {KEY}", "--max-examples=25", "--seed=7", "--workers=1", *more]
    excluded = [f"--exclude-checks={EXCLUDED}", "--suppress-health-check=all", "--no-color"]
    done = subprocess.run([*command, *options, *excluded], capture_output=True, text=True, timeout=500, cwd=folder)
    if done.returncode:
        pytest.fail(done.stdout + done.stderr)


def test_every_response_is_described_by_the_schema(tmp_path) -> None:
    config = CONFIG.model_copy(update={"server": ServerConfig(keys={"ann": hash_of(KEY)})})
    with running({MAIN: ScriptedPipeline(tmp_path)}, tmp_path, config) as client:
        check(client, tmp_path)


def test_every_response_to_an_operator_is_described_by_the_schema(tmp_path) -> None:
    home = make_home(tmp_path / "home")
    config = CONFIG.model_copy(update={"server": ServerConfig(operator_keys={"olga": hash_of(KEY)})})
    with closing(home.open_store()) as store:
        pipeline = OperatedPipeline(tmp_path, home, store, config, worker := Worker(home, 1 << 20))
        with running({MAIN: pipeline}, tmp_path, config) as client:
            check(client, tmp_path, "--include-path-regex=^/v1/store/")
        worker.store.close()
