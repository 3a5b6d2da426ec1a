"""Applies the controller to a request: looks up which of its chunks are there, and where."""

from collections.abc import Container
from dataclasses import replace

from ragkv.chunk_kv import ChunkKV
from ragkv.controller.cost_model import Chunk, Plan, Profile, plan
from ragkv.engine.task import FuseTask
from ragkv.store.segment_store import SegmentStore


def planned(
    profile: Profile,
    num_tokens: int,
    task: FuseTask,
    kv: ChunkKV,
    store: SegmentStore,
    in_memory: Container[str] = (),
) -> tuple[Plan, FuseTask | None]:
    """How to answer a prompt of `num_tokens`, and the task for it; None where vLLM is to prefill all of it.

    in_memory: the hashes of chunks that the worker has; others are near if the system has their records in memory.
    """
    keys = [kv.key(span) for span in task.spans]
    there = [i for i, key in enumerate(keys) if store.contains(key)]

    def is_cold(i: int) -> bool:
        return task.spans[i].chunk_hash not in in_memory and not store.in_page_cache(keys[i])

    chunks = [Chunk(task.spans[i].end - task.spans[i].start, is_cold(i)) for i in there]
    found = plan(profile, num_tokens, chunks, task.policy)
    if found.way == "prefill":
        return found, None
    computed = set(there) - {there[i] for i in found.chunks}  # what is missing stays: so that it is reported
    spans = tuple(span for i, span in enumerate(task.spans) if i not in computed)
    return found, replace(task, spans=spans)
