"""A real indexer, killed: nothing that was acknowledged is lost, and the next run completes it."""

import os
import random
import signal
import subprocess
import sys
import time

import psutil
import pytest

from ragkv.config import Config
from ragkv.errors import StoreError
from ragkv.home import Home
from ragkv.store.opening import USAGE_NAME

pytestmark = [pytest.mark.engine, pytest.mark.long]

SENTENCES = [
    "Honey bees build hexagonal cells of wax, and a colony has one queen.",
    "Mount Etna is the tallest active volcano in Europe, and it erupted in 2021.",
    "The Akashi bridge spans 1,991 metres between two towers and was opened in 1998.",
    "Darjeeling tea is picked four times a year; the first flush gives a floral cup.",
    "In chess the rook moves along ranks and files, and castling moves it past the king.",
    "Window glass is made by floating molten glass on tin, as Pilkington invented.",
]


def test_a_killed_indexer_leaves_a_store_that_the_next_run_completes(smollm, tmp_path):
    """Killed at two moments, alone and with its whole process group: each time what it started is gone, and the store
    verifies; at the end all is in."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "models").symlink_to(smollm.parent)
    folder = tmp_path / "corpus"
    folder.mkdir()
    for i in range(16):
        text = " ".join(random.Random(i).choices(SENTENCES, k=20))
        (folder / f"{i}.txt").write_text(f"Document {i}. {text}")
    environment = {
        **os.environ,
        "RAGKV_HOME": str(tmp_path / "home"),
        "RAGKV_ANSWER__CONTROLLER": "false",
        "RAGKV_INDEX__NUM_CONTEXTS": "2",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    command = [sys.executable, "-m", "ragkv", "index", str(folder)]
    config = Config(home=tmp_path / "home")
    log = tmp_path / "log"
    # The anchor's entry is behind nothing, the others behind it, or averaged.
    for num_kinds, is_alone in ((1, True), (3, False)):  # among the first contexts, among the averages
        with log.open("w") as output:
            process = subprocess.Popen(command, env=environment, start_new_session=True, stdout=output, stderr=output)
        deadline = time.monotonic() + 600
        while process.poll() is None and _num_kinds(config) < num_kinds and time.monotonic() < deadline:
            time.sleep(0.05)
        started = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        if process.poll() is None:
            (os.kill if is_alone else os.killpg)(process.pid, signal.SIGKILL)
        process.wait()
        _, left = psutil.wait_procs(started, timeout=60)
        assert not left
        store = Home(config.home).open_store()
        assert store.admin.verify().problems == [], log.read_text()
        store.close()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    with Home(config.home).open_catalog() as catalog:
        assert len(catalog.documents()) == 16
        hashes = catalog.chunk_hashes()
    store = Home(config.home).open_store()
    assert store.admin.verify().problems == []
    assert hashes < set(store.chunk_hashes())
    assert store.admin.stats().num_chunks == len(hashes) + 1  # and the anchor
    store.close()
    again = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert again.returncode == 0 and "16 unchanged" in again.stdout
    assert "starting vLLM" in done.stderr and "starting vLLM" not in again.stderr  # nothing to prefill


def _num_kinds(config):
    if not (config.home / "kv" / USAGE_NAME).exists():
        return 0
    try:
        store = Home(config.home).open_store()
    except StoreError:
        return 0
    try:
        return len({key.anchor_hash for key in store.entries})
    finally:
        store.close()
