"""Requests that vLLM preempts, the scheduler's side: whose KV the worker holds until they are scheduled again.

vLLM takes a preempted request's blocks for others at once, in the same step. When the request comes back, it computes
what its prefix cache has lost of the prompt and of the answer. Here the worker copies the blocks before they are
overwritten, and later into others. What is held is in memory only, belongs to one request, and ends with it.

Nothing depends on a copy being there: a request whose copy is missing is computed anew.
"""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ragkv.engine.task import prefix_from_params

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

Preemption = Literal["load", "recompute", "auto"]
_DOUBTED_AFTER_S = 600.0  # how long it is believed that copying is slower than prefill
_LEAST_TIMED = 256  # tokens: the time of a shorter prefill says little


@dataclass(frozen=True)
class Hold:
    """The blocks of a preempted request's first `num_tokens` tokens, to be copied before this step overwrites them."""

    request_id: str
    block_ids: list[int]
    num_tokens: int


class Preempted:
    """Knows the blocks of every running request, and what is held of those that were preempted.

    way: `load` holds all that fits into `limit_bytes`, `auto` only where copying takes less time than prefill. For
    `recompute` there is none of these. block_bytes: of KV in one of vLLM's blocks of `block_size` tokens. key: the
    engine's, with which a request is believed how long prefill takes.
    """

    def __init__(self, way: Preemption, limit_bytes: int, block_size: int, block_bytes: int, key: str = "") -> None:
        self._way, self._block_size, self._block_bytes, self._key = way, block_size, block_bytes, key
        self._left = limit_bytes // block_bytes  # blocks
        self._requests: dict[str, Request] = {}
        self._blocks: dict[str, list[int]] = {}
        self._computed: dict[str, int] = {}  # tokens, after the last step that is known
        self._held: dict[str, Hold] = {}
        self._dropped: set[str] = set()
        self.worker_holds = False  # until it says so
        self.prefill, self._copies = PrefillTime(), Pace()

    def note(self, request: "Request") -> None:
        """Remember a request until it has finished."""
        self._requests[request.request_id] = request

    def held(self, request_id: str) -> int:
        """Return how many of the request's first tokens the worker holds."""
        hold = self._held.get(request_id)
        return hold.num_tokens if hold else 0

    def step(self, output: "SchedulerOutput") -> tuple[list[Hold], set[str]]:
        """Follow vLLM's next step. Returns what the worker is to copy before it, and whose copies it may drop."""
        holds = [hold for id in output.preempted_req_ids or () if (hold := self._preempted(id, output)) is not None]
        scheduled = output.num_scheduled_tokens
        for new in output.scheduled_new_reqs:  # vLLM's second runner is told of resumed requests as of new ones
            self._blocks[new.req_id] = list(new.block_ids[0])
            self._computed[new.req_id] = new.num_computed_tokens + scheduled[new.req_id]
        cached = output.scheduled_cached_reqs
        for id, blocks, num_computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if id in cached.resumed_req_ids:
                self._blocks[id] = []
            if blocks:
                self._blocks[id] += blocks[0]
            self._computed[id] = num_computed + scheduled[id]
        for id in self._held.keys() & scheduled.keys():  # it came back without
            self.drop(id)
        self.prefill.step(scheduled, self._computed, self._requests)
        self._held |= {hold.request_id: hold for hold in holds}
        dropped, self._dropped = self._dropped, set()
        return holds, dropped

    def _preempted(self, request_id: str, output: "SchedulerOutput") -> Hold | None:
        blocks, num_computed = self._blocks.pop(request_id, []), self._computed.pop(request_id, 0)
        request = self._requests.get(request_id)
        if request is None or not self.worker_holds or request_id in output.num_scheduled_tokens:
            return None
        num_tokens = min(num_computed, request.num_tokens - 1)  # vLLM computes the last token, to go on from there
        blocks = blocks[: -(-num_tokens // self._block_size)]
        if not blocks or len(blocks) * self._block_size < num_tokens or len(blocks) > self._left:
            return None
        if self._way == "auto" and not self._pays(request):
            return None
        self._left -= len(blocks)
        return Hold(request_id, blocks, num_tokens)

    def _pays(self, request: "Request") -> bool:
        """Return whether copying is quicker than prefill, as far as is known; for once also if that is long ago."""
        prefill_ms = prefix_from_params(request.kv_transfer_params, self._key).prefill_ms or self.prefill.pace.ms
        return not self._copies.ms or not prefill_ms or self._copies.ms < prefill_ms or self._copies.is_old

    def came_back(self, request_id: str, num_tokens: int, copy_ms: float) -> None:
        """Note how long it took to copy so many tokens from the request's blocks and into others; 0 if that failed."""
        if num_tokens:
            self._copies.note(num_tokens, copy_ms)
        self.drop(request_id)

    def drop(self, request_id: str) -> None:
        """Give up what is held of a request."""
        hold = self._held.pop(request_id, None)
        if hold is not None:
            self._left += len(hold.block_ids)
            self._dropped.add(request_id)

    def forget(self, request_id: str) -> None:
        """Forget a finished request."""
        self.drop(request_id)
        for each in (self._requests, self._blocks, self._computed):
            each.pop(request_id, None)


class Pace:
    """Milliseconds for a thousand tokens, of which the last measurement counts a half; 0 before the first one."""

    def __init__(self) -> None:
        self.ms, self._at = 0.0, 0.0

    def note(self, num_tokens: int, ms: float) -> None:
        pace = 1e3 * ms / num_tokens
        self.ms = (self.ms + pace) / 2 if self.ms else pace
        self._at = time.monotonic()

    @property
    def is_old(self) -> bool:
        return time.monotonic() - self._at > _DOUBTED_AFTER_S


class PrefillTime:
    """How long vLLM takes to prefill, from the steps in which it prefills one request, and what else is in them.

    vLLM may schedule a step before the last one's tokens are known, so the time ends when the request's first new token
    is. The tokens of all steps from its first to its last prefill count.
    """

    def __init__(self) -> None:
        self.pace = Pace()
        self._timed: tuple[str, int, float] | None = None  # the request, its tokens, and when it began
        self._num_tokens, self._is_prefill = 0, False

    def step(self, scheduled: dict[str, int], computed: dict[str, int], requests: "dict[str, Request]") -> None:
        """Follow a step. scheduled: how many tokens of which request; computed: how many it has after it."""
        now = time.perf_counter()
        if self._timed is not None:
            id, num_tokens, begin = self._timed
            request = requests.get(id)
            if request is None or id not in computed:  # finished, or preempted
                self._timed = None
            elif request.num_tokens > num_tokens:
                if self._num_tokens >= _LEAST_TIMED:
                    self.pace.note(self._num_tokens, 1e3 * (now - begin))
                self._timed = None
            elif self._is_prefill:
                self._num_tokens += sum(scheduled.values())
                self._is_prefill = computed[id] < num_tokens
        if self._timed is None:
            first = next((id for id, num in scheduled.items() if num >= _LEAST_TIMED and id in requests), None)
            if first is not None:
                num_tokens = requests[first].num_tokens
                self._timed = first, num_tokens, now
                self._num_tokens, self._is_prefill = sum(scheduled.values()), computed[first] < num_tokens
