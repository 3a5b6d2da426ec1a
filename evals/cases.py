"""What `ragkv eval all` measures: each experiment of the project with its arguments, in full and by `--quick`.

`{data}` stands for the folder of datasets, `{out}` for the one of results.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One experiment. full: its arguments; quick: those for a minute or two on two cores, None leaves it out.

    name: of its files; before an @ that of the experiment. asks_lmcache: whether LMCache is asked too in full, if it is
    installed.
    """

    name: str
    title: str
    full: str
    quick: str | None
    asks_lmcache: bool = False

    @property
    def experiment(self) -> str:
        """The experiment's name; that of a command of ragkv's own is no experiment's."""
        return self.name.partition("@")[0]


_POLICIES = "none,guided:0.05,cacheblend:0.15@alone"

CASES = (
    Case(
        "cache",
        "Eviction: hits of each policy over a trace of documents",
        "--trace zipf",
        "--trace zipf --shares 0.05,0.25",
    ),
    Case(
        "cache@mooncake",
        "Eviction: hits of each policy over Mooncake's trace",
        "--trace {data}/traces/mooncake_trace.jsonl",
        None,
    ),
    Case("find", "Chunks found in prompts' tokens", "--repeats 10", "--tokens 2048,32768 --chunks 10000 --repeats 5"),
    Case(
        "learn",
        "Plain vLLM that learns passages from prompts",
        "--tokens 1800 --passages 8 --requests 6 --pause-s 10",
        None,
    ),
    Case("profile", "What requests take on this machine, for the controller", "", None),
    Case(
        "simulate",
        "Simulated: many engines, questions about documents",
        "--profile {out}/profile.jsonl --engines 1,4,16,100 --chunks 1000,100000,10000000 --requests 200",
        None,
    ),
    Case(
        "simulate@mooncake",
        "Simulated: many engines, Mooncake's trace",
        "--profile {out}/profile.jsonl --trace {data}/traces/mooncake_trace.jsonl --load 0 --engines 1,4",
        None,
    ),
    Case("store", "The store on this disk", "--churn 4", "--mib 32 --churn 1 --repeats 1 --records 256,1024"),
    Case(
        "faults",
        "The store after kills and damages",
        "--kills 20 --flips 100 --table 10",
        "--kills 5 --flips 60 --table 1",
    ),
    Case(
        "retrieval",
        "Which passages are found",
        "--dataset xquad --data {data}",
        "--dataset xquad --data {data} --depths 3",
    ),
    Case(
        "ttft",
        "Time to first token by policy and length",
        "--tokens 1024,4096 --policies guided:0.05,none --repeats 2 --cold",
        "--tokens 1024 --policies guided:0.05,none --repeats 2",
    ),
    Case(
        "timeline", "One request, layer by layer", "--out {out}/timeline.png", "--tokens 1024 --out {out}/timeline.png"
    ),
    Case(
        "quality@xquad",
        "Fidelity: questions about one article's paragraphs",
        f"--dataset xquad --data {{data}} --examples 2 --ttft-examples 0 --policies {_POLICIES} "
        "--out {out}/xquad-examples.jsonl",
        "--dataset xquad --data {data} --examples 2 --captures 1 --ttft-examples 0 --policies none,guided:0.05 "
        "--out {out}/xquad-examples.jsonl",
    ),
    Case(
        "quality@musique_short",
        "Fidelity: questions over several short passages",
        f"--dataset musique_short --data {{data}} --examples 2 --ttft-examples 0 --policies {_POLICIES} "
        "--out {out}/musique_short-examples.jsonl",
        None,
    ),
    Case(
        "swap",
        "Recompute or load",
        "--tokens 512,2048 --shares 1 --bandwidths 0,100 --out {out}/swap.png",
        None,
    ),
    Case(
        "chat",
        "Conversations that leave memory between turns",
        "--data {data} --conversations 3 --users 3 --think-s 2 --shared 1 --least-tokens 1800 --turns 2 "
        "--kv-tokens 3072 --tokens 8",
        None,
        asks_lmcache=True,
    ),
    Case(
        "analytics",
        "Many short texts behind one instruction",
        "--data {data} --tokens 500 --requests 6 --repeats 2",
        None,
        asks_lmcache=True,
    ),
    Case(
        "preempted",
        "What it costs a preempted request to come back",
        "--block-tokens 128 --repeats 2",
        None,
    ),
    Case(
        "pressure",
        "More requests than memory for KV",
        "--requests 6 --tokens-in 256 --tokens-out 64 --shares 0.34 --ways load,auto --out {out}/pressure.png",
        None,
    ),
    Case(
        "batch",
        "Batches: in ragkv's order and in order of arrival",
        "--data {data} --requests 16 --tokens-in 400 --sharing 0.5 --ratios 10 --kv-tokens 4096 --repeats 2 "
        "--out {out}/batch.png",
        "--data {data} --requests 8 --tokens-in 400 --sharing 0.9 --ratios 10 --kv-tokens 3072 --repeats 1 "
        "--out {out}/batch.png",
    ),
    Case(
        "broken-batch",
        "A batch that is killed again and again",
        "--data {data} --requests 40 --kills 1",
        None,
    ),
    Case(
        "rag",
        "Questions that arrive at random",
        "--data {data} --documents 16 --top-k 4 --shares 0.5 --questions 3 --long 30 --memory-gib 0.03 --simulated",
        "--data {data} --documents 6 --top-k 2 --questions 2 --shares 0.9 --long 0 --kv-tokens 6144",
        asks_lmcache=True,
    ),
    Case(
        "load", "Two servers under the same arrivals", "--shares 0.7 --questions 4 --top-k 3 --out {out}/load.png", None
    ),
    Case(
        "survival",
        "Conversations through restarts, kills and damages",
        "--data {data} --conversations 3 --users 3 --turns 3 --tokens 8 --damages 1",
        None,
    ),
    Case(
        "remote",
        "Two homes that share a bucket",
        "--states disk,open,slow,closed --documents 6 --questions 2 --top-k 3",
        None,
    ),
    Case("prompts", "Random prompts of plain vLLM", "--requests 6", None),
    Case("uploads", "While a large file is indexed", "--mib 1 --uploads 3 --answers 2", None),
    Case("stalls", "While large requests come in", "--mib 1", None),
    Case("soak", "A server under mixed traffic", "--seconds 40", None),
    Case("churn", "Documents that change within small budgets", "--seconds 20", None),
)
