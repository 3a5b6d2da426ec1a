"""All experiments: what each can be asked, where its code is, and how its rows are shown.

A new one is a dataclass in `ragkv.evals.parameters`, an `Experiment` here, and a module that yields its rows.
"""

from ragkv.evals import tables
from ragkv.evals.experiment import VLLM, Experiment
from ragkv.evals.parameters import (
    Analytics,
    Batch,
    BrokenBatch,
    Cache,
    Chat,
    Churn,
    Faults,
    Find,
    Learn,
    Load,
    Preempted,
    Pressure,
    Prompts,
    Quality,
    Rag,
    Remote,
    Retrieval,
    Simulate,
    Soak,
    Stalls,
    Store,
    Survival,
    Swap,
    Timeline,
    Ttft,
    Uploads,
)
from ragkv.evals.robustness import tables as robustness

_WORKLOADS, _ROBUSTNESS = "ragkv.evals.workloads", "ragkv.evals.robustness"
EXPERIMENTS = (
    Experiment("ttft", Ttft, f"{_WORKLOADS}.ttft", tables.ttft, (*VLLM, "embedder")),
    Experiment("quality", Quality, f"{_WORKLOADS}.quality", tables.quality, VLLM),
    Experiment(
        "retrieval", Retrieval, f"{_WORKLOADS}.retrieval", tables.retrieval, ("home", "embedder", "config_file")
    ),
    Experiment("cache", Cache, f"{_WORKLOADS}.cache", tables.cache),
    Experiment("find", Find, f"{_WORKLOADS}.find", tables.find),
    Experiment("learn", Learn, f"{_WORKLOADS}.learn", tables.learn, VLLM),
    Experiment("simulate", Simulate, f"{_WORKLOADS}.simulate", tables.simulate, VLLM[:-1]),
    Experiment("swap", Swap, f"{_WORKLOADS}.swap", tables.swap, VLLM, draws=True),
    Experiment("timeline", Timeline, f"{_WORKLOADS}.timeline", tables.timeline, VLLM),
    Experiment(
        "faults", Faults, f"{_ROBUSTNESS}.faults", robustness.faults, fails=lambda row: row["failed"], forks=True
    ),
    Experiment("store", Store, f"{_WORKLOADS}.disk", tables.store, ("home", "config_file")),
    Experiment("churn", Churn, f"{_ROBUSTNESS}.churn", robustness.churn, VLLM, fails=lambda row: row["problems"]),
    Experiment("soak", Soak, f"{_ROBUSTNESS}.soak", robustness.soak, VLLM[:-1], fails=lambda row: row["problems"]),
    Experiment("uploads", Uploads, f"{_WORKLOADS}.uploads", robustness.uploads, VLLM[:-1]),
    Experiment("stalls", Stalls, f"{_WORKLOADS}.stalls", robustness.stalls, VLLM[:-1]),
    Experiment("remote", Remote, f"{_WORKLOADS}.remote", robustness.remote, VLLM),
    Experiment("chat", Chat, f"{_WORKLOADS}.chat", tables.chat, VLLM),
    Experiment(
        "survival", Survival, f"{_ROBUSTNESS}.survival", robustness.faults, VLLM, fails=lambda row: row["failed"]
    ),
    Experiment("prompts", Prompts, f"{_ROBUSTNESS}.prompts", robustness.faults, VLLM, fails=lambda row: row["failed"]),
    Experiment("analytics", Analytics, f"{_WORKLOADS}.analytics", tables.analytics, VLLM),
    Experiment("preempted", Preempted, f"{_WORKLOADS}.preempted", tables.preempted, VLLM),
    Experiment("batch", Batch, f"{_WORKLOADS}.batch", tables.batch, VLLM, draws=True),
    Experiment(
        *("broken-batch", BrokenBatch, f"{_ROBUSTNESS}.broken_batch", robustness.broken_batch, VLLM[:-1]),
        fails=lambda row: row["twice"] or row["missing"] or row["differing"] or row["failed"],
    ),
    Experiment("rag", Rag, f"{_WORKLOADS}.rag", tables.rag, VLLM),
    Experiment("pressure", Pressure, f"{_WORKLOADS}.pressure", tables.pressure, VLLM, draws=True),
    Experiment("load", Load, f"{_WORKLOADS}.load", tables.load, VLLM[:-1], draws=True),
)
