"""What travels between the caller, vLLM's scheduler and its worker: one request's work, as plain data."""

import hmac
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from ragkv.errors import ConfigError
from ragkv.policies import Policy

TASK_KEY, REPORT_KEY, PREFIX_KEY = "ragkv_task", "ragkv_report", "ragkv_prefix"  # in a request's `kv_transfer_params`
KEY_KEY, POLICY_KEY = "ragkv_key", "policy"
RESUMED_KEY, LOST_KEY = "ragkv_resumed", "ragkv_lost"
ROOT_HASH = "0" * 32  # the anchor of an anchor: nothing stands before it
Keep = Literal["session", "shared", "once"]
KEEPS: dict[str, str] = {
    "session": "all of the request, for the user will go on from here",
    "shared": "the prompt, which others will begin with too; it isn't evicted",
    "once": "nothing",
}


@dataclass(frozen=True)
class Span:
    """Prompt tokens `[start, end)` that are one chunk, precomputed after the tokens of `anchor_hash`.

    mean_hash: what names the chunk's mean in place of the anchor. Where the store has no entry of its own for this KV,
    the mean's may have the difference. offset, num_tokens: they are its tokens from `offset` on, of `num_tokens`; 0:
    all that it has.
    """

    start: int
    end: int
    chunk_hash: str
    anchor_hash: str
    mean_hash: str = ""
    offset: int = 0
    num_tokens: int = 0


@dataclass(frozen=True)
class FuseTask:
    """Fill the KV of the whole prompt but its last token from these spans and a forward over the other tokens.

    Spans are sorted and don't overlap. Prompt tokens outside of them have no cached KV and are computed. trace: report
    the times of each layer.
    """

    spans: tuple[Span, ...]
    policy: Policy
    trace: bool = False
    kind: Literal["fuse"] = "fuse"


@dataclass(frozen=True)
class ScoreTask:
    """Fuse the first `num_prompt_tokens` tokens, then report the log-probabilities of given continuations.

    The request's own prompt must continue for as long as the longest continuation, with any tokens, so that there are
    blocks for it. Each continuation `[m]` is run after the fused prompt; the report has `[m, V]` for each.
    """

    fuse: FuseTask
    num_prompt_tokens: int
    continuations: tuple[tuple[int, ...], ...]
    kind: Literal["score"] = "score"


@dataclass(frozen=True)
class PrecomputeTask:
    """Prefill the prompt but its last token and store the KV of `span`, which ends there."""

    span: Span
    kind: Literal["precompute"] = "precompute"


@dataclass(frozen=True)
class MeanTask:
    """Store under `span` the mean of a chunk's KV over several contexts, and its standard deviation (`v_std`).

    The chunk is the tokens `[span.start, span.end)` of the prompt, after the anchor. It is prefilled after the anchor
    and each of `contexts`: other chunks one behind another, each precomputed after the anchor too, of which the store
    gives the KV. `alone` is its own KV after the anchor, which the store has already; it counts only where there are
    fewer than two contexts, for a mean isn't used where nothing stands between anchor and chunk. If its `mean_hash`
    names `span`, the mean gets the difference of `alone`, and takes the place of its entry. After the chunk the prompt
    continues for as long as the longest context, with any tokens, so that there are blocks.
    """

    anchor: Span
    alone: Span
    span: Span
    contexts: tuple[tuple[Span, ...], ...]
    kind: Literal["mean"] = "mean"

    @property
    def joins(self) -> bool:
        return self.alone.mean_hash == self.span.anchor_hash


Task = FuseTask | ScoreTask | PrecomputeTask | MeanTask


@dataclass(frozen=True)
class PrefixUse:
    """How a request uses exact prefixes (`ragkv.engine.prefixes`).

    keep: what of it is stored when it ends (`KEEPS`); None: what has come back before. generation: of the store when
    the prompt's text was looked up; nothing is stored if it is another one by then. None: as the request arrives.
    prefill_ms: what vLLM takes for a thousand tokens; a stored prefix is loaded only if that is quicker. None: always.
    is_given: another server waits for it, so that it is written whatever was written before.
    """

    keep: Keep | None = None
    generation: int | None = None
    prefill_ms: float | None = None
    is_given: bool = False


@dataclass(frozen=True)
class Job:
    """A task with the blocks that vLLM gave it.

    `token_ids` are the prompt's but the last; the first `num_prefix` of them are in vLLM's prefix cache, in blocks that
    other requests may share and that must not be written. stored: segments of the prompt's beginning that the store has
    exactly (`ragkv.engine.prefixes`), beyond `num_prefix`; without a task they are all there is to do. held: how
    many of the request's first tokens the worker has held since vLLM preempted it; they are all there is to do then.
    """

    request_id: str
    task: Task | None
    token_ids: list[int]
    block_ids: list[int]
    num_prefix: int
    stored: tuple[Span, ...] = ()
    held: int = 0


@dataclass
class TokenReport:
    """Where the KV of the prompt's tokens came from.

    prefix: from vLLM's prefix cache; exact: of a prefix that the store had; reused: chunks' from the store as they
    were; recomputed: from a forward of ours. recomputed_runs: the recomputed tokens of cached chunks, as sorted
    `(start, end)`. loaded: the chunks whose KV was used, as `(start, end, in_memory)`: whether the store had it in
    memory.
    """

    prefix: int = 0
    exact: int = 0
    reused: int = 0
    recomputed: int = 0
    recomputed_runs: list[tuple[int, int]] = field(default_factory=list)
    loaded: list[tuple[int, int, bool]] = field(default_factory=list)


@dataclass
class StageReport:
    """Milliseconds in each stage: loading chunks' KV, the probe's forward, the recomputation's; prefix_ms: loading a
    stored prefix.

    trace: for each pass and layer, if the task asks: the pass's stage, the layer, and when its load began and ended, in
    seconds of `time.perf_counter`, which all processes of a machine share.
    """

    load_ms: float = 0.0
    probe_ms: float = 0.0
    recompute_ms: float = 0.0
    prefix_ms: float = 0.0
    trace: list[tuple[str, int, float, float]] | None = None


@dataclass
class ChunkReport:
    """Chunks whose KV couldn't be used, the anchor among them.

    missing: how many had none in the store; corrupt: how many had bytes that didn't verify, and were discarded.
    unusable: the chunk hashes of both.
    """

    missing: int = 0
    corrupt: int = 0
    unusable: list[str] = field(default_factory=list)


@dataclass
class MemoryReport:
    """The hashes of the chunks that entered the store's memory since the last report, and of those that left it."""

    entered: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


@dataclass
class VoteReport:
    """What the question's votes say about the choice, for evaluations.

    covered: the share of the question's attention to the tokens that could be chosen which the chosen ones have.
    evenness: of that attention (`ragkv.policies.evenness`). None where no vote was taken.
    """

    covered: float | None = None
    evenness: float | None = None


@dataclass
class Report:
    """What became of a job, one part for each reader; returned with the request's last output.

    policy: the one that was used, None where no prompt was fused. logprobs: of a ScoreTask, float32 bytes `[m, V]` for
    each continuation. problem: why a chunk, or with `failed` the whole prompt, was computed instead; None if all went
    well.
    """

    policy: Policy | None = None
    tokens: TokenReport = field(default_factory=TokenReport)
    stages: StageReport = field(default_factory=StageReport)
    chunks: ChunkReport = field(default_factory=ChunkReport)
    memory: MemoryReport = field(default_factory=MemoryReport)
    votes: VoteReport = field(default_factory=VoteReport)
    logprobs: list[bytes] = field(default_factory=list)
    problem: str | None = None
    failed: bool = False


_PREFIX_USE = TypeAdapter(PrefixUse)
_TASK: TypeAdapter[Task] = TypeAdapter(Annotated[Task, Field(discriminator="kind")])
_REPORT = TypeAdapter(Report)


def precompute_prompt(token_ids: list[int], task: PrecomputeTask | MeanTask) -> list[int]:
    """Return the prompt that has these tokens prefilled: with one more, for vLLM computes a prompt's last itself, and
    with blocks for the longest of a mean's contexts."""
    contexts = task.contexts if isinstance(task, MeanTask) else ()
    num_more = max((context[-1].end - context[0].start for context in contexts), default=0)
    return [*token_ids, *[token_ids[-1]] * (1 + num_more)]


def to_params(task: Task | None, prefix: PrefixUse, key: str, policy: Policy | None = None) -> dict[str, Any]:
    """Return what a request asks of the connector as its `kv_transfer_params`: plain data. key: the engine's."""
    params = {PREFIX_KEY: _PREFIX_USE.dump_python(prefix), KEY_KEY: key}
    params |= {} if policy is None else {POLICY_KEY: policy.label}
    return params if task is None else {**params, TASK_KEY: _TASK.dump_python(task)}


def is_trusted(params: dict[str, Any] | None, key: str) -> bool:
    """Return whether a request's `kv_transfer_params` have the engine's key: its task may read and write KV."""
    given = params.get(KEY_KEY) if params else None
    return bool(key) and isinstance(given, str) and hmac.compare_digest(given.encode(), key.encode())


def prefix_from_params(params: dict[str, Any] | None, key: str) -> PrefixUse:
    """Return how a request uses prefixes, by its `kv_transfer_params`; the default where they don't say.

    Without the engine's key a client may ask for `session` and `once`, not for what others pay for.
    """
    given = params.get(PREFIX_KEY) if params else None
    if given is None:
        return PrefixUse()
    if is_trusted(params, key):
        return _PREFIX_USE.validate_python(given)
    keep = given.get("keep") if isinstance(given, dict) else given
    return PrefixUse(keep) if keep in ("session", "once") else PrefixUse()


def task_from_params(params: dict[str, Any] | None, key: str) -> Task | None:
    """Return the task in a request's `kv_transfer_params`, None for one that has none, or not the engine's key."""
    if not params or TASK_KEY not in params or not is_trusted(params, key):
        return None
    return _TASK.validate_python(params[TASK_KEY])


def policy_from_params(params: dict[str, Any] | None) -> Policy | None:
    """Return the policy that a client names in its `kv_transfer_params`, as `{"policy": "none"}`; None if it doesn't.

    Raises ConfigError for one that is none.
    """
    given = params.get(POLICY_KEY) if params else None
    if given is None:
        return None
    if not isinstance(given, str):
        raise ConfigError(f"a policy is a text such as 'none' or 'guided:0.05', not {given!r}")
    return Policy.parse(given)


def report_to_params(report: Report | None, num_resumed: int = 0, num_lost: int = 0) -> dict[str, Any] | None:
    """Return the `kv_transfer_params` of a request's last output, plain data: the report, for how many tokens KV was
    loaded that was held while the request was preempted, and how many prefixes, of whichever requests, weren't stored
    as they were to be."""
    params: dict[str, Any] = {} if report is None else {REPORT_KEY: _REPORT.dump_python(report)}
    counts = {RESUMED_KEY: num_resumed, LOST_KEY: num_lost}
    return params | {key: count for key, count in counts.items() if count} or None


def report_from_params(params: dict[str, Any] | None) -> Report | None:
    """Return the report in an output's `kv_transfer_params`, None if it has none."""
    return _REPORT.validate_python(params[REPORT_KEY]) if params and REPORT_KEY in params else None


def resumed_from_params(params: dict[str, Any] | None) -> int:
    """Return for how many tokens KV was loaded that was held while the request was preempted."""
    return int(params.get(RESUMED_KEY, 0)) if params else 0


def lost_from_params(params: dict[str, Any] | None) -> int:
    """Return how many prefixes, of whichever requests, weren't stored as they were to be."""
    return int(params.get(LOST_KEY, 0)) if params else 0


def missing_kv(num_chunks: int, num_all: int) -> str:
    """Say that so many of all chunks had no usable KV, as answers report it."""
    return f"{num_chunks} of {num_all} chunks had no usable KV in the store"
