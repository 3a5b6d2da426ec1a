"""Turns a fitted question into a `Request` for vLLM.

Knows which chunks have KV, which way answers sooner (`ragkv.controller`), and who may share vLLM's prefix cache. Knows
nothing about retrieval or generation.
"""

import uuid
from collections.abc import Container
from dataclasses import dataclass, replace

from ragkv.answer import AnswerOptions, Conversation, Turn
from ragkv.chunk_kv import ChunkKV
from ragkv.config import MAIN
from ragkv.controller.cost_model import Chunk, Plan, Profile, plan
from ragkv.conversation import ConversationSalts, Fitted
from ragkv.engine.engine import Engine
from ragkv.engine.task import FuseTask
from ragkv.policies import FULL, Policy
from ragkv.prompt import Prompt
from ragkv.retriever.hashing import chunk_hash
from ragkv.store.segment_store import SegmentStore
from ragkv.workspace import Workspace


@dataclass(frozen=True)
class Request:
    """One question, ready for the engine.

    fitted: the prompt and the hits in it. requested: the task that fuses all of its chunks. task: the one that the
    worker gets; None where vLLM prefills everything itself. policy: the one that will be used. plan: the controller's
    choice, None if it wasn't asked. salt: separates vLLM's prefix cache; None shares it. continues: whether the salt is
    that of the conversation's turn before. missing: hashes of chunks without KV that no worker will report.
    without_mean: hashes of chunks that have KV of one context only.
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

    @property
    def prompt(self) -> Prompt:
        return self.fitted.prompt

    @property
    def chunk_hashes(self) -> list[str]:
        """The hashes of the prompt's chunks, in its order."""
        return [hit.chunk.chunk_hash for hit in self.fitted.hits]


class Router:
    """Makes one tenant's requests. profile: what requests take on this machine; None leaves the controller out."""

    def __init__(self, workspace: Workspace, tenant: str) -> None:
        self._workspace, self._tenant = workspace, tenant
        self._salts = ConversationSalts()
        self.profile: Profile | None = None

    def route(self, asked: Conversation, options: AnswerOptions, fitted: Fitted, engine: Engine) -> Request:
        """Decide how a fitted question is answered."""
        store, kv = self._workspace.store, self._workspace.chunk_kv(engine)
        hashes = [hit.chunk.chunk_hash for hit in fitted.hits]
        requested = kv.task(fitted.prompt, hashes, options.policy, store)
        inherited = self._salts.take(asked.turns, *_context(asked, options)) if self._may_continue(options) else None
        task: FuseTask | None = requested
        chosen: Plan | None = None
        if self.profile is not None and inherited is None and options.policy.is_like(self.profile.policy):
            chosen, task = plan_task(self.profile, len(fitted.prompt.token_ids), requested, kv, store, engine.in_memory)
        policy = FULL if task is None else options.policy
        return Request(
            fitted=fitted,
            requested=requested,
            task=task,
            policy=policy,
            plan=chosen,
            salt=inherited or self._salt(fitted.prompt, policy, options),
            continues=inherited is not None,
            missing=() if task else tuple(s.chunk_hash for s in requested.spans if not store.contains(kv.key(s))),
            without_mean=tuple(kv.without_mean(requested)),
        )

    def keep(self, request: Request, asked: Conversation, options: AnswerOptions, answer: str) -> None:
        """Keep the request's salt for the conversation's next turn, which may then build upon the KV of this one."""
        if request.salt is not None and request.policy.recomputes_some and self._may_continue(options):
            turns = [*asked.turns, Turn(asked.question, answer)]
            self._salts.keep(request.salt, turns, *_context(asked, options), inherited=request.continues)

    def _may_continue(self, options: AnswerOptions) -> bool:
        """Return whether vLLM may still have the KV of the turns before."""
        return self._workspace.layout.takes_turns and not options.fresh

    def _salt(self, prompt: Prompt, policy: Policy, options: AnswerOptions) -> str | None:
        """Return the salt that only those requests have that may share the prompt's KV in vLLM's prefix cache.

        Fused KV is an approximation, shared only by requests that would compute the same one. Tenants share none: how
        long a request takes could reveal what another tenant has asked.
        """
        if options.fresh:
            return f"fresh-{uuid.uuid4().hex}"
        own = "" if self._tenant == MAIN else f"-{self._tenant}"
        if policy.is_full or not self._workspace.fuses:
            return f"ragkv-full{own}" if own else None
        scope = chunk_hash(prompt.token_ids) if policy.recomputes_some else ""
        return f"ragkv-{policy.label}-{scope}{own}"


def plan_task(
    profile: Profile,
    num_tokens: int,
    task: FuseTask,
    kv: ChunkKV,
    store: SegmentStore,
    in_memory: Container[str] = (),
) -> tuple[Plan, FuseTask | None]:
    """Return the quickest way to answer a prompt of `num_tokens`, and its task; None where vLLM prefills all of it.

    in_memory: hashes of the chunks that the worker holds in memory; others are warm if their records are in the page
    cache. Chunks without KV stay in the task, so that the worker reports them.
    """
    keys = [kv.key(span) for span in task.spans]
    present = [i for i, key in enumerate(keys) if store.contains(key)]

    def is_cold(i: int) -> bool:
        return task.spans[i].chunk_hash not in in_memory and not store.in_page_cache(keys[i])

    chunks = [Chunk(task.spans[i].end - task.spans[i].start, is_cold(i)) for i in present]
    chosen = plan(profile, num_tokens, chunks, task.policy)
    if chosen.way == "prefill":
        return chosen, None
    computed = set(present) - {present[i] for i in chosen.chunks}
    return chosen, replace(task, spans=tuple(span for i, span in enumerate(task.spans) if i not in computed))


def _context(asked: Conversation, options: AnswerOptions) -> tuple[str, int, str]:
    """Return what a conversation's KV depends on besides its turns."""
    return options.policy.label, options.top_k, asked.instruction
