"""What an answer is made of: the data that the pipeline hands to the CLI, the server and the evaluations."""

from dataclasses import dataclass, field
from typing import Literal

from ragkv.controller.cost_model import Plan
from ragkv.policies import Policy
from ragkv.store.eviction import Hint

Kind = Literal["prefix", "memory", "disk", "recomputed", "computed"]
KINDS: dict[Kind, str] = {
    "prefix": "in vLLM's prefix cache",
    "memory": "stored KV that lay ready in memory",
    "disk": "stored KV from disk",
    "recomputed": "stored, and computed again because it matters",
    "computed": "no stored KV: the question, and what was missing",
}


@dataclass(frozen=True)
class Turn:
    """What was asked, and answered."""

    question: str
    answer: str


@dataclass(frozen=True)
class Conversation:
    """A question, what went before it, oldest first, and what its author wants heeded in all answers."""

    question: str
    turns: tuple[Turn, ...] = ()
    instruction: str = ""

    @property
    def questions(self) -> list[str]:
        """Oldest first."""
        return [*(turn.question for turn in self.turns), self.question]


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen, in vLLM's words; greedily by default."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0


@dataclass(frozen=True)
class AnswerOptions:
    """What a caller may choose for one question.

    `fresh` keeps vLLM's prefix cache out of it, so that a time measured is the time of a first request. `hint`: how the
    KV of the chunks that it finds is to be treated from now on when room is needed; None leaves it as it was.
    `explain`: say of each prompt token where its KV came from. `timeout_s`: for the whole answer.
    """

    policy: Policy
    top_k: int
    max_tokens: int
    fresh: bool = False
    hint: Hint | None = None
    sampling: Sampling = Sampling()
    explain: bool = False
    timeout_s: float | None = None


@dataclass(frozen=True)
class Source:
    """A retrieved chunk, in the order of the prompt. `score` is the inner product of the embeddings. corpus: whose
    document it is, None for the asker's own."""

    document_id: str
    title: str
    chunk_id: int
    ordinal: int
    score: float
    text: str
    corpus: str | None = None


@dataclass(frozen=True)
class Usage:
    """Where each prompt token's KV came from: prefix, reused and recomputed tokens add up to `prompt_tokens`.

    prefix_tokens: vLLM's own prefix cache; reused_tokens: the store, as it was; recomputed_tokens: computed now.
    memory_tokens: whose stored KV lay ready in memory, reused as it was or not.
    """

    prompt_tokens: int
    prefix_tokens: int
    reused_tokens: int
    recomputed_tokens: int
    completion_tokens: int = 0
    memory_tokens: int = 0


@dataclass(frozen=True)
class Run:
    """Prompt tokens `[start, end)` of one kind. source: which of the answer's sources they belong to, if any."""

    start: int
    end: int
    kind: Kind
    source: int | None


@dataclass(frozen=True)
class TokenOrigins:
    """The text of each prompt token, and runs that cover them all, in order."""

    tokens: list[str]
    runs: list[Run]


@dataclass(frozen=True)
class Timings:
    """Milliseconds by stage. `ttft_ms` runs from the submission of the prompt to the first token; it includes load
    (read, check, rotate, scatter), probe (question over the stale cache) and recompute. `retrieve_ms` comes before."""

    retrieve_ms: float = 0.0
    load_ms: float = 0.0
    probe_ms: float = 0.0
    recompute_ms: float = 0.0
    ttft_ms: float = 0.0
    total_ms: float = 0.0


@dataclass(frozen=True)
class Answer:
    """A finished answer. `policy` is what was really used; `fallback` says what kept KV from being reused, if any.

    plan: what the controller expected, None if it wasn't asked. strip: of a question that is to be explained.
    """

    text: str
    sources: list[Source]
    policy: str
    usage: Usage
    timings: Timings
    finish_reason: str
    fallback: str | None = None
    plan: Plan | None = None
    origins: TokenOrigins | None = None


@dataclass(frozen=True)
class Retrieved:
    """First event of a stream: the sources, before any token."""

    sources: list[Source] = field(default_factory=list)


@dataclass(frozen=True)
class Delta:
    """A piece of the answer's text."""

    text: str


AnswerEvent = Retrieved | Delta | Answer
