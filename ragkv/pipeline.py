"""The whole flow: `ingest()` turns documents into stored KV, `answer()` turns a question into text.

document -read-> text -chunk-> chunks -precompute-> KV -put-> store
question -embed-> search -> chunks -get-> KV -fuse-> paged KV -decode-> answer
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import replace
from pathlib import Path

from ragkv.answer import AnswerEvent, AnswerOptions, Conversation, Retrieved, Source, TokenOrigins
from ragkv.background import RESTORE_EVENTS, Canary, KVRestorer, LogProbs, Sample
from ragkv.config import MAIN, AnswerConfig, Config
from ragkv.controller.cost_model import Profile, longest_wait_s
from ragkv.controller.profile import profile_machine
from ragkv.controller.profile_file import ProfileFile
from ragkv.conversation import Fitted, fit, in_one_turn, recent
from ragkv.engine.engine import Engine
from ragkv.errors import ConfigError, EngineStoppedError, ModelError, StoreError
from ragkv.generation import Generation, origins_of
from ragkv.index.indexer import Indexer
from ragkv.index.work import IngestProgress, IngestReport
from ragkv.policies import FULL, Policy
from ragkv.quality_target import NUM_TOKENS, begun_within, disagreement, raised
from ragkv.routing import Request, Router
from ragkv.shared_prefixes import SharedPrefixes
from ragkv.store import prefixes
from ragkv.store.eviction import Hint
from ragkv.store.tier import RemoteTier
from ragkv.workspace import Search, Workspace

logger = logging.getLogger(__name__)


class Pipeline:
    """One tenant's documents and a running model. The server, the CLI and the evaluations call it.

    indexer changes the tenant's own documents, catalog lists them. Answers also come from the documents of other
    tenants that it may read. Many tasks of one event loop may use it at a time.
    """

    def __init__(self, workspace: Workspace, tenant: str = MAIN) -> None:
        self.workspace, self.tenant, self._siblings = workspace, tenant, list[Pipeline]()
        self.config = config = workspace.config
        own = workspace.corpus(tenant)
        self._restorer = KVRestorer(self._precompute_again, workspace.idle)
        self.indexer, self._search = Indexer(workspace, own, self._restorer.add), Search(workspace, tenant)
        self.catalog = own.catalog
        self.canary = Canary(config.canary, config.answer.budget, workspace.idle, self._score)
        self._router, self._shared = Router(workspace, tenant), SharedPrefixes(workspace)
        self._policy = Policy.of(config.answer.policy, config.answer.budget)
        fingerprint, codec = workspace.owner.fingerprint, config.store.codec
        self._profiles = ProfileFile(workspace.home.profiles, fingerprint, codec, self._policy)
        if config.answer.controller:
            self._router.profile = self._profiles.load()

    @classmethod
    async def open(
        cls,
        config: Config,
        report: Callable[[str], None] = lambda line: None,
        *,
        start: bool = True,
        tenant: str = MAIN,
    ) -> "Pipeline":
        """Check the home and its models, then load them (half a minute). `report` is called with a line for each step.

        start: False leaves vLLM's start to the first work that needs it. Raises ModelError for a missing model,
        StoreError for a home of another model or version, before vLLM starts.
        """
        pipeline = cls(Workspace(config, report), tenant)
        if start:
            await pipeline.start(report)
        return pipeline

    async def start(self, report: Callable[[str], None] = lambda line: None) -> Engine:
        """Start vLLM, if it isn't running."""
        return await self.workspace.start(report)

    def for_tenant(self, tenant: str) -> "Pipeline":
        """Return another tenant's pipeline on the same models. Closing this one closes it; don't close it by itself."""
        other = Pipeline(self.workspace, tenant)
        self._siblings.append(other)
        return other

    async def close(self) -> None:
        for pipeline in (self, *self._siblings):
            await pipeline._restorer.close()
            await pipeline.canary.close()
            pipeline._router.close()
        await self.workspace.close()

    async def ingest(
        self,
        paths: Sequence[Path],
        progress: Callable[[IngestProgress], None] = lambda step: None,
        hint: Hint | None = None,
        *,
        allow_empty: bool = False,
    ) -> IngestReport:
        """Bring the index up to date with these files and folders.

        Documents that were indexed from one of these folders and are no longer in it are removed; others stay. If all
        of a folder's would be, that is a DocumentError, unless `allow_empty`.

        Unchanged documents cost no work. Interrupted at any moment, it continues where it stopped when run again: a
        document is in the catalogue only once the KV of all its chunks is stored. hint: how the KV of all documents in
        `paths` is treated when room is needed; None leaves it as it was. Raises StoreError if there is no space or
        another process is changing the home; a bad document is reported and the others are indexed.
        """
        with self.workspace.home.indexing():
            scan = await self.indexer.scan_files(paths, progress, allow_empty=allow_empty)
            async with aclosing(self.indexer.precompute(scan)) as turns:
                async for _ in turns:
                    pass
            await self.indexer.finish(scan, hint)
            scan.report.chunks_deleted += await self.indexer.delete_orphans()
        await self._bring_up_to_date(scan.report, progress)
        return scan.report

    async def _bring_up_to_date(self, report: IngestReport, progress: Callable[[IngestProgress], None]) -> None:
        """Delete and send what the bucket, if there is one, doesn't know of yet."""
        tier = self.workspace.tier
        if tier is not None:
            report.chunks_unreached = len(await asyncio.to_thread(tier.delete_pending))
            tell = lambda done, total: progress(IngestProgress("send", done, total, ""))  # noqa: E731
            report.entries_unsent = await asyncio.to_thread(tier.send, tell)

    async def answer(self, asked: str | Conversation, options: AnswerOptions) -> AsyncGenerator[AnswerEvent, None]:
        """Answer from the indexed documents: `Retrieved`, `Reasoning` if the model thinks, `Delta`s, then the `Answer`.

        Chunks that don't fit into the context are left out, worst first, and so are earlier turns, oldest first.
        Closing the generator aborts the request. Raises ContextTooLongError if the question alone doesn't fit,
        EngineStoppedError if the answer breaks off.
        """
        conversation = asked if isinstance(asked, Conversation) else Conversation(asked)
        with self.workspace.idle.answering():
            engine = await self.workspace.start()
            begun_at, generation_before = time.perf_counter(), prefixes.generation(self.workspace.home.prefixes)
            conversation, fitted = await asyncio.to_thread(self.retrieve, conversation, options, engine.max_model_len)
            left = engine.max_model_len - len(fitted.prompt.token_ids)
            is_given = options.hand_over == "give"
            options = replace(options, max_tokens=1 if is_given else min(options.max_tokens, left))
            sources = self._search.sources(fitted.question_hits)
            yield Retrieved(sources)
            generation: Generation | None = None
            with ExitStack() as late:
                waited_s = await self._fetch(fitted, options.policy, engine, late)
                while generation is None or self._is_rejected(generation, options):
                    options = options if generation is None else replace(options, policy=raised(options.policy))
                    request = self._router.route(conversation, options, fitted, engine, generation_before)
                    is_there, profile = options.hand_over == "take", self._router.profile
                    waited_s += await self._shared.fetch(request, engine, profile, waited_s, late, is_there=is_there)
                    generation = Generation(request, options, begun_at, generation)
                    async with aclosing(generation.events(self._texts(generation, options, engine))) as events:
                        async for event in events:
                            late.close()  # the first token is there
                            yield event
            if generation.output.finish_reason in (None, "abort", "error"):
                raise EngineStoppedError("vLLM gave up this request before its answer was complete; ask again")
            await self._settle(conversation, options, request, generation)
            if is_given:
                await self._shared.give(request, engine)
            refused = await self._hint(request, options.hint)
            origins = await asyncio.to_thread(self._origins, generation) if options.explain else None
            answer = generation.answer(sources, origins, self.fallback)
            lacks = [self._missing_sources(fitted, engine.max_model_len), answer.fallback]
            yield replace(answer, fallback="; ".join(filter(None, lacks)) or None, hint_refused=refused)

    def retrieve(self, asked: Conversation, options: AnswerOptions, max_model_len: int) -> tuple[Conversation, Fitted]:
        """Search for chunks, for each turn's question, and fit them and the conversation into the model's context.

        Returns what is left of the conversation. Of a chat of megabytes it takes seconds: call it in a thread.
        """
        layout = self.workspace.layout
        left = layout.check_question(asked.question, asked.instruction, max_model_len)
        # What an answer may be long is a limit: sources don't give way to more than a usual answer.
        room = max_model_len - min(options.max_tokens, max(self.config.answer.max_tokens, max_model_len // 4), left)
        asked = recent(layout, asked, room)
        if layout.takes_turns:
            return asked, fit(layout, asked, self._search.hits(asked.questions, options.top_k), room)
        hits = self._search.hits(asked.questions, options.top_k, len(asked.turns))
        return asked, fit(layout, in_one_turn(layout, asked, hits[0], room), hits, room)

    async def _fetch(self, fitted: Fitted, policy: Policy, engine: Engine, late: ExitStack) -> float:
        """Bring KV from the bucket, if there is one, as far as it comes in a small part of the time that the request
        takes without. late: is closed once the request has its first token; then the rest is brought, for the next
        one. Returns the seconds that it took."""
        begun_at, tier = time.monotonic(), self.workspace.tier
        if tier is None or not self.workspace.fuses or policy.is_full:
            return 0.0
        kv, store = self.workspace.chunk_kv(engine), self.workspace.store
        task = kv.task(fitted.prompt, [hit.chunk.chunk_hash for hit in fitted.hits], policy, store)
        wanted = {kv.best_key(span): span.end - span.start for span in task.spans}
        num_missing = sum(num_tokens for key, num_tokens in wanted.items() if not store.contains(key))
        if num_missing:
            num_tokens = len(fitted.prompt.token_ids)
            late.callback(tier.begin, list(wanted))
            await tier.fetch(wanted, longest_wait_s(self._router.profile, num_tokens, num_missing))
        return time.monotonic() - begun_at

    def _origins(self, generation: Generation) -> TokenOrigins:
        texts = self.workspace.layout.token_texts(generation.request.prompt.token_ids)
        return origins_of(generation.request, generation.output, texts)

    def _missing_sources(self, fitted: Fitted, max_model_len: int) -> str | None:
        """Return why the answer rests on fewer documents than it could, None if it doesn't."""
        if fitted.num_left_out:
            found = f"{fitted.num_left_out} of {fitted.num_left_out + len(fitted.question_hits)} sources left out"
            return f"{found}: the context of {max_model_len} tokens has no room for them"
        if fitted.question_hits:
            return None
        if self._search.is_empty:
            return "nothing is indexed, so the answer rests on no document: upload some, or run `ragkv index`"
        return "nothing was found, so the answer rests on no document"

    def _texts(self, generation: Generation, options: AnswerOptions, engine: Engine) -> AsyncGenerator[str, None]:
        """Generate, and yield the text; with a quality target none if the estimated drift is above it."""
        texts, request = generation.run(engine), generation.request
        if options.max_drift is None:
            return texts
        if request.task is None or request.task.policy.is_full:
            generation.drift_estimate = 0.0
            return texts
        other = self.workspace.chunk_kv(engine).over_other_kv(request.task)
        if other is None:
            return texts

        async def estimate() -> float | None:
            try:
                tokens = generation.tokens[:NUM_TOKENS]
                (rows,), _ = await engine.score(request.prompt.token_ids, other, [tokens])
            except ModelError as error:
                logger.warning("an answer's drift isn't estimated: %s", error)
                return None
            return disagreement(generation.logprobs[:NUM_TOKENS], rows)

        return begun_within(generation, texts, estimate, options.max_drift)

    @staticmethod
    def _is_rejected(generation: Generation, options: AnswerOptions) -> bool:
        estimate = generation.drift_estimate
        return estimate is not None and options.max_drift is not None and estimate > options.max_drift

    async def _settle(
        self, asked: Conversation, options: AnswerOptions, request: Request, generation: Generation
    ) -> None:
        """Keep what the next request can use, and queue for idle time the KV that this one found missing."""
        report = generation.output.report
        self._router.keep(request, asked, options, generation.text)
        if self.workspace.fuses and not options.policy.is_full:
            self._restorer.add([*generation.unusable_chunks, *request.without_mean])
        if report and report.tokens.reused and request.task is not None and not request.continues:
            tokens = generation.tokens[: self.config.canary.tokens]
            self.canary.offer(Sample(request.prompt.token_ids, request.task, tokens))

    async def _hint(self, request: Request, hint: Hint | None) -> str | None:
        """Set the hint of the chunks in a prompt. Returns why it can't be: the answer is complete already."""
        store, disk_bytes = self.workspace.store, self.config.store.disk_bytes
        try:
            if hint is not None:
                await asyncio.to_thread(store.control.hint, request.chunk_hashes, hint, disk_bytes)
        except (ConfigError, StoreError) as error:
            logger.warning("a hint isn't kept: %s", error)
            return str(error)
        return None

    async def search(self, question: str, top_k: int) -> list[Source]:
        """Return the chunks that would be retrieved for a question, best first."""
        return self._search.sources((await asyncio.to_thread(self._search.hits, [question], top_k))[-1])

    async def profile(self, report: Callable[[str], None] = lambda line: None, *, anew: bool = False) -> Profile | None:
        """Return how long requests take on this machine: from an earlier measurement, or measured now (a minute).

        None where the controller has nothing to choose: a model that isn't fused, or a policy without reuse. Raises
        StoreError if there is no space for the chunks that are precomputed for it, which are deleted afterwards.
        """
        known = self._profiles.load()
        if known is None or anew:
            known = await profile_machine(self.workspace, self._policy, report)
            if known is not None:
                self._profiles.save(known)
        if self.config.answer.controller:
            self._router.profile = known
        return known

    @property
    def is_ready(self) -> bool:
        return self.workspace.engine is not None and self.workspace.engine.is_ready

    @property
    def defaults(self) -> AnswerConfig:
        """The configured defaults of a request; the canary may have raised the budget."""
        answer, budget = self.config.answer_defaults, self.canary.budget
        return answer if budget is None else answer.model_copy(update={"budget": budget})

    @property
    def fallback(self) -> str | None:
        """Why this model's KV can't be fused, None if it can. vLLM's last start has found it out."""
        return self.workspace.fallback

    @property
    def counters(self) -> dict[str, int]:
        """How often KV wasn't reused, by reason; how many chunks were restored; how often vLLM was started again."""
        counters = dict(self.workspace.engine.counters) if self.workspace.engine else {}
        counters["engine_restarts"] = self.workspace.num_restarts
        restored = (self._restorer.num_restored, self._restorer.num_failed)
        return counters | dict(zip(RESTORE_EVENTS, restored, strict=True))

    @property
    def remote(self) -> RemoteTier | None:
        """The bucket behind the store, None if there is none."""
        return self.workspace.tier

    @property
    def gauges(self) -> dict[str, int]:
        """What is stored, of all tenants together."""
        in_memory = len(self.workspace.engine.in_memory) if self.workspace.engine else 0
        prefix_bytes = prefixes.size_on_disk(self.workspace.home.prefixes)
        return {**self.workspace.store.admin.gauges(), "memory_chunks": in_memory, "prefix_bytes": prefix_bytes}

    async def _score(self, sample: Sample) -> tuple[LogProbs, LogProbs, LogProbs | None]:
        """Return the log-probabilities of a sample's tokens: full prefill's, its own task's, and over the other KV."""
        engine = await self.workspace.start()
        other = self.workspace.chunk_kv(engine).over_other_kv(sample.task)
        tasks = (replace(sample.task, policy=FULL), sample.task, *([other] if other else []))
        scored = [(await engine.score(sample.prompt, task, [sample.tokens]))[0][0] for task in tasks]
        return scored[0], scored[1], scored[2] if other else None

    async def _precompute_again(self, chunk_hash: str) -> bool:
        """Precompute a chunk again, in whichever corpus that this tenant searches has it."""
        for corpus in self._search.corpora.values():
            if await Indexer(self.workspace, corpus).precompute_again(chunk_hash):
                return True
        return False
