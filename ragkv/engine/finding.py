"""Requests of clients that don't know of ragkv, the scheduler's side: what of their prompts is fused.

A client sends a prompt to vLLM's own server, and stored chunks are found in its tokens. What is fused is an
approximation, which nobody may be served as exact, so from the first fused block on the request's blocks get names of
their own in vLLM's prefix cache. The blocks before it keep theirs: they are exact, and everybody's. A prompt that goes
on where an earlier one ended finds the earlier one's blocks, as with vLLM alone; how it fuses chunks behind them, if
there are any, is its own.
"""

import hashlib
import logging
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from ragkv.controller.cost_model import Load, Profile, saves
from ragkv.engine.task import FuseTask, Span, policy_from_params
from ragkv.errors import ConfigError
from ragkv.policies import Policy

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import BlockHash
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

# The spans in a prompt, `[n]` token ids, of stored chunks that requests with this `cache_salt` may use, sorted.
Find = Callable[[Sequence[int], str | None], tuple[Span, ...]]
# How many of the blocks with these names, from the first on, vLLM's prefix cache has.
Cached = Callable[["Sequence[BlockHash]"], int]

_MIN_TOKENS = 128  # fewer are prefilled about as soon as they are fused
_REMEMBERED, _ALIKE = 512, 8  # prompts that others may go on from; those of the same full blocks


@dataclass(frozen=True)
class _Fused:
    """A fused prompt: the names of its full blocks, and the tokens that it has behind them."""

    rest: list[int]
    names: "Sequence[BlockHash]"


class Finding:
    """The fused requests among those that vLLM has, and the tasks that fuse them.

    policy: of requests that don't name one. block_size: tokens of a block that vLLM names. profile: by which a prompt
    that vLLM prefills sooner is left to it; without one every prompt is fused of which more than half is found.
    """

    def __init__(
        self,
        find: Find,
        policy: Policy,
        block_size: int,
        profile: Profile | None = None,
        cached: Cached = lambda names: 0,
    ) -> None:
        self._find, self._policy, self._block_size = find, policy, block_size
        self._profile, self._cached = profile, cached
        self._tasks: dict[str, FuseTask] = {}
        # by the policy and the exact name of the last full block
        self._continued: OrderedDict[tuple[str, bytes], list[_Fused]] = OrderedDict()

    def note(self, request: "Request") -> bool:
        """Look for chunks in a new request, and name its blocks accordingly.

        Returns whether that went well: any fault of ours leaves the request to vLLM.
        """
        try:
            self._note(request)
        except Exception:
            logger.exception("no chunks are looked for in request %s", request.request_id)
            self._tasks.pop(request.request_id, None)
            return False
        return True

    def task(self, request_id: str) -> FuseTask | None:
        return self._tasks.get(request_id)

    def forget(self, request_id: str) -> None:
        self._tasks.pop(request_id, None)

    def _note(self, request: "Request") -> None:
        policy = self._chosen_policy(request)
        if policy.is_full or not may_be_fused(request):
            return
        prompt, exact = request.prompt_token_ids or [], list(request.block_hashes)
        spans = _until(len(prompt) - 1, self._find(prompt, request.cache_salt))
        if not spans:
            return
        before, num_exact = self._earlier(policy, exact, prompt), self._cached(exact)
        if num_exact > len(before) and 2 * num_exact * self._block_size > len(prompt):
            # vLLM has most of the prompt exactly: fusing that part would be slower, and no longer exact.
            before, spans = (), [span for span in spans if span.start >= num_exact * self._block_size]
        known = len(before) * self._block_size
        new = [span for span in spans if span.end > known]
        start = max(new[0].start, known) if new else len(prompt)
        num_found = sum(span.end - max(span.start, known) for span in new)
        if not self._pays(policy, len(prompt), start, num_found) or start // self._block_size >= len(exact):
            new, spans = [], [span for span in spans if span.end <= known]
        if not spans:
            return
        if before:
            _rename(request, before)
        if new:
            own = _digest(policy.label, prompt if policy.recomputes_some else ())
            _name_apart(request, start // self._block_size, own)
        self._tasks[request.request_id] = FuseTask(tuple(spans), policy)
        self._remember(policy, exact, prompt, list(request.block_hashes))

    def _pays(self, policy: Policy, num_tokens: int, num_before: int, num_found: int) -> bool:
        """Return whether to fuse the chunks found behind the first `num_before` tokens, which are computed anyway."""
        if num_found < _MIN_TOKENS or 2 * num_found <= num_tokens - num_before:
            return False
        if self._profile is None or not policy.is_like(self._profile.policy):
            return True
        uncached = num_tokens - num_before - num_found
        return saves(
            self._profile, Load(num_tokens, num_found, 0, int(policy.budget * num_found), uncached), num_before
        )

    def _earlier(self, policy: Policy, exact: "Sequence[BlockHash]", prompt: Sequence[int]) -> "Sequence[BlockHash]":
        """Return the names of the full blocks of the longest fused prompt that this one begins with, to its last token.

        Another question about the same chunks isn't enough: which tokens were recomputed depends on the question.
        """
        for num_blocks in range(len(exact), 0, -1):
            rest = prompt[num_blocks * self._block_size :]
            for earlier in self._continued.get((policy.label, exact[num_blocks - 1]), ()):
                if list(rest[: len(earlier.rest)]) == earlier.rest:
                    return earlier.names
        return ()

    def _remember(
        self, policy: Policy, exact: "Sequence[BlockHash]", prompt: Sequence[int], names: "Sequence[BlockHash]"
    ) -> None:
        key, rest = (policy.label, exact[-1]), list(prompt[len(exact) * self._block_size :])
        others = [each for each in self._continued.pop(key, ()) if each.rest != rest]
        self._continued[key] = [_Fused(rest, names), *others[: _ALIKE - 1]]
        while len(self._continued) > _REMEMBERED:
            self._continued.popitem(last=False)

    def _chosen_policy(self, request: "Request") -> Policy:
        try:
            return policy_from_params(request.kv_transfer_params) or self._policy
        except ConfigError as error:
            logger.warning("request %s is fused by %s: %s", request.request_id, self._policy.label, error)
            return self._policy


def may_be_fused(request: "Request") -> bool:
    """Return whether the KV of a request's prompt depends on its tokens only, and isn't asked for as such."""
    has_more = request.mm_features or request.prompt_embeds is not None or request.lora_request is not None
    is_asked_for = request.pooling_params is not None or request.skip_reading_prefix_cache
    return not (has_more or is_asked_for or request.resumable)  # of the last the client may send more later


def _until(end: int, spans: Sequence[Span]) -> list[Span]:
    """Return what of these spans is before `end`: a prompt's last token is computed by vLLM."""
    return [span if span.end <= end else _cut(span, end) for span in spans if span.start < end]


def _cut(span: Span, end: int) -> Span:
    return replace(span, end=end, num_tokens=span.num_tokens or span.end - span.start)


def _rename(request: "Request", names: "Sequence[BlockHash]") -> None:
    """Give a request's first blocks these names, and all blocks behind them the names that follow."""
    request.block_hashes[:] = list(names)
    request.update_block_hashes()


def _name_apart(request: "Request", num_kept: int, own: bytes) -> None:
    """Give all blocks behind the first `num_kept`, those of the answer too, names that no request without `own` has."""
    hashes = request.block_hashes
    if not num_kept:
        request.cache_salt = f"{request.cache_salt or ''} ragkv {own.hex()}"
        hashes.clear()
        request.update_block_hashes()
        return
    last = hashes[num_kept - 1]
    hashes[num_kept - 1 :] = [cast("BlockHash", hashlib.sha256(b"fused behind\0" + last + own).digest())]
    request.update_block_hashes()
    hashes[num_kept - 1] = last


def _digest(label: str, prompt: Sequence[int]) -> bytes:
    return hashlib.sha256(label.encode() + b"\0" + array("q", prompt).tobytes()).digest()
