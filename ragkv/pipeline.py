"""The whole flow in one place: `ingest()` turns documents into stored KV, `answer()` turns a question into text.

document -load-> text -chunk-> Chunk -prefill-> ChunkKV -put-> store          (index time)
question -embed-> search -> chunks -get-> ChunkKV -fuse-> paged KV -decode-> answer   (question time)
"""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, replace
from pathlib import Path

import xxhash

from ragkv import models
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
from ragkv.engine.job import ROOT_HASH, FuseTask, Span, missing_kv
from ragkv.errors import ContextTooLongError, DocumentError, StoreError
from ragkv.home import ANCHOR_SETTING, CAPTURES_SETTING, Home, Owner
from ragkv.ingestion import Found, IngestProgress, IngestReport, Step, Work, batches
from ragkv.planning import planned
from ragkv.policies import Policy
from ragkv.profiling import ProfileFile, measure
from ragkv.prompt import Prompt, PromptLayout
from ragkv.recapture import Recapture
from ragkv.retriever.catalog import Catalog
from ragkv.retriever.chunking import Chunker
from ragkv.retriever.documents import Document, find_files, load_file, source_file
from ragkv.retriever.embedder import Embedder, Vectors
from ragkv.retriever.hashing import chunk_hash
from ragkv.retriever.index import VectorIndex
from ragkv.retriever.neighbours import nearest
from ragkv.retriever.retriever import Hit, Retriever
from ragkv.store.eviction import Hint
from ragkv.store.segment_store import SegmentStore

_UNSUPPORTED_SETTING = "unsupported"  # in the catalogue: why the home's model can't be fused, empty if it can


logger = logging.getLogger(__name__)


class Pipeline:
    """One home and one running model. Usable by many tasks of one event loop at a time."""

    def __init__(
        self, config: Config, home: Home, owner: Owner, catalog: Catalog, layout: PromptLayout, folder: Path
    ) -> None:
        self.config, self._home, self._owner, self._catalog, self._layout = config, home, owner, catalog, layout
        self._chunker = Chunker(folder, config.index.chunk_tokens, config.index.chunk_overlap)
        self._embedder = Embedder(models.resolve(config.index.embedder, config.home))
        self._index = VectorIndex(home.index)
        self._retriever = Retriever(catalog, self._index, self._embedder)
        self._anchor_hash = chunk_hash(layout.anchor)
        self._folder = folder
        self._engine: Engine | None = None
        self._store: SegmentStore = home.open_store()
        self._starting = asyncio.Lock()
        self._recapture = Recapture(self._capture_again)
        self._threads = Threads()
        policy = Policy.of(config.answer.policy, config.answer.budget)
        self._profiles = ProfileFile(home.path / "profile.json", owner.fingerprint, config.store.codec, policy)
        self._profile = self._profiles.load()

    @classmethod
    async def open(
        cls, config: Config, report: Callable[[str], None] = lambda line: None, *, start: bool = True
    ) -> "Pipeline":
        """Check the home and its models, then load them (half a minute). `report` gets a line for each step.

        start: start vLLM at once; otherwise with the first work that needs it. Raises ModelError for a missing model,
        StoreError for a home of another model or version, before vLLM starts.
        """
        home = Home(config.home)
        folder = models.resolve(config.model.name, home.path)
        fingerprint = models.model_fingerprint(folder, config.model.dtype, home.path)
        owner = Owner(f"{config.model.name} in {config.model.dtype}", fingerprint, config.index.embedder)
        catalog = home.open_catalog()
        home.check_owner(catalog, owner)
        report(f"loading {config.index.embedder}")
        pipeline = cls(config, home, owner, catalog, PromptLayout(folder), folder)
        if start:
            await pipeline.start(report)
        return pipeline

    async def start(self, report: Callable[[str], None] = lambda line: None) -> Engine:
        """Start vLLM, if it isn't running."""
        async with self._starting:
            if self._engine is None:
                report(f"starting vLLM with {self.config.model.name}")
                self._store.close()  # an open SQLite must not be carried into vLLM's processes
                model = self.config.model
                self._engine = await Engine.start(
                    self._folder, model, self._home.kv, self._owner.fingerprint, self.config.store.worker_options()
                )
                self._store = self._home.open_store()
                self._catalog.put_setting(_UNSUPPORTED_SETTING, self._engine.unsupported or "")
            return self._engine

    async def close(self) -> None:
        await self._recapture.close()
        if self._engine is not None:
            await self._engine.close()
        self._store.close()
        self._catalog.close()

    @property
    def is_ready(self) -> bool:
        return self._engine is not None and self._engine.is_ready

    @property
    def fallback(self) -> str | None:
        """Why this model's KV can't be fused, None if it can: as found out when vLLM last started on this home."""
        return self._catalog.get_setting(_UNSUPPORTED_SETTING) or None

    @property
    def counters(self) -> dict[str, int]:
        """How often something kept a chunk or a request from being reused, by reason; how many chunks were captured
        again for it."""
        counters = dict(self._engine.counters) if self._engine else {}
        recapture = self._recapture
        return counters | {"recaptured_chunks": recapture.num_captured, "failed_recaptures": recapture.num_failed}

    # Index time

    async def ingest(
        self,
        paths: Sequence[Path],
        progress: Callable[[IngestProgress], None] = lambda step: None,
        hint: Hint | None = None,
    ) -> IngestReport:
        """Bring the index up to date with these files and folders; documents that are gone from them are removed.

        Unchanged documents cost no work. Interrupted at any moment, it goes on where it stopped when run again: a
        document is in the catalogue only once the KV of all its chunks is in the store. hint: how the KV of all
        documents in `paths` is to be treated when room is needed; None leaves it as it was. Raises StoreError if there
        is no space or another ingest is at work; a bad document is reported and the others are indexed.
        """
        with self._home.indexing():
            self._home.check_owner(self._catalog, self._owner)
            self._home.claim(self._catalog, self._owner)
            self._catalog.put_setting(CAPTURES_SETTING, str(self.config.index.captures))
            self._catalog.put_setting(ANCHOR_SETTING, self._anchor_hash)
            report = IngestReport()
            files = find_files(paths)
            found = await asyncio.to_thread(self._load, files, report, progress)
            if found.work or self._anchor_is_lost():
                await self._capture_anchor()
            captures = self.config.index.captures
            total, done = captures * sum(len(item.chunks) for item in found.work), 0
            for batch in batches(found.work):
                await self._ingest_batch(batch, report, Step(progress, done, total))
                done += captures * sum(len(item.chunks) for item in batch)
            self._remove_missing(paths, found, report)
            report.chunks_deleted += self._collect_garbage()
            if hint is not None:
                self._store.hint(self._hashes_of(found.documents), hint)
            self._index.sync(self._catalog)
            self._index.save()
            return report

    def _load(self, files: Sequence[Path], report: IngestReport, progress: Callable[[IngestProgress], None]) -> Found:
        """Read every file; chunk what is new or changed."""
        found = Found({str(file.resolve()) for file in files})
        stored = self._stored(self._anchor_hash)
        for done, file in enumerate(files):
            progress(IngestProgress("load", done, len(files), file.name))
            for document in load_file(file):
                if isinstance(document, DocumentError):
                    report.rejected.append(document)
                    found.rejected.add(str(file.resolve()))
                    continue
                found.documents.add(document.id)
                digest = self._digest(document)
                known = self._catalog.document_digest(document.id)
                if known == digest and self._has_all_kv(document.id, stored):
                    report.documents_unchanged += 1
                    continue
                try:
                    found.work.append(Work(document, digest, self._chunker.split(document)))
                except DocumentError as error:
                    report.rejected.append(error)
                    continue
                report.documents_new += known is None
                report.documents_changed += known is not None
        progress(IngestProgress("load", len(files), len(files), ""))
        return found

    def _digest(self, document: Document) -> str:
        """Changes whenever the document would be indexed differently."""
        settings = (self.config.index.model_dump_json(), self._owner.fingerprint, self._anchor_hash)
        return xxhash.xxh3_128_hexdigest("\0".join((document.digest, *settings)).encode())

    def _has_all_kv(self, document_id: str, stored: set[str]) -> bool:
        chunks = self._catalog.document_chunks(document_id)
        return not self._fuses or all(chunk.chunk_hash in stored for chunk in chunks)

    def needs_model(self, paths: Sequence[Path]) -> bool:
        """Whether `ingest` of these paths has anything to prefill, and so needs vLLM."""
        if self._anchor_is_lost():
            return True
        stored = self._stored(self._anchor_hash)
        for document in (document for file in find_files(paths) for document in load_file(file)):
            if isinstance(document, Document) and not (
                self._catalog.document_digest(document.id) == self._digest(document)
                and self._has_all_kv(document.id, stored)
            ):
                return True
        return False

    def _anchor_is_lost(self) -> bool:
        indexed = self._fuses and bool(self._catalog.documents())
        return indexed and self._anchor_hash not in self._stored(ROOT_HASH)

    def _stored(self, anchor_hash: str) -> set[str]:
        """The chunks that have this model's KV, captured behind this anchor: an import may have brought others too.

        Under a budget also those that had to make room: they come back when they are asked for.
        """
        behind = (anchor_hash, self._owner.fingerprint)
        keys = self._store.keys(evicted=self.config.store.disk_gib is not None)
        return {key.chunk_hash for key in keys if (key.anchor_hash, key.fingerprint) == behind}

    @property
    def _fuses(self) -> bool:
        return self.fallback is None

    async def _ingest_batch(
        self, batch: Sequence[Work], report: IngestReport, progress: Callable[[int, str], None]
    ) -> None:
        """Prefill the batch's chunks that have no KV yet, all at once, then enter its documents into the catalogue."""
        engine = await self.start()
        texts = [chunk.text for item in batch for chunk in item.chunks]
        vectors = await asyncio.to_thread(self._embedder.embed, texts)
        titles = {chunk_hash(c.token_ids): item.document.title for item in batch for c in item.chunks}
        if self._fuses:
            tokens = [c.token_ids for item in batch for c in item.chunks]
            done = 0

            def advance(digest: str, num_captures: int) -> None:
                nonlocal done
                done += num_captures
                progress(done, titles[digest])

            kv, digests = self._chunk_kv(engine), list(map(chunk_hash, tokens))
            chunks = dict(zip(digests, tokens, strict=True))
            others = self._others(kv, chunks, digests, vectors)
            report.chunks_prefilled += await kv.capture(engine, self._store, chunks, others, advance)
        progress(self.config.index.captures * len(texts), "")
        start = 0
        for item in batch:
            old = {chunk.chunk_hash for chunk in self._catalog.document_chunks(item.document.id)}
            end = start + len(item.chunks)
            document = item.document
            self._catalog.put_document(document.id, document.title, item.digest, item.chunks, vectors[start:end])
            report.chunks_deleted += self._forget(old)
            start = end

    def _others(
        self, kv: ChunkKV, chunks: Mapping[str, Sequence[int]], digests: Sequence[str], vectors: Vectors
    ) -> dict[str, list[Span]]:
        """The chunks that are likely to stand before each of these in a prompt: the nearest ones."""
        if kv.captures == 1:
            return {}
        self._index.sync(self._catalog)
        others = nearest(digests, vectors, self._catalog, self._index, kv.captures - 1)
        wanted = {other for found in others.values() for other in found}
        lengths = self._catalog.num_tokens(wanted) | {digest: len(tokens) for digest, tokens in chunks.items()}
        return {digest: [kv.span(h, lengths[h]) for h in found if h in lengths] for digest, found in others.items()}

    async def _capture_anchor(self) -> None:
        engine = await self.start()
        if self._fuses:
            await self._chunk_kv(engine).capture_anchor(engine, self._store)

    def _chunk_kv(self, engine: Engine) -> ChunkKV:
        captures = int(self._catalog.get_setting(CAPTURES_SETTING) or 1)
        return ChunkKV(self._layout.anchor, self._owner.fingerprint, engine.kv_heads, captures)

    def _remove_missing(self, paths: Sequence[Path], found: Found, report: IngestReport) -> None:
        """Remove documents that lay in the folders and files given and are there no longer."""
        folders = [path.expanduser().resolve() for path in paths if path.is_dir()]
        for document in self._catalog.documents():
            file = document.id if document.id in found.files else source_file(document.id)
            read = file in found.files or any(Path(file).is_relative_to(folder) for folder in folders)
            if read and document.id not in found.documents and file not in found.rejected:
                hashes = {chunk.chunk_hash for chunk in self._catalog.document_chunks(document.id)}
                self._catalog.delete_document(document.id)
                report.chunks_deleted += self._forget(hashes)
                report.documents_removed += 1

    def _hashes_of(self, document_ids: Iterable[str]) -> set[str]:
        return {chunk.chunk_hash for id in document_ids for chunk in self._catalog.document_chunks(id)}

    def _forget(self, hashes: Iterable[str]) -> int:
        """Delete the KV of these chunks unless some document still has them. Returns how many chunks went."""
        gone = self._catalog.unreferenced(hashes)
        if gone:
            self._store.delete(gone)
        return len(gone)

    def _collect_garbage(self) -> int:
        """Delete KV that an interrupted run left without a document."""
        orphans = set(self._store.chunk_hashes(evicted=True)) - self._catalog.chunk_hashes() - {self._anchor_hash}
        if orphans:
            self._store.delete(orphans)
        return len(orphans)

    # Question time

    async def profile(self, report: Callable[[str], None] = lambda line: None, *, anew: bool = False) -> Profile | None:
        """What requests take on this machine: as measured before, or measured now (half a minute).

        None where the controller has nothing to choose: a model that isn't fused, or a policy without reuse. Raises
        StoreError if there is no space for the chunks that are captured for it, which go afterwards.
        """
        policy = Policy.of(self.config.answer.policy, self.config.answer.budget)
        if self._profile is not None and not anew:
            return self._profile
        engine = await self.start(report)
        if not self._fuses or policy.name == "full":
            return None
        report("measuring this machine, once")
        kv = ChunkKV(self._layout.anchor, self._owner.fingerprint, engine.kv_heads, captures=1)
        bench = Bench(engine, self._layout, self._folder, kv, self._store, self.config.index.chunk_tokens)
        try:
            self._profile = await measure(bench, kv, policy, self._store, engine.max_model_len)
        finally:
            self._forget(bench.captured)
        if self._profile is not None:
            self._profiles.save(self._profile)
        return self._profile

    async def _capture_again(self, digest: str) -> bool:
        """Make what KV is lost of one chunk, or of the anchor; False if no document has it any more. Raises StoreError
        if there is no space."""
        if digest == self._anchor_hash:
            await self._capture_anchor()
            return True
        chunk = self._catalog.chunk_of(digest)
        if chunk is None:
            return False
        engine = await self.start()
        kv, chunks = self._chunk_kv(engine), {digest: chunk.token_ids}
        _, vectors = self._catalog.vectors([chunk.id])
        await kv.capture(engine, self._store, chunks, self._others(kv, chunks, [digest], vectors))
        return True

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
        engine = await self.start()
        begin = time.perf_counter()
        conversation = asked if self._layout.takes_turns or not asked.turns else in_one_turn(asked)
        room = engine.max_model_len - options.max_tokens
        self._check_question(conversation, options.max_tokens, engine.max_model_len)
        found = await asyncio.to_thread(self._search, asked.questions, options.top_k)
        fitted = fit(self._layout, conversation, found[-len(conversation.questions) :], room)
        prompt, sources = fitted.prompt, self._sources(fitted.found)
        yield Retrieved(sources)
        digests = [hit.chunk.chunk_hash for hit in fitted.hits]
        kv = self._chunk_kv(engine)
        task = kv.task(prompt, digests, options.policy, self._store)
        plan: Plan | None = None
        request: FuseTask | None = task
        thread = (options.policy.label, options.top_k, asked.instruction)
        goes_on = self._layout.takes_turns and not options.fresh  # vLLM may have the KV of the turns before
        salt = self._threads.take(asked.turns, *thread) if goes_on else None
        profile = self._profile if self.config.answer.controller and salt is None else None
        if profile is not None and task.policy.title == profile.policy:
            plan, request = planned(profile, len(prompt.token_ids), task, kv, self._store, engine.in_memory)
        missing: list[str] = []
        if request is None:  # the worker doesn't see it, so nobody else tells
            missing = [span.chunk_hash for span in task.spans if not self._store.contains(kv.key(span))]
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
            self._threads.keep(salt, [*asked.turns, Turn(asked.question, "".join(texts))], *thread)
        lost = output.report.lost_chunks if output.report else missing
        if self._fuses and options.policy.name != "full":
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
                self.fallback or (missing_kv(len(missing), len(task.spans)) if missing else None),
                plan,
            ),
            output,
        )

    async def _hint(self, digests: Sequence[str], hint: Hint) -> None:
        try:
            await asyncio.to_thread(self._store.hint, digests, hint)
        except StoreError as error:  # the answer is there all the same
            logger.warning("a hint isn't kept: %s", error)

    def _check_question(self, conversation: Conversation, max_tokens: int, max_model_len: int) -> None:
        question, instruction = conversation.question, conversation.instruction
        num_tokens = len(self._layout.question_tokens(question)) + len(self._layout.instruction_tokens(instruction))
        limit = max(0, max_model_len - len(self._layout.anchor) - max_tokens)
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
        titles = {document.id: document.title for document in self._catalog.documents()}
        return [
            Source(c.document_id, titles.get(c.document_id, ""), c.id, c.ordinal, hit.score, c.text)
            for hit in hits
            for c in (hit.chunk,)
        ]

    def _salt(self, prompt: Prompt, policy: Policy) -> str | None:
        """Fused KV is an approximation: it is shared only by requests that would compute the same one."""
        if policy.name == "full" or not self._fuses:
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
