"""Profiles: requests are timed once on this machine, for the controller, and the result is kept in the home."""

import hashlib
import json
import logging
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import filelock

from ragkv.chunk_kv import ChunkKV
from ragkv.controller.cost_model import Load, Profile, Sample
from ragkv.controller.requests import Bench, Timed, without
from ragkv.engine.task import FuseTask
from ragkv.errors import ConfigError
from ragkv.files import atomic_write
from ragkv.machine import machine
from ragkv.policies import Policy
from ragkv.prompt import Prompt
from ragkv.store.disk_store import DiskStore
from ragkv.store.record import ChunkKey
from ragkv.workspace import Workspace

logger = logging.getLogger(__name__)

LENGTHS = (192, 512, 1280, 3072)  # of prompts, in tokens
_BUDGETS = (0.05, 0.15)
_ROUNDS = 4
_LONG_S = 40.0  # after that no request is timed again


class ProfileFile:
    """The file with a home's profiles: one for each machine, model, policy and codec."""

    def __init__(self, file: Path, fingerprint: str, codec: str, policy: Policy) -> None:
        self._file = file
        facts = (fingerprint, codec, policy.name, machine(), platform.machine(), version("torch"))
        self._key = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]

    def load(self) -> Profile | None:
        try:
            return Profile.from_dict(self._profiles()[self._key])
        except (KeyError, TypeError, ConfigError):  # not measured yet, or damaged
            return None

    def save(self, profile: Profile) -> None:
        with filelock.FileLock(f"{self._file}.lock"), atomic_write(self._file) as file:
            profiles = {**self._profiles(), self._key: profile.as_dict()}
            file.write((json.dumps(profiles, indent=1) + "\n").encode())

    def _profiles(self) -> dict[str, Any]:
        try:
            profiles = json.loads(self._file.read_text())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            logger.warning("%s can't be read (%s); it is made anew", self._file, error)
            return {}
        return profiles if isinstance(profiles, dict) else {}


async def profile_machine(workspace: Workspace, policy: Policy, report: Callable[[str], None]) -> Profile | None:
    """Measure how long requests of this policy take; None for a model that isn't fused, or a policy without reuse.

    Deletes the chunks that it precomputes for this. Raises StoreError if there is no space for them.
    """
    engine = await workspace.start(report)
    if not workspace.fuses or policy.is_full:
        return None
    report("measuring this machine, once")
    kv = ChunkKV(workspace.layout.anchor, workspace.owner.fingerprint, engine.kv_heads, num_contexts=1)
    chunk_tokens = workspace.config.index.chunk_tokens
    bench = Bench(engine, workspace.layout, workspace.folder, kv, workspace.store, chunk_tokens)
    try:
        return await measure(bench, kv, policy, workspace.store, engine.max_model_len)
    finally:
        if unused := workspace.main.catalog.unreferenced(bench.precomputed):
            workspace.store.delete(unused)


async def measure(bench: Bench, kv: ChunkKV, policy: Policy, store: DiskStore, max_model_len: int) -> Profile | None:
    """Time a minute of requests and fit a profile; None if the model's context is too short for a fused prompt.

    Requests are timed in rounds over all lengths, and the best time of each counts: whatever else the machine does
    makes requests slower for seconds at a time, and must not make one length look slower than another.
    """
    prefill: list[_Request] = []
    fused: list[_Request] = []
    keys: list[ChunkKey] = []
    for length in [n for n in LENGTHS if bench.shortest < n < max_model_len]:
        prompt, chunk_hashes = await bench.prepare(length)
        keys = [kv.key(kv.span(chunk_hash, 0)) for chunk_hash in chunk_hashes]
        prefill.append(_Request(prompt, None))
        for budget in _BUDGETS if policy.selects_by_budget else _BUDGETS[:1]:
            whole = kv.task(prompt, chunk_hashes, replace(policy, budget=budget), store)
            fused.append(_Request(prompt, whole))
            if budget == _BUDGETS[0] and (num_missing := len(chunk_hashes) // 3):
                fused.append(_Request(prompt, without(whole, range(1, 1 + num_missing))))
    requests = sorted(prefill + fused, key=lambda request: len(request.prompt.token_ids))
    begin = time.perf_counter()
    for _ in range(_ROUNDS):
        for request in requests:
            if not request.timed or time.perf_counter() - begin + 1e-3 * request.ttft_ms < _LONG_S:
                request.timed.append(await bench.ask(request.prompt, request.task))
    samples = [request.sample for request in fused if request.is_as_asked]
    if not samples:
        return None
    return Profile.fit(policy, [request.sample for request in prefill], samples, _cold_ms(store, keys))


@dataclass
class _Request:
    prompt: Prompt
    task: FuseTask | None
    timed: list[Timed] = field(default_factory=list)

    @property
    def ttft_ms(self) -> float:
        return min(timed.ttft_ms for timed in self.timed)

    @property
    def is_as_asked(self) -> bool:
        return self.task is not None and self.timed[-1].report.policy == self.task.policy

    @property
    def sample(self) -> Sample:
        num_tokens = len(self.prompt.token_ids)
        return Sample(Load(num_tokens) if self.task is None else load_of(num_tokens, self.task), self.ttft_ms)


def load_of(num_tokens: int, task: FuseTask) -> Load:
    loaded = sum(span.end - span.start for span in task.spans)
    chosen = int(task.policy.budget * loaded) if task.policy.selects_by_budget else 0
    return Load(num_tokens, loaded, 0, chosen, num_tokens - loaded)


def _cold_ms(store: DiskStore, keys: Sequence[ChunkKey]) -> float:
    """Measure how many milliseconds longer a thousand tokens take to read from disk than from the page cache."""
    tokens, times = 0, []
    for is_cold in (True, False):
        if is_cold:
            store.admin.drop_cached(keys)
        begin, layer, tokens = time.perf_counter(), 0, 0
        with store.snapshot() as snapshot:
            while True:  # as a request reads: layer by layer, the next one announced
                for key in keys:
                    snapshot.prefetch(key, layer + 1)
                hits = [kv for kv in (snapshot.get(key, layer) for key in keys) if kv is not None]
                if not hits:
                    break
                tokens, layer = sum(kv.v.shape[1] for kv in hits), layer + 1
        times.append(1e3 * (time.perf_counter() - begin))
    return max(0.0, times[0] - times[1]) / max(tokens, 1) * 1e3
