"""The whole flow in one place: `ingest()` turns documents into stored KV, `answer()` turns a question into text.

document -load-> text -chunk-> Chunk -prefill-> ChunkKV -put-> store          (index time: ragkv/indexing.py)
question -embed-> search -> chunks -get-> ChunkKV -fuse-> paged KV -decode-> answer        (question time)
"""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Sequence
from contextlib import aclosing
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ragkv.answer import (
    Answer,
    AnswerEvent,
    AnswerOptions,
    Conversation,
    Delta,
    Retrieved,
    Source,
    Timings,
    TokenOrigins,
    Turn,
)
from ragkv.background.canary import Canary, Sample
from ragkv.background.restore import RESTORE_EVENTS, KVRestorer
from ragkv.chunk_kv import ChunkKV
from ragkv.config import MAIN, AnswerConfig, Config
from ragkv.controller.cost_model import Plan, Profile
from ragkv.controller.profile import ProfileFile, measure
from ragkv.controller.requests import Bench
from ragkv.conversation import ConversationSalts, Fitted, fit, in_one_turn
from ragkv.engine.engine import Engine, EngineOutput
from ragkv.engine.task import FuseTask, missing_kv
from ragkv.errors import ContextTooLongError, StoreError
from ragkv.index.deletion import Deletion
from ragkv.index.indexer import Indexer
from ragkv.index.ingestion import IngestProgress, IngestReport
from ragkv.planning import planned
from ragkv.policies import FULL, Policy
from ragkv.prompt import Prompt
from ragkv.retriever.catalog import Chunk, DocumentInfo
from ragkv.retriever.documents import Document
from ragkv.retriever.hashing import chunk_hash
from ragkv.retriever.retriever import Hit, merged
from ragkv.store.eviction import Hint
from ragkv.token_origins import runs_of, usage_of
from ragkv.workspace import Workspace

logger = logging.getLogger(__name__)


class Pipeline:
    """One tenant's documents and a running model. Usable by many tasks of one event loop at a time."""

    def __init__(self, workspace: Workspace, tenant: str = MAIN) -> None:
        """The documents of other tenants that it may read are searched too."""
        self.workspace = self._workspace = workspace
        self.config = config = workspace.config
        self.tenant, self._beside = tenant, list[Pipeline]()
        reads = config.tenants[tenant].reads if tenant in config.tenants else []
        self._corpora = {corpus.catalog.scope: corpus for corpus in map(workspace.corpus, (tenant, *reads))}
        self._own = workspace.corpus(tenant)
        self._indexer = Indexer(workspace, self._own)
        self._retrievers = [workspace.retriever(corpus) for corpus in self._corpora.values()]
        self._restorer = KVRestorer(self._precompute_again, workspace.idle)
        self.canary = Canary(config.canary, config.answer.budget, workspace.idle, self._score)
        self._salts = ConversationSalts()
        policy = Policy.of(config.answer.policy, config.answer.budget)
        self._profiles = ProfileFile(
            workspace.home.path / "profile.json", workspace.owner.fingerprint, config.store.codec, policy
        )
        self._profile = self._profiles.load()

    @classmethod
    async def open(
        cls,
        config: Config,
        report: Callable[[str], None] = lambda line: None,
        *,
        start: bool = True,
        tenant: str = MAIN,
    ) -> "Pipeline":
        """Check the home and its models, then load them (half a minute). `report` gets a line for each step.

        start: start vLLM at once; otherwise with the first work that needs it. Raises ModelError for a missing model,
        StoreError for a home of another model or version, before vLLM starts.
        """
        pipeline = cls(Workspace(config, report), tenant)
        if start:
            await pipeline.start(report)
        return pipeline

    async def start(self, report: Callable[[str], None] = lambda line: None) -> Engine:
        """Start vLLM, if it isn't running."""
        return await self._workspace.start(report)

    def beside(self, tenant: str) -> "Pipeline":
        """Another tenant's pipeline on the same models; closed with this one."""
        other = Pipeline(self._workspace, tenant)
        self._beside.append(other)
        return other

    async def close(self) -> None:
        for pipeline in (self, *self._beside):
            await pipeline._restorer.close()
            await pipeline.canary.close()
        await self._workspace.close()

    @property
    def is_ready(self) -> bool:
        return self._workspace.engine is not None and self._workspace.engine.is_ready

    @property
    def defaults(self) -> AnswerConfig:
        """What a request gets that doesn't say otherwise: as configured, but the budget may have risen."""
        answer, budget = self.config.answer, self.canary.budget
        return answer if budget is None else answer.model_copy(update={"budget": budget})

    @property
    def fallback(self) -> str | None:
        """Why this model's KV can't be fused, None if it can: as found out when vLLM last started on this home."""
        return self._workspace.fallback

    @property
    def counters(self) -> dict[str, int]:
        """How often something kept a chunk or a request from being reused, by reason; how many chunks were precomputed
        again for it."""
        counters = dict(self._workspace.engine.counters) if self._workspace.engine else {}
        counters["engine_restarts"] = self._workspace.num_restarts
        restored = (self._restorer.num_restored, self._restorer.num_failed)
        return counters | dict(zip(RESTORE_EVENTS, restored, strict=True))

    @property
    def gauges(self) -> dict[str, int]:
        """What lies in the store, of all tenants."""
        in_memory = len(self._workspace.engine.in_memory) if self._workspace.engine else 0
        return {**self._workspace.store.gauges(), "memory_chunks": in_memory}

    async def ingest(
        self,
        paths: Sequence[Path],
        progress: Callable[[IngestProgress], None] = lambda step: None,
        hint: Hint | None = None,
    ) -> IngestReport:
        """As `Indexer.ingest`."""
        return await self._indexer.ingest(paths, progress, hint)

    async def ingest_documents(
        self,
        documents: Iterable[Document],
        progress: Callable[[IngestProgress], None] = lambda step: None,
        hint: Hint | None = None,
        is_withdrawn: Callable[[str], bool] = lambda id: False,
    ) -> IngestReport:
        """As `Indexer.ingest_documents`."""
        return await self._indexer.ingest_documents(documents, progress, hint, is_withdrawn)

    async def delete(self, ids: Collection[str]) -> Deletion:
        """As `Indexer.delete`."""
        return await self._indexer.delete(ids)

    def documents(self, after: str = "", limit: int | None = None) -> list[DocumentInfo]:
        """As `Catalog.documents`, of the tenant's own."""
        return self._own.catalog.documents(after, limit)

    def document_ids_of(self, name: str) -> list[str]:
        """As `Catalog.document_ids_of`, of the tenant's own."""
        return self._own.catalog.document_ids_of(name)

    @property
    def text_bytes(self) -> int:
        """Of the tenant's own documents together."""
        return self._own.catalog.text_bytes

    def document(self, id: str) -> tuple[DocumentInfo, list[tuple[Chunk, bool]]] | None:
        """One of the tenant's own documents, and its chunks with whether their KV is stored; None if it isn't there."""
        info = self._own.catalog.document(id)
        if info is None:
            return None
        stored = set(self._workspace.store.chunk_hashes())
        return info, [(chunk, chunk.chunk_hash in stored) for chunk in self._own.catalog.document_chunks(id)]

    async def search(self, question: str, top_k: int) -> list[Source]:
        """The chunks that would be found for a question, best first."""
        found = await asyncio.to_thread(self._search, [question], top_k)
        return self._sources(found[-1])

    def needs_model(self, paths: Sequence[Path]) -> bool:
        """As `Indexer.needs_model`."""
        return self._indexer.needs_model(paths)

    async def profile(self, report: Callable[[str], None] = lambda line: None, *, anew: bool = False) -> Profile | None:
        """What requests take on this machine: as measured before, or measured now (a minute at most).

        None where the controller has nothing to choose: a model that isn't fused, or a policy without reuse. Raises
        StoreError if there is no space for the chunks that are precomputed for it, which go afterwards.
        """
        policy = Policy.of(self.config.answer.policy, self.config.answer.budget)
        if self._profile is not None and not anew:
            return self._profile
        engine = await self._workspace.start(report)
        if not self._workspace.fuses or policy.is_full:
            return None
        report("measuring this machine, once")
        kv = ChunkKV(self._workspace.layout.anchor, self._workspace.owner.fingerprint, engine.kv_heads, num_contexts=1)
        bench = Bench(
            engine,
            self._workspace.layout,
            self._workspace.folder,
            kv,
            self._workspace.store,
            self.config.index.chunk_tokens,
        )
        try:
            self._profile = await measure(bench, kv, policy, self._workspace.store, engine.max_model_len)
        finally:
            Indexer(self._workspace, self._workspace.main).forget(bench.precomputed)
        if self._profile is not None:
            self._profiles.save(self._profile)
        return self._profile

    async def answer(self, asked: str | Conversation, options: AnswerOptions) -> AsyncGenerator[AnswerEvent, None]:
        """Answer from the indexed documents: `Retrieved`, then `Delta`s, then the `Answer`.

        Chunks that don't fit into the context are left out, worst first, and so are earlier turns, oldest first.
        Closing the generator frees everything. Raises ContextTooLongError if the question alone doesn't fit.
        """
        conversation = asked if isinstance(asked, Conversation) else Conversation(asked)
        with self._workspace.idle.answering():
            async with aclosing(self._answer(conversation, options)) as events:
                async for event in events:
                    yield event

    async def _answer(self, asked: Conversation, options: AnswerOptions) -> AsyncGenerator[AnswerEvent, None]:
        engine = await self._workspace.start()
        begin = time.perf_counter()
        conversation = asked if self._workspace.layout.takes_turns or not asked.turns else in_one_turn(asked)
        room = engine.max_model_len - options.max_tokens
        self._check_question(conversation, options.max_tokens, engine.max_model_len)
        found = await asyncio.to_thread(self._search, asked.questions, options.top_k)
        fitted = fit(self._workspace.layout, conversation, found[-len(conversation.questions) :], room)
        prompt, sources = fitted.prompt, self._sources(fitted.found)
        yield Retrieved(sources)
        digests = [hit.chunk.chunk_hash for hit in fitted.hits]
        kv = self._workspace.chunk_kv(engine)
        task = kv.task(prompt, digests, options.policy, self._workspace.store)
        plan: Plan | None = None
        request: FuseTask | None = task
        thread = (options.policy.label, options.top_k, asked.instruction)
        goes_on = self._workspace.layout.takes_turns and not options.fresh  # vLLM may have the KV of the turns before
        salt = self._salts.take(asked.turns, *thread) if goes_on else None
        inherited = salt is not None
        profile = self._profile if self.config.answer.controller and not inherited else None
        if profile is not None and task.policy.name == profile.policy:
            plan, request = planned(profile, len(prompt.token_ids), task, kv, self._workspace.store, engine.in_memory)
        missing: list[str] = []
        if request is None:  # the worker doesn't see it, so nobody else tells
            missing = [span.chunk_hash for span in task.spans if not self._workspace.store.contains(kv.key(span))]
        policy = options.policy if request is not None else FULL
        if salt is None:
            salt = f"fresh-{uuid.uuid4().hex}" if options.fresh else self._salt(prompt, policy)
        submitted = time.perf_counter()
        ttft_ms, texts, tokens = 0.0, list[str](), list[int]()
        output = EngineOutput("", [])
        sampling = {**asdict(options.sampling), "stop": list(options.sampling.stop)}
        outputs = engine.generate(prompt.token_ids, request, max_tokens=options.max_tokens, salt=salt, **sampling)
        async with aclosing(outputs):
            async for output in outputs:
                if output.token_ids and not tokens:
                    ttft_ms = 1e3 * (time.perf_counter() - submitted)
                tokens += output.token_ids
                texts.append(output.text)
                if output.text:
                    yield Delta(output.text)
        if options.hint is not None:
            await self._hint(digests, options.hint)
        if goes_on and salt is not None and policy.recomputes_some:
            turns = [*asked.turns, Turn(asked.question, "".join(texts))]
            self._salts.keep(salt, turns, *thread, inherited=inherited)
        lost = output.report.unusable_chunks if output.report else missing
        if self._workspace.fuses and not options.policy.is_full:
            self._restorer.add([*lost, *kv.without_mean(task)])
        if output.report and output.report.reused_tokens and request is not None and not inherited:
            self.canary.offer(Sample(prompt.token_ids, request, tokens[: self.config.canary.tokens]))
        now = time.perf_counter()
        timings = Timings(1e3 * (submitted - begin), ttft_ms=ttft_ms, total_ms=1e3 * (now - begin))
        yield self._finished(
            Answer(
                "".join(texts),
                sources,
                policy.label,
                usage_of(prompt, output, len(tokens)),
                timings,
                output.finish_reason or "abort",
                self._workspace.fallback or (missing_kv(len(missing), len(task.spans)) if missing else None),
                plan,
                self._origins(fitted, output) if options.explain else None,
            ),
            output,
        )

    def _origins(self, fitted: Fitted, output: EngineOutput) -> TokenOrigins:
        places = {hit.chunk.chunk_hash: i for i, hit in enumerate(fitted.found)}
        runs = runs_of(fitted.prompt, output, [places.get(hit.chunk.chunk_hash) for hit in fitted.hits])
        return TokenOrigins(self._workspace.layout.token_texts(fitted.prompt.token_ids), runs)

    async def _score(self, sample: Sample) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        engine = await self._workspace.start()
        exact = replace(sample.task, policy=FULL)
        (full,), _ = await engine.score(sample.prompt, exact, [sample.tokens])
        (fused,), _ = await engine.score(sample.prompt, sample.task, [sample.tokens])
        return full, fused

    async def _precompute_again(self, digest: str) -> bool:
        """Also of a tenant whose documents are searched too."""
        for corpus in self._corpora.values():
            if await Indexer(self._workspace, corpus).precompute_again(digest):
                return True
        return False

    async def _hint(self, digests: Sequence[str], hint: Hint) -> None:
        try:
            await asyncio.to_thread(self._workspace.store.hint, digests, hint)
        except StoreError as error:  # the answer is there all the same
            logger.warning("a hint isn't kept: %s", error)

    def _check_question(self, conversation: Conversation, max_tokens: int, max_model_len: int) -> None:
        question, instruction = conversation.question, conversation.instruction
        num_tokens = len(self._workspace.layout.question_tokens(question)) + len(
            self._workspace.layout.instruction_tokens(instruction)
        )
        limit = max(0, max_model_len - len(self._workspace.layout.anchor) - max_tokens)
        if num_tokens > limit:
            raise ContextTooLongError(
                f"the question has {num_tokens} tokens; with an answer of up to {max_tokens} tokens, at most {limit} "
                f"fit into the model's context of {max_model_len}",
                num_tokens,
                limit,
            )

    def _search(self, questions: Sequence[str], top_k: int) -> list[list[Hit]]:
        """For each question, heeding those before it."""
        settings = self.config.retrieval
        by_rank = settings.mode != "vector" or settings.reranker is not None
        return [
            merged([each.search(text, top_k, questions[:i]) for each in self._retrievers], top_k, by_rank=by_rank)
            for i, text in enumerate(questions)
        ]

    def _sources(self, hits: Sequence[Hit]) -> list[Source]:
        titles = {
            (scope, id): title
            for scope, corpus in self._corpora.items()
            for id, title in corpus.catalog.titles({h.chunk.document_id for h in hits if h.scope == scope}).items()
        }
        return [
            Source(
                c.document_id, titles.get((hit.scope, c.document_id), ""), c.id, c.ordinal, hit.score, c.text, corpus
            )
            for hit in hits
            for c, tenant in ((hit.chunk, self._corpora[hit.scope].tenant),)
            for corpus in (tenant if tenant != self.tenant else None,)
        ]

    def _salt(self, prompt: Prompt, policy: Policy) -> str | None:
        """Fused KV is an approximation: it is shared only by requests that would compute the same one. And a tenant's
        is no other's, for a hit could be told by its time."""
        own = "" if self.tenant == MAIN else f"-{self.tenant}"
        if policy.is_full or not self._workspace.fuses:
            return f"ragkv-full{own}" if own else None
        scope = chunk_hash(prompt.token_ids) if policy.recomputes_some else ""
        return f"ragkv-{policy.label}-{scope}{own}"

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
