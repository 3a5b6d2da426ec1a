"""What travels between the caller, vLLM's scheduler and its worker: one request's work, as plain data."""

from dataclasses import dataclass
from typing import Any

from ragkv.policies import Policy

PARAMS_KEY = "ragkv"  # under which a request's `kv_transfer_params` carry the job, and its answer the report
ROOT_HASH = "0" * 32  # the anchor of an anchor: nothing stands before it


@dataclass(frozen=True)
class Span:
    """Prompt tokens `[start, end)` that are one chunk, captured behind the tokens of `anchor_hash`."""

    start: int
    end: int
    chunk_hash: str
    anchor_hash: str


@dataclass(frozen=True)
class FuseTask:
    """Fill the KV of the whole prompt but its last token from these spans and a subset forward.

    Spans are sorted and don't overlap. Prompt tokens outside of them have no cached KV and are computed.
    """

    spans: tuple[Span, ...]
    policy: Policy

    def to_params(self) -> dict[str, Any]:
        spans = [[span.start, span.end, span.chunk_hash, span.anchor_hash] for span in self.spans]
        return {PARAMS_KEY: {"fuse": spans, "policy": self.policy.name, "budget": self.policy.budget}}


@dataclass(frozen=True)
class CaptureTask:
    """Prefill the prompt but its last token and store the KV of `span`, which ends there."""

    span: Span

    def to_params(self) -> dict[str, Any]:
        span = self.span
        return {PARAMS_KEY: {"capture": [span.start, span.end, span.chunk_hash, span.anchor_hash]}}


def task_from_params(params: dict[str, Any] | None) -> FuseTask | CaptureTask | None:
    """The task in a request's `kv_transfer_params`, None for a request that isn't ours."""
    fields = (params or {}).get(PARAMS_KEY)
    if fields is None:
        return None
    if "capture" in fields:
        return CaptureTask(Span(*fields["capture"]))
    return FuseTask(tuple(Span(*span) for span in fields["fuse"]), Policy(fields["policy"], fields["budget"]))


@dataclass(frozen=True)
class Job:
    """A task with the blocks that vLLM gave it. `token_ids` are the prompt's but the last; the first `num_prefix` of
    them are in vLLM's prefix cache, in blocks that other requests may share and that must not be written."""

    request_id: str
    task: FuseTask | CaptureTask
    token_ids: list[int]
    block_ids: list[int]
    num_prefix: int


@dataclass
class Report:
    """What became of a job; returned with the request's last output.

    reused_tokens came from the store as they were; recomputed_tokens were computed by the subset forward.
    missing_chunks had no KV in the store, corrupt_chunks had bytes that didn't verify; the anchor counts as a chunk.
    problem: why a chunk, or the whole job, was computed instead (None if all went well).
    """

    policy: str = ""
    prefix_tokens: int = 0
    reused_tokens: int = 0
    recomputed_tokens: int = 0
    missing_chunks: int = 0
    corrupt_chunks: int = 0
    load_ms: float = 0.0
    probe_ms: float = 0.0
    recompute_ms: float = 0.0
    problem: str | None = None
    failed: bool = False
