# ruff: noqa: RUF009 - `option` returns a dataclass field
"""What each experiment can be asked: a dataclass of options for each, which is its command's help.

Nothing heavy is imported: vLLM must find its environment prepared, and `--help` be quick.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ragkv.evals import parsing
from ragkv.evals.experiment import option

if TYPE_CHECKING:
    from ragkv.evals.arms import Arm
    from ragkv.policies import Policy


@dataclass(frozen=True)
class Ttft:
    """Time to first token by policy, next to vLLM's own prefill of the same prompt."""

    tokens: tuple[int, ...] = option(
        "Lengths of the prompt, in tokens.", "1024,2048,4096,7168", parse=parsing.whole_numbers
    )
    policies: tuple["Policy", ...] = option(
        "Policies with their budgets.", "full,query:0.15,query:0.05,none", parse=parsing.policies
    )
    repeats: int = option("Measurements of which each median is taken.", 5, least=1)
    cold: bool = option("Also with KV from the disk instead of memory.", False)
    random_weights: bool = option("Of the model only config.json and the tokenizer are read.", False)


@dataclass(frozen=True)
class Quality:
    """Drift from full prefill and task scores by policy, on real data."""

    dataset: str = option(
        "musique, musique_s, musique_short, xquad, xquad_apart, samsum, multi_news, a .jsonl file or HF id."
    )
    data: Path | None = option("Folder that holds the named datasets.", None)
    examples: int = option("How many examples, from the first on.", 50, least=1)
    policies: tuple["Arm", ...] = option(
        "POLICY@KV with commas between; KV is alone, anchor, random, near or mixed; mixed/CODEC: encoded anew.",
        "none,guided:0.05,cacheblend:0.15@alone",
        parse=parsing.arms,
    )
    captures: int = option("Contexts over which a chunk's KV is averaged.", 4, least=1)
    codec: str | None = option("How KV is stored: raw, int8, fp8 or int4.", None, setting="store.codec")
    ttft_examples: int = option("On how many examples times are taken.", 10, least=0)
    out: Path | None = option("Results by example; a run continues from what it holds.", None)
    estimate: bool = option("Also estimate the drift, as the quality target does, and rank it beside the truth.", False)
    beginning: str | None = option(
        "Instruction of the prompts; chunks are precomputed after the dataset's own, as for anybody's vLLM.", None
    )


@dataclass(frozen=True)
class Retrieval:
    """Recall by vectors and by vectors and words, and of each with the reranker if one is set. Needs no vLLM."""

    dataset: str = option("mtrag, xquad, or xquad in another language: xquad.de.")
    data: Path = option("Folder that holds the datasets.")
    depths: tuple[int, ...] = option(
        "Among how many chunks to look for the passages.", "3,5", parse=parsing.whole_numbers
    )


@dataclass(frozen=True)
class Cache:
    """Hit rates of eviction policies over a trace, next to Belady's optimum. Needs no model."""

    trace: str = option("zipf (documents), or a file like Mooncake's trace.", "zipf")
    shares: tuple[float, ...] = option(
        "Cache sizes, as shares of all distinct chunks.", "0.01,0.05,0.1,0.25", parse=parsing.numbers
    )


@dataclass(frozen=True)
class Find:
    """How long it takes to find chunks in a prompt's tokens, by the number of chunks. Needs no model."""

    tokens: tuple[int, ...] = option(
        "Lengths of the prompt, in tokens.", "2048,8192,32768,131072", parse=parsing.whole_numbers
    )
    chunks: tuple[int, ...] = option("How many chunks there are.", "10000,1000000", parse=parsing.whole_numbers)
    chunk_tokens: int = option("Tokens of a chunk.", 256, least=16)
    repeats: int = option("Measurements of which each median is taken.", 30, least=1)


@dataclass(frozen=True)
class Learn:
    """Plain vLLM with passages that recur: TTFT as they are learnt, next to vLLM alone."""

    tokens: int = option("Tokens of a prompt.", 4096, least=600)
    passages: int = option("How many passages there are.", 40, least=1)
    requests: int = option("How many requests.", 60, least=1)
    zipf: float = option("By how much the passages' frequencies fall: the exponent.", 1.0)
    pause_s: float = option("Between two requests, in seconds.", 4.0)


@dataclass(frozen=True)
class Swap:
    """Recompute or load: full prefill, fusion, and the controller's choice between them."""

    tokens: tuple[int, ...] = option(
        "Lengths of the prompt, in tokens.", "64,128,256,512,1024,2048,4096", parse=parsing.whole_numbers
    )
    shares: tuple[float, ...] = option("Shares of the chunks that are stored.", "0,0.5,1", parse=parsing.numbers)
    near: tuple[float, ...] = option("Shares of these that are in the page cache.", "1", parse=parsing.numbers)
    chunk_tokens: tuple[int, ...] = option("Tokens of a chunk, so of a record.", "512", parse=parsing.whole_numbers)
    batches: tuple[int, ...] = option("Requests at a time.", "1", parse=parsing.whole_numbers)
    bandwidths: tuple[float | None, ...] = option(
        "Of the store's reads, in MiB/s; 0 is the disk's own.", "0,400,50", parse=parsing.bandwidths
    )
    repeats: int = option("Measurements of which each median is taken, at least.", 3, least=1)
    out: Path | None = option("A picture of it.", None)


@dataclass(frozen=True)
class Timeline:
    """Draw what one request reads, loads and computes, and when: with KV from the disk and from memory."""

    tokens: int = option("Length of the prompt, in tokens.", 4096, least=1)
    policy: "Policy" = option("With its budget.", "query:0.05", parse=parsing.policy)
    out: Path = option("The picture.", Path("timeline.png"))


@dataclass(frozen=True)
class Faults:
    """Kill processes that use a KV store, damage its files, fill its disk, and see what is lost. Needs no model."""

    kills: int = option("How often processes that use a store are killed.", 200, least=0)
    flips: int = option("How often a bit is flipped or a file cut off.", 1000, least=0)
    table: int = option("How often the table of uses is damaged in each way, at rest and while open.", 0, least=0)
    seed: int = option("Of the first round; the others count on from it.", 0, least=0)


@dataclass(frozen=True)
class Store:
    """How fast a store on this disk writes and reads, next to the disk and the memory themselves. Needs no model."""

    records: tuple[int, ...] = option(
        "Sizes of a record, in KiB: one layer of a chunk.", "64,256,1024,2048", parse=parsing.whole_numbers
    )
    mib: int = option("How much is stored.", 256, least=1)
    churn: float = option("How many times that is deleted and written anew.", 10.0, least=0)
    repeats: int = option("Measurements of which each median is taken.", 3, least=1)


@dataclass(frozen=True)
class Churn:
    """Index, change, remove and ask within small budgets; kill it, and see what is lost and what grows."""

    seconds: float = option("How long to work, after the kills.", 300.0, least=1)
    kills: int = option("How often the process is killed at work before that.", 0, least=0)
    disk_gib: float = option("Budget of the store's disk.", 0.5, setting="store.disk_gib")
    memory_gib: float = option("Budget of the store's memory.", 0.125, setting="store.memory_gib")
    seed: int = option("Of everything at random.", 0, least=0)


@dataclass(frozen=True)
class Soak:
    """Serve, and ask, upload, replace, delete and leave at random; see what fails, is lost, or grows."""

    seconds: float = option("How long, once the server is ready.", 900.0, least=1)
    clients: int = option("How many at a time.", 6, least=1, most=24)
    memory_gib: float = option("Budget of the store's memory.", 0.125, setting="store.memory_gib")
    seed: int = option("Of everything at random.", 0, least=0)


@dataclass(frozen=True)
class Uploads:
    """While a large file is indexed: how long a small upload takes, and how the tokens of an answer come."""

    mib: float = option("Size of the large file, in MiB.", 10.0, least=0.1)
    uploads: int = option("Small uploads.", 5, least=1, most=20)
    answers: int = option("Answers, one after the other, without and with the large file in work.", 4, least=1)
    tokens: int = option("Longest answer, in tokens.", 200, least=2)


@dataclass(frozen=True)
class Stalls:
    """While large requests come in: how long the server's event loop stands still, and another answer's tokens."""

    mib: float = option("Size of each request, in MiB.", 5.0, least=0.1, most=7)


@dataclass(frozen=True)
class Load:
    """Questions that arrive at random, next to vLLM alone: how long to the first token, and between others' tokens."""

    streams: int = option("Answers being decoded while questions arrive, at first.", 8, least=0)
    questions: int = option("Of each measurement.", 16, least=4)
    shares: tuple[float, ...] = option(
        "Rates of arrival, as shares of what each server answers one after the other.",
        "0.4,0.6,0.8,0.95",
        parse=parsing.numbers,
    )
    top_k: int = option("Chunks of a question, some 500 tokens each.", 8, least=1)
    seed: int = option("Of the questions and the arrivals.", 0)
    out: Path | None = option("A picture of it.", None)


@dataclass(frozen=True)
class Chat:
    """Real conversations that leave vLLM's memory between turns, and after a restart, next to vLLM alone."""

    data: Path = option("Folder that holds sharegpt/.")
    conversations: int = option("How many, from the first on that has three turns.", 24, least=1)
    least_tokens: int = option("Of a conversation's last prompt.", 0, least=0)
    turns: int | None = option("The last ones of each that are asked; none: all.", None, least=2)
    users: int = option("How many talk at a time.", 4, least=1)
    think_s: float = option("Mean time between an answer and the next question, in seconds.", 0.5, least=0)
    tokens: int = option("Of an answer.", 16, least=1)
    kv_tokens: int = option("Tokens whose KV fits into vLLM's memory.", 6144, least=1024)
    shared: float = option("Share of the conversations that begin with a common text.", 0.0, least=0, most=1)
    uncached: bool = option("Also of vLLM without its prefix cache.", False)
    lmcache: bool = option("Also of LMCache, which has to be installed beside ragkv.", False)


BUCKETS = ("disk", "open", "slow", "changing", "silent", "closed")
DAMAGES = (
    "a flipped bit",
    "a file cut off",
    "a lost file",
    "a full disk",
    "a slow bucket",
    "a bucket that goes away",
    "a damaged object",
)
_damages = parsing.among(*DAMAGES)


@dataclass(frozen=True)
class Survival:
    """Whether conversations get vLLM's own tokens through restarts, kills, eviction and damage to their stored KV."""

    data: Path = option("Folder that holds sharegpt/.")
    conversations: int = option("How many, from the first on that has three turns.", 100, least=0)
    users: int = option("How many talk at a time.", 8, least=1)
    turns: int = option("Of a conversation, at most.", 4, least=2)
    tokens: int = option("Of an answer.", 24, least=1)
    kv_tokens: int = option("Tokens whose KV fits into vLLM's memory.", 2560, least=1024)
    damages: int = option("How often stored KV is damaged in each way.", 100, least=0)
    kinds: tuple[str, ...] = option("In which ways.", ",".join(DAMAGES), parse=_damages)
    seed: int = option("Of the moments and the damages.", 0, least=0)


@dataclass(frozen=True)
class Prompts:
    """Whether random prompts of plain vLLM with the connector get vLLM's own tokens, but for those that are fused."""

    requests: int = option("How many.", 500, least=1)
    at_once: int = option("Asked at a time.", 8, least=1)
    tokens: int = option("Of an answer.", 32, least=1)
    kv_tokens: int = option("Tokens whose KV fits into vLLM's memory.", 3072, least=2048)
    seed: int = option("Of the prompts.", 0, least=0)


@dataclass(frozen=True)
class Analytics:
    """Many short texts behind one instruction, while it is in memory and after a restart, next to vLLM alone."""

    data: Path = option("Folder that holds tweeteval/.")
    tokens: tuple[int, ...] = option(
        "Lengths of the instruction, in tokens; texts without one, which share nothing, follow. 0: these alone.",
        "100,500,2000",
        parse=partial(parsing.whole_numbers, least=0),
    )
    requests: int = option("Of a batch.", 64, least=4)
    repeats: int = option("Batches of which each median is taken.", 5, least=1)
    uncached: bool = option("Also of vLLM without its prefix cache.", False)
    lmcache: bool = option("Also of LMCache, which has to be installed beside ragkv.", False)


@dataclass(frozen=True)
class Pressure:
    """More requests at once than vLLM's memory holds: what it preempts comes back by load or by recompute."""

    requests: int = option("All sent at once.", 32, least=2)
    tokens_in: tuple[int, ...] = option(
        "Lengths of the prompts; no two begin alike.", "375", parse=parsing.whole_numbers
    )
    tokens_out: int = option("Of an answer.", 256, least=2)
    shares: tuple[float, ...] = option(
        "Memory for KV, as shares of what all requests take in the end.", "0.12,0.25,0.5", parse=parsing.numbers
    )
    block_tokens: tuple[int, ...] = option("Sizes of vLLM's blocks.", "128", parse=parsing.whole_numbers)
    ways: tuple[str, ...] = option(
        "Of load, recompute, auto; vLLM alone comes first.", "recompute,load,auto", parse=parsing.ways
    )
    repeats: int = option("Times that all is sent to each, to new engines; the fastest counts.", 1, least=1)
    out: Path | None = option("A picture of it.", None)


@dataclass(frozen=True)
class Preempted:
    """What it costs a preempted request to come back: copies of its KV, or vLLM's prefill."""

    block_tokens: tuple[int, ...] = option("Sizes of vLLM's blocks.", "32,128", parse=parsing.whole_numbers)
    tokens: tuple[int, ...] = option("Lengths of the sequence.", "512,2048", parse=parsing.whole_numbers)
    swapped: tuple[int, ...] = option(
        "How many of its last tokens have no KV.", "128,512,2048", parse=parsing.whole_numbers
    )
    repeats: int = option("Measurements of which each median is taken.", 3, least=1)


@dataclass(frozen=True)
class Batch:
    """Requests in the order of `ragkv batch`, next to the order in which they came, on the same engine."""

    data: Path = option("Folder that holds tweeteval/ and xquad/.")
    requests: int = option("Of each mix.", 48, least=8)
    tokens_in: int = option("Of the prompts that are made up, of which eight each share a beginning.", 600, least=128)
    sharing: tuple[float, ...] = option("Shares of these prompts that are shared.", "0,0.5,0.9", parse=parsing.numbers)
    ratios: tuple[float, ...] = option(
        "Tokens of these prompts for each one of their answers.", "10,2", parse=parsing.numbers
    )
    kv_tokens: int = option("Memory for KV, in tokens.", 6144, least=2048)
    repeats: int = option("Times that each mix goes in each order, of which the median counts.", 3, least=1)
    out: Path | None = option("A picture of the memory in use over time.", None)


@dataclass(frozen=True)
class Remote:
    """Two homes that share a bucket, and what a question costs while the bucket is slow, silent or gone."""

    states: tuple[str, ...] = option(
        "Of the bucket; disk: the KV is there already.", ",".join(BUCKETS), parse=parsing.among(*BUCKETS)
    )
    documents: int = option("How many, of some 600 tokens each.", 12, least=1, most=40)
    questions: int = option("In each state.", 6, least=1, most=40)
    top_k: int = option("Chunks of a question.", 4, least=1)
    busy: bool = option("Another client asks without a pause meanwhile.", False)


@dataclass(frozen=True)
class BrokenBatch:
    """A batch that is killed again and again, next to the same one left alone: each answer once, and the same."""

    data: Path = option("Folder that holds tweeteval/.")
    requests: int = option("How many.", 10_000, least=2)
    kills: int = option("How often its processes are killed, each time at a random number of answers.", 10, least=0)
    tokens: int = option("Of an answer, at most.", 2, least=1)
    seed: int = option("Of the moments.", 0, least=0)


@dataclass(frozen=True)
class Rag:
    """Questions about documents of unlike popularity that arrive at random, next to vLLM alone and LMCache."""

    data: Path = option("Folder that holds musique/.")
    documents: int = option("How many, of a chunk each.", 48, least=2)
    exponent: float = option("Of Zipf's law of their popularity.", 0.9, least=0)
    top_k: int = option("Documents of a question.", 8, least=1)
    chunk_tokens: int = option("Of a document.", 480, least=16)
    questions: int = option("Of each measurement.", 12, least=2)
    shares: tuple[float, ...] = option(
        "Rates of arrival, as shares of what each engine answers one after the other.", "0.5,0.9", parse=parsing.numbers
    )
    tokens: int = option("Of an answer.", 16, least=2)
    long: int = option("Questions to ragkv alone, in the end, one hundred after the other.", 1000, least=0)
    kv_tokens: int = option("Tokens whose KV fits into vLLM's memory.", 24576, least=1024)
    memory_gib: float | None = option("Budget of the store's memory.", None, setting="store.memory_gib")
    simulated: bool = option("Compare the long run with what the simulation expects of it.", False)
    seed: int = option("Of the questions and the arrivals.", 0)
    lmcache: bool = option("Also of LMCache, which has to be installed beside ragkv.", False)


@dataclass(frozen=True)
class Simulate:
    """Simulate many engines over a trace, by a measured profile: hit rates, TTFT and bytes. Needs no vLLM."""

    trace: str = option("zipf (documents), or a file like Mooncake's trace.", "zipf")
    engines: tuple[int, ...] = option("Numbers of engines.", "1,4,16", parse=parsing.whole_numbers)
    chunks: tuple[int, ...] = option(
        "Numbers of chunks, of documents.", "1000,100000,10000000", parse=parsing.whole_numbers
    )
    stores: tuple[str, ...] = option(
        "local, or bucket behind them.", "local,bucket", parse=parsing.among("local", "bucket")
    )
    routings: tuple[str, ...] = option("least busy engine, or affine.", "least", parse=parsing.among("least", "affine"))
    profile: Path | None = option("What `ragkv profile --json` printed. Default: the home's own.", None)
    load: float = option("Of all engines' time, what full prefill would take; 0: a trace's own times.", 0.7, least=0)
    requests: int = option("Questions about documents, for each engine.", 2000, least=20)
    exponent: float = option("Of Zipf's law of the documents' popularity.", 0.9, least=0)
    top_k: int = option("Documents of a question.", 6, least=1)
    tokens: int = option("Of an answer about documents.", 64, least=1)
    uncounted: float = option("Share of the requests that come first and aren't counted.", 0.5, least=0, most=0.9)
    indexed: bool = option("The KV of all documents was stored before, not only once it was missed.", False)
    token_ms: float = option("Between two tokens of an answer.", 30.0, least=0)
    memory_gib: float | None = option("Memory for KV of each engine.", None, setting="store.memory_gib")
    disk_gib: float = option("Disk for KV of each engine.", 32.0, least=0.01, setting="store.disk_gib")
    bucket_mib_s: float = option("What comes from the bucket to each engine, in MiB/s.", 200.0, least=0.1)
    bucket_ms: float = option("Until the first byte comes.", 20.0, least=0)
    kv_bytes: int | None = option("Of a token's stored KV. Default: by the model and store.codec.", None, least=1)
    kv_tokens: int | None = option("Memory for KV, in tokens. Default: model.kv_cache_gib.", None, least=1)
    seed: int = option("Of the questions and the arrivals.", 0, least=0)
