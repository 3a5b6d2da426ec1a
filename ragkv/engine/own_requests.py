"""Requests of our own in a vLLM that others started: what precomputes KV there. The scheduler's side."""

import uuid
from typing import TYPE_CHECKING

from ragkv.engine.callers import caller_with
from ragkv.engine.task import MeanTask, PrecomputeTask, PrefixUse, precompute_prompt, to_params

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

_PREFIX = "ragkv-own-"


class OwnRequests:
    """Puts requests into vLLM's scheduler as if a client had. Nobody waits for what they answer, and vLLM drops it.

    key: with which the connector trusts their tasks.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self._scheduler: Scheduler | None = None
        self._like: Request | None = None

    def note(self, request: "Request") -> None:
        """Note vLLM's scheduler, in whose call we are, and a client's request, which says how it names blocks."""
        if self._scheduler is None:
            self._scheduler = caller_with("add_request")
        self._like = request

    def is_own(self, request_id: str) -> bool:
        return request_id.startswith(_PREFIX)

    def submit(self, token_ids: list[int], task: PrecomputeTask | MeanTask) -> bool:
        """Have vLLM compute these tokens with this task. Returns whether it takes it."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        if self._scheduler is None or self._like is None:
            return False
        params = to_params(task, PrefixUse("once"), self._key)
        sampling = SamplingParams(max_tokens=1, temperature=0.0, extra_args={"kv_transfer_params": params})
        id = f"{_PREFIX}{uuid.uuid4().hex}"
        request = Request(
            id,
            precompute_prompt(token_ids, task),
            sampling,
            None,
            client_index=self._like.client_index,
            cache_salt=id,
            block_hasher=self._like._block_hasher,
        )
        self._scheduler.add_request(request)
        return True
