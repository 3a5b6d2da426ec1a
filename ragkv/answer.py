"""Questions and answers as data: what the CLI, the server and the evaluations exchange with the pipeline."""

from dataclasses import dataclass, field
from typing import Any, Literal

from ragkv.config import AnswerConfig
from ragkv.controller.cost_model import Plan
from ragkv.engine.task import Keep
from ragkv.policies import Policy
from ragkv.store.eviction import Hint

HandOver = Literal["give", "take"]
HAND_OVERS: dict[str, str] = {
    "give": "compute the prompt and one token, and end when the prompt's KV is stored, for another server",
    "take": "another server has just done so: look for that KV also where it isn't known to be",
}
# Where a token's KV came from: vLLM's prefix cache; the store, from memory or disk; the store, but recomputed because
# the token matters; or no stored KV, as for the question.
Kind = Literal["prefix", "stored", "memory", "disk", "recomputed", "computed"]


@dataclass(frozen=True)
class Turn:
    """An earlier question and its answer."""

    question: str
    answer: str


@dataclass(frozen=True)
class Conversation:
    """A question with the turns before it, oldest first. instruction: what the user wants all answers to follow."""

    question: str
    turns: tuple[Turn, ...] = ()
    instruction: str = ""

    @property
    def questions(self) -> list[str]:
        """Oldest first."""
        return [*(turn.question for turn in self.turns), self.question]


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters, named as in vLLM; greedy by default."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    @classmethod
    def of(cls, defaults: AnswerConfig, **chosen: Any) -> "Sampling":
        """Return the configured parameters, but for those that were chosen."""
        return cls(**{"frequency_penalty": defaults.frequency_penalty or 0.0, **chosen})


@dataclass(frozen=True)
class AnswerOptions:
    """What a caller may choose for one question.

    fresh: use no KV of earlier requests (vLLM's prefix cache, stored prefixes), so that a measured time is that of a
    first request. keep: what of the request is kept as an exact prefix (`ragkv.engine.task.KEEPS`); None: what has come
    back before. hint: how the KV of the chunks in the prompt is treated from now on when room is needed; None leaves it
    as it was. explain: return where the KV of each prompt token came from. timeout_s: for the whole answer. max_drift:
    the quality target (`ragkv.quality_target`), in nats; None estimates no drift. hand_over: this process
    or another prefills the prompt, and the other one decodes (`HAND_OVERS`).
    """

    policy: Policy
    top_k: int
    max_tokens: int
    fresh: bool = False
    hint: Hint | None = None
    sampling: Sampling = Sampling()
    explain: bool = False
    timeout_s: float | None = None
    max_drift: float | None = None
    keep: Keep | None = None
    hand_over: HandOver | None = None


@dataclass(frozen=True)
class Source:
    """A retrieved chunk. ordinal: its position in its document, from 0. score: the inner product of the embeddings.
    corpus: the tenant whose document it is, None for the asking tenant's own."""

    document: str
    title: str
    chunk: int
    ordinal: int
    score: float
    text: str
    corpus: str | None = None


@dataclass(frozen=True)
class Usage:
    """Token counts. Prefix, reused and recomputed tokens add up to `prompt_tokens`.

    prefix_tokens: with the KV of an earlier request that began alike; reused_tokens: from the store, unchanged;
    recomputed_tokens: computed now. memory_tokens: those whose stored KV was ready in memory, whether reused or
    recomputed. stored_prefix_tokens: those of the prefix that vLLM's own cache didn't have any more, but the disk.
    """

    prompt_tokens: int
    prefix_tokens: int
    reused_tokens: int
    recomputed_tokens: int
    completion_tokens: int = 0
    memory_tokens: int = 0
    stored_prefix_tokens: int = 0


@dataclass(frozen=True)
class Run:
    """Prompt tokens `[start, end)` of one kind. source: which of the answer's sources they belong to, if any."""

    start: int
    end: int
    kind: Kind
    source: int | None


@dataclass(frozen=True)
class TokenOrigins:
    """The text of each prompt token, and runs that cover all tokens, in order."""

    tokens: list[str]
    runs: list[Run]


@dataclass(frozen=True)
class Timings:
    """Milliseconds by stage.

    ttft_ms: from the submission of the prompt to the first token; it includes load (read, check, rotate, scatter),
    probe (question over the stale cache) and recompute. retrieve_ms: from the question to the submission.
    """

    retrieve_ms: float = 0.0
    load_ms: float = 0.0
    probe_ms: float = 0.0
    recompute_ms: float = 0.0
    ttft_ms: float = 0.0
    total_ms: float = 0.0


@dataclass(frozen=True)
class Answer:
    """A finished answer.

    policy: the one really used. fallback: what the answer lacks, if anything: KV that wasn't reused, sources that had
    no room or weren't found. plan: what the controller expected, None if it wasn't asked. origins: given if the
    question asked for an explanation. drift_estimate: in nats (`ragkv.quality_target`), None if it wasn't asked for or
    there is nothing to estimate it by. attempts: how often the answer was begun, until its estimate was low enough.
    reasoning: what the model thought before; not part of `text`. hint_refused: why the KV isn't treated as was asked,
    None if it is.
    """

    text: str
    sources: list[Source]
    policy: Policy
    usage: Usage
    timings: Timings
    finish_reason: Literal["stop", "length"]
    fallback: str | None = None
    plan: Plan | None = None
    origins: TokenOrigins | None = None
    drift_estimate: float | None = None
    attempts: int = 1
    reasoning: str = ""
    hint_refused: str | None = None


@dataclass(frozen=True)
class Retrieved:
    """What was found for a question, best first; the first event of a stream, before any token."""

    sources: list[Source] = field(default_factory=list)


@dataclass(frozen=True)
class Reasoning:
    """A piece of what the model thinks before it answers (`ragkv.reasoning`)."""

    text: str


@dataclass(frozen=True)
class Delta:
    """A piece of the answer's text."""

    text: str


AnswerEvent = Retrieved | Reasoning | Delta | Answer
