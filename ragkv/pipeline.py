"""The whole flow in one place: `ingest()` turns documents into stored KV, `answer()` turns a question into text.

document -load-> text -chunk-> Chunk -prefill-> ChunkKV -put-> store          (index time: ragkv/indexing.py)
question -embed-> search -> chunks -get-> ChunkKV -fuse-> paged KV -decode-> answer        (question time)
"""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict, replace
from pathlib import Path

from ragkv.answer import (
    Answer,
    AnswerEvent,
    AnswerOptions,
    Conversation,
    Delta,
    Retrieved,
    Source,
    Timings,
    Turn,
    Usage,
)
from ragkv.bench import Bench
from ragkv.chunk_kv import ChunkKV
from ragkv.config import Config
from ragkv.controller import Plan, Profile
from ragkv.conversation import Threads, fit, in_one_turn
from ragkv.engine.engine import Engine, EngineOutput
from ragkv.engine.job import FuseTask, missing_kv
from ragkv.errors import ContextTooLongError, StoreError
from ragkv.indexing import Indexer
from ragkv.ingestion import IngestProgress, IngestReport
from ragkv.planning import planned
from ragkv.policies import Policy
from ragkv.profiling import ProfileFile, measure
from ragkv.prompt import Prompt
from ragkv.recapture import Recapture
from ragkv.retriever.hashing import chunk_hash
from ragkv.retriever.retriever import Hit
from ragkv.store.eviction import Hint
from ragkv.workspace import Workspace

_UNSUPPORTED_SETTING = "unsupported"  # in the catalogue: why the home's model can't be fused, empty if it can


logger = logging.getLogger(__name__)


class Pipeline:
    """One home and one running model. Usable by many tasks of one event loop at a time."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = self._at = workspace
        self.config = config = workspace.config
        self._indexer = Indexer(workspace)
        self._retriever = workspace.retriever
        self._recapture = Recapture(self._indexer.capture_again)
        self._threads = Threads()
        policy = Policy.of(config.answer.policy, config.answer.budget)
        self._profiles = ProfileFile(
            workspace.home.path / "profile.json", workspace.owner.fingerprint, config.store.codec, policy
        )
        self._profile = self._profiles.load()

    @classmethod
    async def open(
        cls, config: Config, report: Callable[[str], None] = lambda line: None, *, start: bool = True
    ) -> "Pipeline":
        """Check the home and its models, then load them (half a minute). `report` gets a line for each step.

        start: start vLLM at once; otherwise with the first work that needs it. Raises ModelError for a missing model,
        StoreError for a home of another model or version, before vLLM starts.
        """
        pipeline = cls(Workspace(config, report))
        if start:
            await pipeline.start(report)
        return pipeline

    async def start(self, report: Callable[[str], None] = lambda line: None) -> Engine:
        """Start vLLM, if it isn't running."""
        return await self._at.start(report)

    async def close(self) -> None:
        await self._recapture.close()
        await self._at.close()

    @property
    def is_ready(self) -> bool:
        return self._at.engine is not None and self._at.engine.is_ready

    @property
    def fallback(self) -> str | None:
        """Why this model's KV can't be fused, None if it can: as found out when vLLM last started on this home."""
        return self._at.fallback

    @property
    def counters(self) -> dict[str, int]:
        """How often something kept a chunk or a request from being reused, by reason; how many chunks were captured
        again for it."""
        counters = dict(self._at.engine.counters) if self._at.engine else {}
        recapture = self._recapture
        return counters | {"recaptured_chunks": recapture.num_captured, "failed_recaptures": recapture.num_failed}

    async def ingest(
        self,
        paths: Sequence[Path],
        progress: Callable[[IngestProgress], None] = lambda step: None,
        hint: Hint | None = None,
    ) -> IngestReport:
        """As `Indexer.ingest`."""
        return await self._indexer.ingest(paths, progress, hint)

    def needs_model(self, paths: Sequence[Path]) -> bool:
        """As `Indexer.needs_model`."""
        return self._indexer.needs_model(paths)

    async def profile(self, report: Callable[[str], None] = lambda line: None, *, anew: bool = False) -> Profile | None:
        """What requests take on this machine: as measured before, or measured now (half a minute).

        None where the controller has nothing to choose: a model that isn't fused, or a policy without reuse. Raises
        StoreError if there is no space for the chunks that are captured for it, which go afterwards.
        """
        policy = Policy.of(self.config.answer.policy, self.config.answer.budget)
        if self._profile is not None and not anew:
            return self._profile
        engine = await self._at.start(report)
        if not self._at.fuses or policy.name == "full":
            return None
        report("measuring this machine, once")
        kv = ChunkKV(self._at.layout.anchor, self._at.owner.fingerprint, engine.kv_heads, captures=1)
        bench = Bench(engine, self._at.layout, self._at.folder, kv, self._at.store, self.config.index.chunk_tokens)
        try:
            self._profile = await measure(bench, kv, policy, self._at.store, engine.max_model_len)
        finally:
            self._at.forget(bench.captured)
        if self._profile is not None:
            self._profiles.save(self._profile)
        return self._profile

    async def answer(self, asked: str | Conversation, options: AnswerOptions) -> AsyncGenerator[AnswerEvent, None]:
        """Answer from the indexed documents: `Retrieved`, then `Delta`s, then the `Answer`.

        Chunks that don't fit into the context are left out, worst first, and so are earlier turns, oldest first.
        Closing the generator frees everything. Raises ContextTooLongError if the question alone doesn't fit.
        """
        conversation = asked if isinstance(asked, Conversation) else Conversation(asked)
        with self._recapture.answering():
            async with aclosing(self._answer(conversation, options)) as events:
                async for event in events:
                    yield event

    async def _answer(self, asked: Conversation, options: AnswerOptions) -> AsyncGenerator[AnswerEvent, None]:
        engine = await self._at.start()
        begin = time.perf_counter()
        conversation = asked if self._at.layout.takes_turns or not asked.turns else in_one_turn(asked)
        room = engine.max_model_len - options.max_tokens
        self._check_question(conversation, options.max_tokens, engine.max_model_len)
        found = await asyncio.to_thread(self._search, asked.questions, options.top_k)
        fitted = fit(self._at.layout, conversation, found[-len(conversation.questions) :], room)
        prompt, sources = fitted.prompt, self._sources(fitted.found)
        yield Retrieved(sources)
        digests = [hit.chunk.chunk_hash for hit in fitted.hits]
        kv = self._at.chunk_kv(engine)
        task = kv.task(prompt, digests, options.policy, self._at.store)
        plan: Plan | None = None
        request: FuseTask | None = task
        thread = (options.policy.label, options.top_k, asked.instruction)
        goes_on = self._at.layout.takes_turns and not options.fresh  # vLLM may have the KV of the turns before
        salt = self._threads.take(asked.turns, *thread) if goes_on else None
        inherited = salt is not None
        profile = self._profile if self.config.answer.controller and not inherited else None
        if profile is not None and task.policy.title == profile.policy:
            plan, request = planned(profile, len(prompt.token_ids), task, kv, self._at.store, engine.in_memory)
        missing: list[str] = []
        if request is None:  # the worker doesn't see it, so nobody else tells
            missing = [span.chunk_hash for span in task.spans if not self._at.store.contains(kv.key(span))]
        policy = options.policy if request is not None else Policy("full")
        if salt is None:
            salt = f"fresh-{uuid.uuid4().hex}" if options.fresh else self._salt(prompt, policy)
        submitted = time.perf_counter()
        ttft_ms, texts, num_tokens = 0.0, [], 0
        output = EngineOutput("", [])
        sampling = {**asdict(options.sampling), "stop": list(options.sampling.stop)}
        outputs = engine.generate(prompt.token_ids, request, max_tokens=options.max_tokens, salt=salt, **sampling)
        async with aclosing(outputs):
            async for output in outputs:
                if output.token_ids and not num_tokens:
                    ttft_ms = 1e3 * (time.perf_counter() - submitted)
                num_tokens += len(output.token_ids)
                texts.append(output.text)
                if output.text:
                    yield Delta(output.text)
        if options.hint is not None:
            await self._hint(digests, options.hint)
        if goes_on and salt is not None and policy.recomputes_some:
            turns = [*asked.turns, Turn(asked.question, "".join(texts))]
            self._threads.keep(salt, turns, *thread, inherited=inherited)
        lost = output.report.lost_chunks if output.report else missing
        if self._at.fuses and options.policy.name != "full":
            self._recapture.add([*lost, *kv.without_average(task)])
        now = time.perf_counter()
        timings = Timings(1e3 * (submitted - begin), ttft_ms=ttft_ms, total_ms=1e3 * (now - begin))
        yield self._finished(
            Answer(
                "".join(texts),
                sources,
                policy.label,
                _usage(prompt, output, num_tokens),
                timings,
                output.finish_reason or "abort",
                self._at.fallback or (missing_kv(len(missing), len(task.spans)) if missing else None),
                plan,
            ),
            output,
        )

    async def _hint(self, digests: Sequence[str], hint: Hint) -> None:
        try:
            await asyncio.to_thread(self._at.store.hint, digests, hint)
        except StoreError as error:  # the answer is there all the same
            logger.warning("a hint isn't kept: %s", error)

    def _check_question(self, conversation: Conversation, max_tokens: int, max_model_len: int) -> None:
        question, instruction = conversation.question, conversation.instruction
        num_tokens = len(self._at.layout.question_tokens(question)) + len(
            self._at.layout.instruction_tokens(instruction)
        )
        limit = max(0, max_model_len - len(self._at.layout.anchor) - max_tokens)
        if num_tokens > limit:
            raise ContextTooLongError(
                f"the question has {num_tokens} tokens; with an answer of up to {max_tokens} tokens, at most {limit} "
                f"fit into the model's context of {max_model_len}",
                num_tokens,
                limit,
            )

    def _search(self, questions: Sequence[str], top_k: int) -> list[list[Hit]]:
        """For each question, heeding those before it."""
        return [self._retriever.search(text, top_k, questions[:i]) for i, text in enumerate(questions)]

    def _sources(self, hits: Sequence[Hit]) -> list[Source]:
        titles = {document.id: document.title for document in self._at.catalog.documents()}
        return [
            Source(c.document_id, titles.get(c.document_id, ""), c.id, c.ordinal, hit.score, c.text)
            for hit in hits
            for c in (hit.chunk,)
        ]

    def _salt(self, prompt: Prompt, policy: Policy) -> str | None:
        """Fused KV is an approximation: it is shared only by requests that would compute the same one."""
        if policy.name == "full" or not self._at.fuses:
            return None
        scope = chunk_hash(prompt.token_ids) if policy.recomputes_some else ""
        return f"ragkv-{policy.label}-{scope}"

    def _finished(self, answer: Answer, output: EngineOutput) -> Answer:
        """Add what the worker reported to the answer."""
        report = output.report
        if report is None:
            return answer if answer.fallback is None else replace(answer, policy="full")
        if report.failed:
            return replace(answer, policy="full", fallback=report.problem)
        stages = replace(
            answer.timings, load_ms=report.load_ms, probe_ms=report.probe_ms, recompute_ms=report.recompute_ms
        )
        return replace(answer, policy=report.policy, fallback=report.problem, timings=stages)


def _usage(prompt: Prompt, output: EngineOutput, num_completion_tokens: int) -> Usage:
    """vLLM itself computes the prompt's last token, whatever was fused before it."""
    num_tokens, report = len(prompt.token_ids), output.report
    if report is None or report.failed:
        prefix = 0 if report else output.num_cached_tokens
        return Usage(num_tokens, prefix, 0, num_tokens - prefix, num_completion_tokens)
    recomputed = report.recomputed_tokens + 1
    return Usage(
        num_tokens,
        report.prefix_tokens,
        report.reused_tokens,
        recomputed,
        num_completion_tokens,
        report.memory_tokens,
    )
