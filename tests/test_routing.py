"""The controller's choice over the chunks that the store really has. No model runs."""

from contextlib import closing

import pytest
import torch

from ragkv.chunk_kv import ChunkKV
from ragkv.controller.cost_model import Chunk, Profile, plan
from ragkv.policies import Policy, Selection
from ragkv.prompt import Prompt
from ragkv.routing import plan_task
from ragkv.store.disk_store import DiskStore
from ragkv.store.record import LayerKV

NONE = Policy(Selection.NONE)
PROFILE = Profile(NONE, prefill=(0.0, 1000.0, 0.0), fused=(0.0, 90.0, 0.0, 1000.0, 0.0, 0.0), cold_ms=100.0)
CHUNKS = {"a" * 32: [4, 5, 6], "b" * 32: [7, 8]}
ANCHOR, QUESTION = [1, 2, 3], [9]


@pytest.mark.parametrize("joins", [True, False])
def test_a_chunk_is_stored_in_its_own_entry_or_in_its_mean_s(tmp_path, joins):
    kv = ChunkKV(ANCHOR, f"{8:032x}", (0, 2), num_contexts=2, joins=joins)
    prompt = Prompt([*ANCHOR, 4, 5, 6, 7, 8, *QUESTION], len(ANCHOR), [(3, 6), (6, 8)])
    with closing(DiskStore(tmp_path)) as store:
        task = kv.task(prompt, list(CHUNKS), NONE, store)
        assert plan_task(PROFILE, 9, task, kv, store) == (plan(PROFILE, 9, [], NONE), None)
        ones = torch.ones(2, 3, 8)
        keys = [kv.key(kv.anchor_span)] + [key for chunk in CHUNKS for key in kv.keys(chunk)]
        store.put((key, [LayerKV(ones, ones, 0)]) for key in keys)
        task = kv.task(prompt, list(CHUNKS), NONE, store)
        chosen, planned = plan_task(PROFILE, 9, task, kv, store, CHUNKS.keys() | {kv.anchor_hash})
        assert chosen == plan(PROFILE, 9, [Chunk(3), Chunk(3), Chunk(2)], NONE) and planned == task
        assert [kv.stored_key(span, store) for span in task.spans] == [keys[0], keys[1], keys[-1]]
