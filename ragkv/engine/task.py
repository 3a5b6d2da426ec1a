"""What travels between the caller, vLLM's scheduler and its worker: one request's work, as plain data."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from ragkv.policies import Policy, Selection

PARAMS_KEY = "ragkv"  # under which a request's `kv_transfer_params` carry the job, and its answer the report
ROOT_HASH = "0" * 32  # the anchor of an anchor: nothing stands before it


@dataclass(frozen=True)
class Span:
    """Prompt tokens `[start, end)` that are one chunk, precomputed behind the tokens of `anchor_hash`."""

    start: int
    end: int
    chunk_hash: str
    anchor_hash: str


@dataclass(frozen=True)
class FuseTask:
    """Fill the KV of the whole prompt but its last token from these spans and a subset forward.

    Spans are sorted and don't overlap. Prompt tokens outside of them have no cached KV and are computed. trace: report
    the times of each layer.
    """

    spans: tuple[Span, ...]
    policy: Policy
    trace: bool = False


@dataclass(frozen=True)
class ScoreTask:
    """Fuse the first `num_prompt_tokens` tokens, then report the log-probabilities of continuations that are given.

    The request's own prompt must go on for as long as the longest continuation, with any tokens, so that there are
    blocks for it. Each continuation `[m]` is run behind the fused prompt; the report has `[m, V]` for each.
    """

    fuse: FuseTask
    num_prompt_tokens: int
    continuations: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class PrecomputeTask:
    """Prefill the prompt but its last token and store the KV of `span`, which ends there."""

    span: Span


@dataclass(frozen=True)
class MeanTask:
    """Store under `span` the mean of a chunk's KV over several contexts, and its v_std.

    The chunk is the tokens `[span.start, span.end)` of the prompt, behind the anchor. It is prefilled behind the anchor
    and each of `others`: chunks precomputed behind the anchor too, of which the store gives the KV. `alone` is its own
    KV after the anchor, which is in the store already; it counts only where there are fewer than two others, for
    an average isn't used where nothing stands between anchor and chunk. The prompt goes on behind the chunk for as long
    as the longest of the others, with any tokens, so that there are blocks.
    """

    anchor: Span
    alone: Span
    span: Span
    others: tuple[Span, ...]


Task = FuseTask | ScoreTask | PrecomputeTask | MeanTask


def missing_kv(num_chunks: int, num_all: int) -> str:
    """How it is told."""
    return f"{num_chunks} of {num_all} chunks had no usable KV in the store"


def task_to_params(task: Task) -> dict[str, Any]:
    """As a request's `kv_transfer_params`: plain data."""
    return {PARAMS_KEY: {"task": type(task).__name__, **dataclasses.asdict(task)}}


def task_from_params(params: dict[str, Any] | None) -> Task | None:
    """The task in a request's `kv_transfer_params`, None for a request that isn't ours."""
    fields = (params or {}).get(PARAMS_KEY)
    if fields is None:
        return None
    match fields["task"]:
        case "FuseTask":
            return _fuse_task(fields)
        case "ScoreTask":
            continuations = tuple(tuple(tokens) for tokens in fields["continuations"])
            return ScoreTask(_fuse_task(fields["fuse"]), fields["num_prompt_tokens"], continuations)
        case "PrecomputeTask":
            return PrecomputeTask(Span(**fields["span"]))
        case "MeanTask":
            anchor, alone, span = (Span(**fields[name]) for name in ("anchor", "alone", "span"))
            return MeanTask(anchor, alone, span, tuple(Span(**other) for other in fields["others"]))
        case other:
            raise ValueError(f"unknown task {other!r} in kv_transfer_params")


def _fuse_task(fields: dict[str, Any]) -> FuseTask:
    policy = fields["policy"]
    return FuseTask(
        tuple(Span(**span) for span in fields["spans"]),
        Policy(**{**policy, "selection": Selection(policy["selection"])}),
        fields["trace"],
    )


@dataclass(frozen=True)
class Job:
    """A task with the blocks that vLLM gave it. `token_ids` are the prompt's but the last; the first `num_prefix` of
    them are in vLLM's prefix cache, in blocks that other requests may share and that must not be written."""

    request_id: str
    task: Task
    token_ids: list[int]
    block_ids: list[int]
    num_prefix: int


@dataclass
class Report:
    """What became of a job; returned with the request's last output.

    reused_tokens came from the store as they were; recomputed_tokens were computed by the subset forward.
    missing_chunks had no KV in the store, corrupt_chunks had bytes that didn't verify and are discarded; the anchor
    counts as a chunk. unusable_chunks: the hashes of both.
    recomputed_runs: where those of the recomputed tokens lie that were cached, as sorted `(start, end)`.
    covered: the share of the question's attention to the tokens that could be chosen which the chosen ones have.
    loaded: where the chunks lie whose KV was used, as `(start, end, in_memory)`: whether it lay in the store's memory.
    entered_memory, left_memory: the hashes of the chunks that have come there, and gone, since the last report.
    trace: for each pass and layer, if the task asks: the pass's stage, the layer, and when its load began and ended, in
    seconds of `time.perf_counter`, which all processes of a machine share.
    evenness: of that attention (`ragkv.policies.evenness`).
    logprobs: of a ScoreTask, float32 bytes `[m, V]` for each continuation.
    problem: why a chunk, or the whole job, was computed instead (None if all went well).
    """

    policy: str = ""
    prefix_tokens: int = 0
    reused_tokens: int = 0
    recomputed_tokens: int = 0
    missing_chunks: int = 0
    corrupt_chunks: int = 0
    unusable_chunks: list[str] = field(default_factory=list)
    loaded: list[tuple[int, int, bool]] = field(default_factory=list)
    entered_memory: list[str] = field(default_factory=list)
    left_memory: list[str] = field(default_factory=list)
    load_ms: float = 0.0
    probe_ms: float = 0.0
    recompute_ms: float = 0.0
    recomputed_runs: list[tuple[int, int]] = field(default_factory=list)
    covered: float | None = None
    evenness: float | None = None
    trace: list[tuple[str, int, float, float]] | None = None
    logprobs: list[bytes] = field(default_factory=list)
    problem: str | None = None
    failed: bool = False
