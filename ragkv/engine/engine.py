"""One vLLM engine with ragkv's connector in it: token ids go in, tokens and a report come out."""

import asyncio
import logging
import os
import secrets
import signal
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ragkv.config import ModelConfig
from ragkv.engine.block_hashes import block_hashes
from ragkv.engine.task import (
    FuseTask,
    MeanTask,
    PrecomputeTask,
    PrefixUse,
    Report,
    ScoreTask,
    Task,
    lost_from_params,
    precompute_prompt,
    report_from_params,
    resumed_from_params,
    to_params,
)
from ragkv.errors import EngineStoppedError, ModelError, StoreError
from ragkv.policies import Policy
from ragkv.store.record import ChunkKey

logger = logging.getLogger(__name__)

_CONNECTOR_MODULE = "ragkv.engine.connector"
_POLL_S = 1.0  # between checks that vLLM's processes live
_CLOSE_S = 25.0  # for vLLM's processes to end by themselves: one that is killed leaves its shared memory behind
_UNUSED = PrefixUse("once")
_T = TypeVar("_T")


@dataclass(frozen=True)
class EngineOutput:
    """A piece of an answer. `report` comes with the last piece of a request that had a task.

    num_resumed_tokens: with the last piece, for how many tokens KV was loaded after vLLM had preempted the request.
    """

    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    report: Report | None = None
    num_cached_tokens: int = 0
    num_resumed_tokens: int = 0
    logprobs: list[dict[int, float]] | None = None


class Engine:
    """Owns vLLM's processes from `start` to `close`.

    unsupported: why this model's KV can't be fused (None if it can): its requests are served by full prefill.
    counters: how often KV wasn't reused: "missing_chunks", "corrupt_chunks", and "full_prefill: REASON" by request; and
    "resumed_tokens", whose KV was loaded after vLLM had preempted their request, and "lost_prefixes", exact ones that
    were to be stored and aren't.
    in_memory: the hashes of the chunks that the worker has in memory, as of its last report. max_model_len: the context
    limit in tokens, prompt and answer together. kv_heads: the range of heads in a record. block_size: tokens of vLLM's
    blocks. kv_tokens: of how many tokens vLLM has memory for KV. block_hashes: names the full blocks of a prompt under
    a salt, as vLLM does.
    """

    def __init__(self, llm: Any, unsupported: str | None, key: str = "") -> None:
        """key: with which requests' tasks are trusted."""
        self._llm, self._key = llm, key
        self.unsupported = unsupported
        self.counters: Counter[str] = Counter()
        self.in_memory: set[str] = set()
        self.max_model_len: int = llm.model_config.max_model_len
        self.kv_heads = (0, llm.model_config.get_num_kv_heads(llm.vllm_config.parallel_config))
        self.block_size: int = llm.vllm_config.cache_config.block_size
        self.kv_tokens: int = self.block_size * (llm.vllm_config.cache_config.num_gpu_blocks - 1)  # one is never used
        self.block_hashes = block_hashes(llm.vllm_config)

    @classmethod
    async def start(
        cls,
        model: Path,
        config: ModelConfig,
        store: Path,
        fingerprint: str,
        store_options: Mapping[str, Any] | None = None,
        prefixes: Mapping[str, Any] | None = None,
        *,
        alone: bool = False,
        **engine_args: Any,
    ) -> "Engine":
        """Start vLLM's processes and load the model, which takes seconds to minutes.

        store_options: of `DiskStore`. prefixes: where exact prefixes are kept (`StoreConfig.prefix_options`), None:
        nowhere. alone: vLLM without the connector, to compare with. engine_args: passed to vLLM as they are, but
        for `kv_transfer_config`, which may be plain data. Raises ModelError.
        """
        extra = {
            "store": str(store),
            "store_options": dict(store_options or {}),
            "prefixes": dict(prefixes or {}),
            "fingerprint": fingerprint,
            "key": (key := secrets.token_hex(16)),
            "kernels": config.kernels,
            "preemption": config.preemption_options(),
        }
        try:
            launch = await asyncio.to_thread(_launcher, model, config, None if alone else extra, engine_args)
            llm = await asyncio.to_thread(launch)
            unsupported = "vLLM is alone"
            if not alone:
                (unsupported, *_) = await _unless_dead(llm, llm.collective_rpc("ragkv_attach"))
            await _unless_dead(llm, llm.get_supported_tasks())  # or the first request asks, and waits forever
        except Exception as error:  # whatever a loader makes of a damaged file
            raise ModelError(f"vLLM can't load the model {model}: {error}. Try `ragkv doctor`") from error
        if unsupported and not alone:
            logger.warning("no fusion for this model, every request gets a full prefill: %s", unsupported)
        engine = cls(llm, unsupported, key)
        if prefixes and not unsupported:  # in whose first step the worker says that it can load them
            async for _ in engine.generate([0], max_tokens=1, salt=f"start-{uuid.uuid4().hex}"):
                pass
        return engine

    @property
    def is_ready(self) -> bool:
        return self._llm is not None and not self._llm.errored

    async def generate(
        self,
        token_ids: list[int],
        task: Task | None = None,
        *,
        max_tokens: int,
        salt: str | None = None,
        prefix: PrefixUse = _UNUSED,
        policy: Policy | None = None,
        **sampling: Any,
    ) -> AsyncGenerator[EngineOutput, None]:
        """Decode greedily (unless `sampling` says otherwise) after `token_ids`, piece by piece.

        salt: separates its prefix cache from everybody else's; fused KV must never be served as exact.
        prefix: whether its KV is stored exactly when it ends, for requests with the same salt that begin alike.
        policy: without a task, as a client of plain vLLM asks for it (`ragkv.plain_vllm`).
        Closing the generator aborts the request. Raises EngineStoppedError if vLLM's processes end.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        if task is not None and self.unsupported is not None:
            self.counters[f"full_prefill: {self.unsupported}"] += 1
            task = None

        params = SamplingParams(
            max_tokens=max_tokens,
            output_kind=RequestOutputKind.DELTA,
            extra_args={"kv_transfer_params": to_params(task, prefix, self._key, policy)},
            **{"temperature": 0.0, **sampling},
        )
        prompt = {"prompt_token_ids": token_ids, **({} if salt is None else {"cache_salt": salt})}
        try:
            async for output in self._llm.generate(prompt, params, request_id=uuid.uuid4().hex):
                (piece,) = output.outputs
                report, num_resumed = self._note(output.kv_transfer_params)
                yield EngineOutput(
                    piece.text,
                    list(piece.token_ids),
                    piece.finish_reason,
                    report,
                    output.num_cached_tokens or 0,
                    num_resumed,
                    [{t: p.logprob for t, p in step.items()} for step in piece.logprobs] if piece.logprobs else None,
                )
        except Exception as error:
            if self.is_ready:
                raise
            raise EngineStoppedError("vLLM's processes ended during this request; ask again in a minute") from error

    def _note(self, params: dict[str, Any] | None) -> tuple[Report | None, int]:
        """Count what an output says of its request. Returns the report, and how many tokens were resumed."""
        report, num_resumed = report_from_params(params), resumed_from_params(params)
        if num_resumed:
            self.counters["resumed_tokens"] += num_resumed
        if num_lost := lost_from_params(params):
            self.counters["lost_prefixes"] += num_lost
        if report is not None:
            self._count(report)
        return report, num_resumed

    def _count(self, report: Report) -> None:
        if report.failed:
            self.counters[f"full_prefill: {report.problem}"] += 1
        self.counters["missing_chunks"] += report.chunks.missing
        self.counters["corrupt_chunks"] += report.chunks.corrupt
        self.in_memory -= set(report.memory.left)
        self.in_memory |= set(report.memory.entered)

    async def precompute(self, token_ids: list[int], task: PrecomputeTask | MeanTask) -> float:
        """Prefill `token_ids` and store the KV of the task's span. Returns the seconds it took.

        Tasks that run at the same time are batched. Raises StoreError if the KV couldn't be stored.
        """
        begin = time.perf_counter()
        prompt = precompute_prompt(token_ids, task)
        async for output in self.generate(prompt, task, max_tokens=1, salt=f"precompute-{uuid.uuid4().hex}"):
            if output.finish_reason and (output.report is None or output.report.failed):
                raise StoreError(output.report.problem if output.report else "vLLM gave up precomputing a chunk")
        return time.perf_counter() - begin

    async def score(
        self, token_ids: list[int], task: FuseTask, continuations: Sequence[Sequence[int]], salt: str | None = None
    ) -> tuple[list[npt.NDArray[np.float32]], Report]:
        """Return log-probabilities `[m, V]` of what follows each token of each continuation `[m]` of a fused prompt.

        The first row is for what follows the prompt. Policy `full` gives vLLM's own. Raises ModelError if the model
        can't be fused or the fusion failed.
        """
        longest = max(map(len, continuations))
        score = ScoreTask(task, len(token_ids), tuple(tuple(tokens) for tokens in continuations))
        report = Report(problem=self.unsupported, failed=True)
        # No continuation itself: if vLLM's prefix cache had all of it, it would ask us for nothing.
        prompt = [*token_ids, *[token_ids[0]] * (longest + 1)]
        async for output in self.generate(prompt, score, max_tokens=1, salt=salt or f"score-{uuid.uuid4().hex}"):
            report = output.report or report
        if report.failed:
            raise ModelError(f"no log-probabilities: {report.problem}")
        rows = [np.frombuffer(data, dtype=np.float32) for data in report.logprobs]
        return [row.reshape(len(tokens), -1) for row, tokens in zip(rows, continuations, strict=True)], report

    async def held(self) -> dict[ChunkKey, int]:
        """Return the entries in the worker's memory, with the bytes that they take. Waits for an engine step to end.

        Raises EngineStoppedError, as `hold` and `release` do.
        """
        held = {ChunkKey.parse(bytes.fromhex(name)): size for name, size in await self.call_worker("ragkv_held")}
        self.in_memory = {key.chunk_hash for key in held}
        return held

    async def hold(self, keys: Sequence[ChunkKey], spared: Sequence[ChunkKey]) -> None:
        """Have the worker read entries into its memory (`DiskStore.hold`), while other requests wait: ask for few."""
        await self.call_worker("ragkv_hold", *([key.prefix().hex() for key in each] for each in (keys, spared)))

    async def release(self, keys: Sequence[ChunkKey]) -> int:
        """Have the worker give up entries in its memory. Returns the bytes that they took."""
        return int(await self.call_worker("ragkv_release", [key.prefix().hex() for key in keys]))

    async def call_worker(self, method: str, *args: Any) -> Any:
        """Call a method of the worker's extension (`ragkv.engine.connector.WorkerExtension`), between two steps."""
        if not self.is_ready:
            raise EngineStoppedError("vLLM isn't running; ask again in a minute")
        try:
            (result, *_) = await _unless_dead(self._llm, self._llm.collective_rpc(method, args=args))
        except Exception as error:
            if self.is_ready:
                raise
            raise EngineStoppedError("vLLM's processes ended during this call; ask again in a minute") from error
        return result

    async def forget_prefixes(self) -> bool:
        """Have vLLM forget what its prefix cache holds, as if other requests had needed the blocks.

        Returns False if it doesn't, for requests have blocks.
        """
        return bool(await self._llm.reset_prefix_cache())

    async def close(self) -> None:
        """End vLLM's processes. Requests in work end with EngineStoppedError."""
        llm, self._llm = self._llm, None
        if llm is not None:
            from vllm.v1.engine.exceptions import EngineDeadError

            llm.shutdown(timeout=_CLOSE_S)
            # It cancels the task that would tell them, also if the processes have ended and they don't know yet.
            llm.output_processor.propagate_error(EngineDeadError())


def _launcher(
    model: Path, config: ModelConfig, extra: dict[str, Any] | None, more: dict[str, Any]
) -> Callable[[], Any]:
    """Import vLLM, and return what starts its processes and returns their client.

    To be called in a thread, apart from what it returns: an error that vLLM keeps from its import holds the frames of
    all callers, and so what is in them. A client there would be collected only when vLLM's modules are gone.
    """
    arguments = _arguments(model, config, extra)
    from vllm import AsyncEngineArgs
    from vllm.config import KVTransferConfig
    from vllm.v1.engine.async_llm import AsyncLLM

    if isinstance(other := more.get("kv_transfer_config"), dict):
        more = {**more, "kv_transfer_config": KVTransferConfig(**other)}
    return partial(_launch, AsyncLLM, AsyncEngineArgs(**{**arguments, **more}))


def _launch(client: Any, arguments: Any) -> Any:
    """Start vLLM's processes. They inherit the thread's signal mask: Ctrl-C in a terminal is for the command alone."""
    resource_tracker.ensure_running()  # to start it with the first process would unblock SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return client.from_engine_args(arguments)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


async def _unless_dead(llm: Any, call: Coroutine[Any, Any, _T]) -> _T:
    """Return vLLM's answer to a call between its processes. Raises ModelError if they end, for then none comes."""
    task = asyncio.ensure_future(call)
    try:
        while not (await asyncio.wait({task}, timeout=_POLL_S))[0]:
            if llm.errored:
                raise ModelError("its processes have ended")
        return task.result()
    finally:
        task.cancel()


def _arguments(model: Path, config: ModelConfig, extra: dict[str, Any] | None) -> dict[str, Any]:
    """Return vLLM's engine arguments, and set the environment variables that vLLM reads besides. extra: for the
    connector, None for vLLM alone."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(max(1, round(config.kv_cache_gib))))
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", str(round(_CLOSE_S / 2)))
    if not config.compile:  # nor the sampler, which would need a C++ compiler at the first random token
        os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    # A fork would carry open databases with it, and hang where OpenMP was used (vLLM itself spawns on CPU only).
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    from vllm.config import KVTransferConfig
    from vllm.platforms import current_platform

    connector: dict[str, Any] = {}
    if extra is not None:
        connector = {"worker_extension_cls": f"{_CONNECTOR_MODULE}.WorkerExtension"}
        connector["kv_transfer_config"] = KVTransferConfig(
            kv_connector="RagKVConnector",
            kv_connector_module_path=_CONNECTOR_MODULE,
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=extra,
        )
    graphs: dict[str, Any] = {"enforce_eager": not config.compile}
    if not config.compile and current_platform.is_cuda_alike():  # decoding a token is launched as one graph
        graphs = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
    return {
        "model": str(model),
        "dtype": config.dtype,
        "max_model_len": config.max_model_len,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "block_size": config.block_tokens,
        **graphs,
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        **connector,
    }
