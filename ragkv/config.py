"""Settings: one validated tree. `ragkv.settings` loads it."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from ragkv.errors import ConfigError
from ragkv.machine import native_dtype

EMBEDDED_MODEL = "smollm2-135m-instruct"
EMBEDDED_EMBEDDER = "all-minilm-l6-v2"

MAIN = "main"  # the tenant of requests and documents that name none
TENANT_NAME = "^[a-z0-9][a-z0-9_-]{0,62}$"


class Section(BaseModel):
    """A section of the settings. What a setting means is its `description`, or, if that is long, its docstring."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ModelConfig(Section):
    """The generator, served by vLLM."""

    name: str = EMBEDDED_MODEL
    """Local folder, Hugging Face id, or the embedded model, which is the default"""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field("auto", validate_default=True)
    """Computation and KV dtype; auto: bfloat16, but float32 on a CPU without bfloat16 instructions, where that is about
    3 times as fast"""
    max_model_len: int | None = Field(None, ge=256, description="Context limit in tokens; none: the model's own")
    block_tokens: int | None = Field(None, ge=16, multiple_of=16)
    """Tokens of a block of vLLM's KV cache, the unit in which prefixes are found and come back; none: vLLM's own
    choice, 128 on CPU and 16 elsewhere. 32 on CPU suits short instructions, and makes the rest a little slower"""
    kv_cache_gib: float = Field(2.0, gt=0, description="Memory for vLLM's paged KV cache on CPU, in GiB")
    preemption: Literal["load", "recompute", "auto"] = "auto"
    """What becomes of requests that vLLM preempts because its KV cache is full: their KV is held in memory of the
    worker's and loaded when they come back (load), or computed anew (recompute); auto: whichever takes less time, as
    measured while serving"""
    preempted_gib: float = Field(1.0, gt=0)
    """Most memory for the KV of preempted requests, in GiB, taken only while there are some; what doesn't fit is
    computed anew"""
    gpu_memory_utilization: float = Field(0.85, gt=0, le=1, description="Share of GPU memory that vLLM may use")
    compile: bool = False
    """Let vLLM compile the model (slower start, faster decode); on CUDA, decoding uses CUDA graphs in any case"""
    thinking: bool = False
    """Let a model think before it answers, if its chat template lets it choose (Qwen3, SmolLM3). It takes longer, and
    needs a larger `answer.max_tokens`; for SmolLM3 documents are then indexed anew"""
    kernels: Literal["auto", "triton", "native", "torch"] = "auto"
    """Kernels for fusion: triton (on CUDA), native (C++, on CPU), torch (anywhere); auto: the first of these that is
    available"""

    def preemption_options(self) -> dict[str, Any]:
        """Return what vLLM's processes need to know of requests that are preempted, as plain data."""
        if self.preemption == "recompute":
            return {}
        return {"way": self.preemption, "held_bytes": round(self.preempted_gib * (1 << 30))}

    @field_validator("dtype")
    @classmethod
    def _resolve(cls, dtype: str) -> str:
        return native_dtype() if dtype == "auto" else dtype


class IndexConfig(Section):
    """How documents become chunks and vectors."""

    embedder: str = EMBEDDED_EMBEDDER
    """Local folder, Hugging Face id, or the embedded model, which is the default"""
    chunk_tokens: int = Field(512, ge=16, le=8192, description="Largest chunk, in the generator's tokens")
    chunk_overlap: int = Field(0, ge=0)
    """Tokens that neighbouring chunks share; fewer than `index.chunk_tokens`"""
    num_contexts: int = Field(4, ge=1, le=64)
    """Contexts in which a chunk's KV is precomputed: after the anchor, and for a mean after each of its nearest other
    chunks among up to two random ones; 1: only after the anchor, in a quarter of the time, less disk, more drift"""


class StoreConfig(Section):
    """Where chunks' KV is stored between requests."""

    codec: Literal["raw", "int8", "fp8", "int4"] = "int8"
    """How new KV is stored: as 8-bit numbers with scales; with int4 means (`index.num_contexts`) as 4-bit numbers in
    half of that space, for models that bear it; or unchanged in three to four times the space. After a change between
    raw and the others, KV is made again when it is asked for"""
    disk_gib: float | None = Field(None, gt=0)
    """Disk space for chunks' KV, in GiB. When it is full, the KV worth least (`store.eviction`) is evicted; a request
    that needs it prefills it, and it is precomputed again in idle time. None: no limit"""
    memory_gib: float = Field(1.0, ge=0)
    """Memory for KV that is ready to use, in GiB, reserved when vLLM starts (pinned on CUDA); when it is full, the KV
    worth least is dropped. 0: none, only the system's page cache"""
    eviction: Literal["gdsf", "lru", "lfu", "lfuda"] = "gdsf"
    """How the worth of KV is ranked: gdsf by uses times cost to recompute over size, with ageing; lru by last use; lfu
    by uses; lfuda by uses, with ageing"""
    prefix_gib: float = Field(4.0, ge=0)
    """Disk space for exact prefixes, in GiB: conversations and instructions that come back, unchanged and apart from
    chunks' KV; those unused longest are evicted. 0: none are kept"""
    prefix_gib_per_hour: float = Field(8.0, gt=0)
    """How much of them is written in an hour at most, in GiB, so that the disk isn't worn out"""
    remote: str | None = None
    """Bucket or shared folder behind the disk, for KV that several machines share: s3://BUCKET/PREFIX,
    gs://BUCKET/PREFIX, az://CONTAINER/PREFIX or file:///FOLDER ([how](deployment.md#one-bucket-for-many-machines)).
    Default: none"""
    remote_timeout_s: float = Field(10.0, gt=0, le=300)
    """Longest time for a request to the bucket, in seconds; sending a chunk's KV may take six times as long"""

    remote_prefixes: bool = False
    """Share exact prefixes in `store.remote` too, so that a conversation or an instruction goes on at another machine.
    They have what users have said, and a lifecycle rule is what keeps them few
    ([more](deployment.md#one-bucket-for-many-machines))"""

    @property
    def shares_prefixes(self) -> bool:
        return self.remote is not None and self.remote_prefixes and self.prefix_gib > 0

    @property
    def joins(self) -> bool:
        """Whether one entry holds a chunk's mean and its KV after the anchor alone: where neither is exact anyway."""
        return self.codec != "raw"

    @property
    def disk_bytes(self) -> int | None:
        return None if self.disk_gib is None else round(self.disk_gib * (1 << 30))

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of a `DiskStore` that writes, as plain data."""
        return {"codec": self.codec, "disk_bytes": self.disk_bytes, "eviction": self.eviction}

    def worker_options(self) -> dict[str, Any]:
        """Return the keyword arguments of the `DiskStore` of a worker that serves requests."""
        return {**self.options(), "memory_bytes": round(self.memory_gib * (1 << 30))}

    def prefix_options(self, folder: Path) -> dict[str, Any]:
        """Return what vLLM's processes need to know of exact prefixes, which are kept in this folder, as plain data."""
        limits = {"disk_bytes": self.prefix_gib, "bytes_per_hour": self.prefix_gib_per_hour}
        return {"folder": str(folder), **{name: round(gib * (1 << 30)) for name, gib in limits.items()}}


class RetrievalConfig(Section):
    """How a question finds its chunks."""

    mode: Literal["vector", "hybrid"] = "vector"
    """How chunks are searched: by vectors, or by vectors and words (BM25) with their ranks fused"""
    reranker: str | None = None
    """Cross-encoder that reorders the hits: local folder or Hugging Face id. Default: none"""
    candidates: int = Field(50, ge=1, le=1000)
    """Hits of each search that are fused or reordered; top_k if that is more"""


class AnswerConfig(Section):
    """Defaults of a request."""

    policy: str = "guided"
    """Which cached tokens to recompute: none, query, full, … ([policies](policies.md))"""
    budget: float = Field(0.05, ge=0, le=1)
    """Share of the cached tokens to recompute (not for `none` and `full`)"""
    top_k: int = Field(6, ge=1, le=100, description="Chunks to retrieve")
    prefix: Literal["auto", "session", "shared", "once"] = "auto"
    """What of a request is kept as an exact prefix when it ends (`store.prefix_gib`), unless it says so itself: what
    has come back before (auto), all for the user goes on from here (session), the prompt for others begin with it too
    (shared), or nothing (once)"""
    controller: bool = True
    """Let vLLM prefill whatever it prefills faster than fusion would take, by a profile that `ragkv index`, `serve` and
    `profile` measure once for each machine, model, codec and policy"""
    max_tokens: int = Field(128, ge=1, description="Longest answer in tokens")
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    """How much less likely a token becomes each time that the answer has it, unless a request says. Default: 1 for the
    embedded model, which would repeat a sentence until it is cut off, else 0"""
    timeout_s: float | None = Field(None, gt=0)
    """Longest time for a whole answer, in seconds. Default: no limit"""
    max_drift: float | None = Field(None, gt=0)
    """Quality target: the largest estimated drift of an answer from full prefill's, in nats. An answer that is above
    it is begun again with three times the budget, and at last by full prefill; its first 16 tokens wait for the
    estimate. Default: no estimate"""


class LearningConfig(Section):
    """Learning passages from the prompts of anybody's `vllm serve` ([how](plain-vllm.md#learning-from-prompts))."""

    on: bool = False
    """Precompute passages that recur in several contexts, in idle time, and reuse their KV from then on"""
    min_tokens: int = Field(64, ge=32, description="Shortest passage that is learnt, in tokens")
    max_tokens: int = Field(512, ge=64, le=8192)
    """Longest passage, in tokens; of longer ones the parts are learnt"""
    tokens_per_hour: int = Field(1_000_000, ge=0)
    """How many tokens of passages are learnt in an hour at most, so that neither processor nor disk is worn out. 0:
    nothing new is learnt, and what was learnt is reused"""


class CanaryConfig(Section):
    """Comparing answers with those of full prefill, in idle time."""

    share: float = Field(0.01, ge=0, le=1, description="Share of the answers that are compared")
    tokens: int = Field(8, ge=1, le=64, description="Tokens compared, from the beginning of the answer")
    max_kl: float = Field(0.5, gt=0)
    """Mean drift, in nats, of the last 20 answers above which the budget rises"""
    max_budget: float = Field(0.4, ge=0, le=1, description="Highest budget that it may rise to")


Keys = dict[str, Annotated[str, Field(pattern="^[0-9a-f]{64}$")]]


class ServerConfig(Section):
    host: str = "127.0.0.1"
    """Address to listen on. One that other machines reach needs `server.keys`"""
    port: int = Field(8090, ge=1, le=65535, description="Port to listen on")
    keys: Keys = {}
    """SHA-256 of each API key, by its holder's name (`ragkv key NAME`). None: no key is needed"""
    operator_keys: Keys = {}
    """SHA-256 of each operator's key, by its holder's name (`ragkv key --operator NAME`), for the calls below
    `/v1/store` and nothing else. None: these calls don't exist"""
    max_requests: int = Field(256, ge=1)
    """Questions answered at a time; more are refused with a time to wait"""
    log: Literal["text", "json"] = Field("text", description="How requests and events are logged, on stderr")
    max_upload_mib: float = Field(32.0, gt=0, description="Largest upload of documents, in MiB")
    max_pause_s: float = Field(60.0, gt=0, le=86_400)
    """How long to wait for a client that stops sending its request or reading its answer, in seconds"""
    indexing_patience_s: float = Field(60.0, ge=0)
    """While questions are answered without a pause: how long indexing waits for one, in seconds, before it precomputes
    one more chunk beside them. Small uploads don't wait. 0: nothing waits, and answers are slower meanwhile"""


class TenantConfig(Section):
    """A tenant with documents of its own. Tenant `main` has the home's own documents and `server.keys`."""

    keys: Keys = Field({}, description="As `server.keys`")
    reads: list[str] = Field([], description="Other tenants whose documents are searched too")
    requests_per_minute: int | None = Field(None, ge=1, description="Limit of questions and searches. Default: none")
    tokens_per_minute: int | None = Field(None, ge=1)
    """Limit of prompts' and answers' tokens. Default: none"""
    concurrent_requests: int | None = Field(None, ge=1, description="Limit of questions at a time. Default: none")
    documents_mib: float | None = Field(None, ge=0)
    """Limit of all its documents' text, in MiB. Default: none"""


class FrontConfig(Section):
    """`ragkv front`, one address before two servers."""

    prefill: str | None = None
    """Address of the `ragkv serve` that computes prompts, as http://127.0.0.1:8091"""
    decode: str | None = None
    """Address of the `ragkv serve` that loads them and decodes"""
    patience_s: float = Field(120.0, ge=0)
    """How long a request waits for a server that answers, in seconds"""


class Config(BaseSettings):
    """All settings. Functions take the section that they need. `Config()` reads the environment, but no file."""

    model_config = SettingsConfigDict(
        env_prefix="RAGKV_",
        env_nested_delimiter="__",
        env_ignore_empty=True,
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
    )

    home: Path = Field(Path("~/.ragkv"), description="Folder of models, documents and KV")
    model: ModelConfig = ModelConfig()
    index: IndexConfig = IndexConfig()
    store: StoreConfig = StoreConfig()
    retrieval: RetrievalConfig = RetrievalConfig()
    answer: AnswerConfig = AnswerConfig()
    canary: CanaryConfig = CanaryConfig()
    learning: LearningConfig = LearningConfig()
    server: ServerConfig = ServerConfig()
    front: FrontConfig = FrontConfig()
    tenants: dict[Annotated[str, Field(pattern=TENANT_NAME)], TenantConfig] = {}
    """Tenants by name; each has documents, KV, conversations and limits of its own"""

    @property
    def answer_defaults(self) -> AnswerConfig:
        """What a request doesn't choose, with what depends on the model filled in."""
        if self.answer.frequency_penalty is not None:
            return self.answer
        return self.answer.model_copy(update={"frequency_penalty": float(self.model.name == EMBEDDED_MODEL)})

    @field_validator("home")
    @classmethod
    def _expand(cls, home: Path) -> Path:
        return home.expanduser()

    @field_validator("tenants")
    @classmethod
    def _check_reads(cls, tenants: dict[str, TenantConfig]) -> dict[str, TenantConfig]:
        for name, tenant in tenants.items():
            for other in tenant.reads:
                if other == name or other not in {MAIN, *tenants}:
                    known = ", ".join(sorted({MAIN, *tenants} - {name}))
                    raise ValueError(f"{name} reads {other!r}; the other tenants are {known}")
        return tenants

    def holders(self) -> dict[str, str]:
        """Return the tenant of each API key, by the key's hash. Raises ConfigError for a key of two tenants."""
        holders: dict[str, str] = {}
        each = [(MAIN, self.server.keys), *((name, tenant.keys) for name, tenant in self.tenants.items())]
        for tenant, keys in each:
            for holder, digest in keys.items():
                if holders.setdefault(digest, tenant) != tenant:
                    raise ConfigError(f"{holder}'s key of {tenant} is also a key of {holders[digest]}; make another")
        return holders

    def operators(self) -> dict[str, str]:
        """Return the holder of each operator's key, by the key's hash. Raises ConfigError for a key of a tenant."""
        tenants = self.holders()
        for holder, digest in self.server.operator_keys.items():
            if digest in tenants:
                raise ConfigError(
                    f"{holder}'s operator key is also a key of the tenant {tenants[digest]}; make another"
                )
        return {digest: holder for holder, digest in self.server.operator_keys.items()}
