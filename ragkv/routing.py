"""Turns a question, whose chunks and earlier turns have been fitted into the context window, into a `Request` for vLLM.

Knows which chunks have KV, whether loading it or prefilling is faster (`ragkv.controller`), and who may share vLLM's
prefix cache. Knows nothing about retrieval or generation. `Pipeline.answer` calls it once for each question.
"""

import uuid
from collections.abc import Container
from dataclasses import dataclass, replace

from ragkv.answer import AnswerOptions, Conversation, Turn
from ragkv.chunk_kv import ChunkKV
from ragkv.config import MAIN
from ragkv.controller.cost_model import Chunk, Plan, Profile, plan
from ragkv.conversation import Fitted
from ragkv.engine.engine import Engine
from ragkv.engine.task import FuseTask, PrefixUse
from ragkv.policies import FULL, Policy
from ragkv.prompt import Prompt
from ragkv.retriever.hashing import chunk_hash
from ragkv.salts import ConversationSalts
from ragkv.store.disk_store import DiskStore
from ragkv.workspace import Workspace


@dataclass(frozen=True)
class Request:
    """One question, ready for the engine.

    fitted: the prompt and the hits in it. requested: the task that fuses all of the prompt's chunks, before the
    controller's choice. task: the one that the worker gets; None where the controller leaves the prompt to vLLM's
    prefill. policy: the one that will be used. plan: the controller's choice, None if it wasn't asked. salt: separates
    vLLM's prefix cache; None shares it. continues: whether the salt is the one of the conversation's previous turn.
    missing: hashes of chunks without KV; empty if there is a task, for then the worker reports them. without_mean:
    hashes of chunks whose mean over contexts isn't stored, though the prompt could use it (`ChunkKV.without_mean`).
    prefix: what of it is kept as an exact prefix, and when one is loaded.
    """

    fitted: Fitted
    requested: FuseTask
    task: FuseTask | None
    policy: Policy
    plan: Plan | None
    salt: str | None
    continues: bool
    missing: tuple[str, ...]
    without_mean: tuple[str, ...]
    prefix: PrefixUse

    @property
    def prompt(self) -> Prompt:
        return self.fitted.prompt

    @property
    def chunk_hashes(self) -> list[str]:
        """The hashes of the prompt's chunks, in its order."""
        return [hit.chunk.chunk_hash for hit in self.fitted.hits]


class Router:
    """Makes one tenant's requests.

    profile: how long requests take on this machine; None leaves the controller out.
    """

    def __init__(self, workspace: Workspace, tenant: str) -> None:
        self._workspace, self._tenant = workspace, tenant
        self._salts = ConversationSalts(workspace.home.folder(tenant) / "conversations.sqlite")
        self.profile: Profile | None = None

    def route(
        self, asked: Conversation, options: AnswerOptions, fitted: Fitted, engine: Engine, generation: int
    ) -> Request:
        """Decide how a fitted question is answered. Takes the conversation's salt: `keep` gives it back.

        generation: of the stored prefixes, before the question was fitted.
        """
        store, kv = self._workspace.store, self._workspace.chunk_kv(engine)
        hashes = [hit.chunk.chunk_hash for hit in fitted.hits]
        requested = kv.task(fitted.prompt, hashes, options.policy, store)
        inherited = self._inherited(asked, options) if self._may_continue(options) else None
        task: FuseTask | None = requested
        chosen: Plan | None = None
        if self.profile is not None and inherited is None and options.policy.is_like(self.profile.policy):
            chosen, task = plan_task(self.profile, len(fitted.prompt.token_ids), requested, kv, store, engine.in_memory)
        policy = FULL if task is None else options.policy
        left = requested.spans if task is None else ()
        return Request(
            fitted=fitted,
            requested=requested,
            task=task,
            policy=policy,
            plan=chosen,
            salt=inherited or self._salt(fitted.prompt, policy, options),
            continues=inherited is not None,
            missing=tuple(s.chunk_hash for s in left if not kv.is_stored(s, store)),
            without_mean=tuple(kv.without_mean(requested)),
            prefix=self._prefix(options, fitted.prompt, generation, continues=inherited is not None),
        )

    def keep(self, request: Request, asked: Conversation, options: AnswerOptions, answer: str) -> None:
        """Keep the request's salt for the conversation's next turn, which may then build upon the KV of this one.

        Only needed where the salt names the whole prompt: the next turn, whose prompt is longer, wouldn't find it.
        """
        if options.hand_over == "give":
            return
        if request.salt is not None and request.policy.recomputes_some and self._may_continue(options):
            turns = [*asked.turns, Turn(asked.question, answer)]
            self._salts.keep(request.salt, turns, *_context(asked, options), inherited=request.continues)

    def _inherited(self, asked: Conversation, options: AnswerOptions) -> str | None:
        """Return the salt of the conversation that goes on; who only prefills leaves it to who answers."""
        find = self._salts.find if options.hand_over == "give" else self._salts.take
        return find(asked.turns, *_context(asked, options))

    def close(self) -> None:
        self._salts.close()

    def _prefix(self, options: AnswerOptions, prompt: Prompt, generation: int, *, continues: bool) -> PrefixUse:
        """Return what of the request is kept, unless it says so itself: all of a conversation that has gone on once."""
        if options.fresh:
            return PrefixUse("once")
        num_tokens, prefill_ms = len(prompt.token_ids), None
        if self.profile is not None:
            prefill_ms = 1e3 * self.profile.prefill_ms(num_tokens) / num_tokens
        is_given = options.hand_over == "give"
        keep = "session" if is_given or (continues and options.keep is None) else options.keep
        return PrefixUse(keep, generation, prefill_ms, is_given)

    def _may_continue(self, options: AnswerOptions) -> bool:
        """Return whether a turn's prompt begins with the one before, so that vLLM's prefix cache may have its KV."""
        return self._workspace.layout.takes_turns and not options.fresh

    def _salt(self, prompt: Prompt, policy: Policy, options: AnswerOptions) -> str | None:
        """Return the request's salt. Requests with the same salt share the prompt's KV in vLLM's prefix cache.

        Fused KV is an approximation: it is shared only by requests of the same policy, and where the policy recomputes
        tokens, of the same prompt. (Chunks that were missing, or that the controller had computed, are nearer to exact
        there.) Tenants share none: how long a request takes could reveal what another tenant has asked.
        """
        if options.fresh:
            return f"fresh-{uuid.uuid4().hex}"
        if policy.is_full or not self._workspace.fuses:
            return exact_salt(self._tenant)
        same_prompt = chunk_hash(prompt.token_ids) if policy.recomputes_some else ""
        return f"ragkv-{policy.label}-{same_prompt}{_suffix(self._tenant)}"


def exact_salt(tenant: str) -> str | None:
    """Return the salt of a tenant's requests whose prompts vLLM computes itself, and which may share their KV."""
    own = _suffix(tenant)
    return f"ragkv-full{own}" if own else None


def _suffix(tenant: str) -> str:
    return "" if tenant == MAIN else f"-{tenant}"


def plan_task(
    profile: Profile,
    num_tokens: int,
    task: FuseTask,
    kv: ChunkKV,
    store: DiskStore,
    in_memory: Container[str] = (),
) -> tuple[Plan, FuseTask | None]:
    """Return the quickest way to answer a prompt of `num_tokens`, and its task; None where vLLM prefills all of it.

    in_memory: hashes of the chunks that the worker, another process, has in memory. Chunks are cold, and slower to
    load, if they are neither there nor in the page cache. Chunks without KV stay in the task, so that the worker
    reports them.
    """
    keys = {i: key for i, span in enumerate(task.spans) if (key := kv.stored_key(span, store)) is not None}
    present = list(keys)

    def is_cold(i: int) -> bool:
        return task.spans[i].chunk_hash not in in_memory and not store.in_page_cache(keys[i])

    chunks = [Chunk(task.spans[i].end - task.spans[i].start, is_cold(i)) for i in present]
    chosen = plan(profile, num_tokens, chunks, task.policy)
    if chosen.way == "prefill":
        return chosen, None
    left_to_vllm = set(present) - {present[i] for i in chosen.chunks}
    return chosen, replace(task, spans=tuple(span for i, span in enumerate(task.spans) if i not in left_to_vllm))


def _context(asked: Conversation, options: AnswerOptions) -> tuple[str, int, str]:
    """Return what a conversation's KV depends on besides its turns."""
    return options.policy.label, options.top_k, asked.instruction
