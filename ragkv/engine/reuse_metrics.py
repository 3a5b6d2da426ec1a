"""What requests have reused, in vLLM's own log and at its `/metrics`: counts that its connectors may add."""

from collections import Counter
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from ragkv.engine.task import Report

if TYPE_CHECKING:
    from vllm.config import VllmConfig

COUNTERS = {
    "fused_requests": "Requests with the KV of stored chunks in their prompts",
    "reused_tokens": "Prompt tokens with the KV of stored chunks",
    "exact_tokens": "Prompt tokens with the KV of an exact prefix from the disk",
    "recomputed_tokens": "Prompt tokens of fused requests that ragkv computed itself",
    "unusable_chunks": "Chunks in prompts whose KV was missing or damaged",
    "failed_requests": "Requests that were to be fused, and that vLLM prefilled instead",
    "learnt_passages": "Passages of prompts that are found from then on, for they recurred",
}


def counts(report: Report) -> Counter[str]:
    """Return what a request's report adds to `COUNTERS`."""
    tokens = report.tokens
    is_fused = bool(tokens.reused) and not report.failed
    return Counter(
        fused_requests=int(is_fused),
        reused_tokens=tokens.reused,
        exact_tokens=tokens.exact,
        recomputed_tokens=tokens.recomputed if is_fused else 0,
        unusable_chunks=report.chunks.missing + report.chunks.corrupt,
        failed_requests=int(report.failed),
    )


class ReuseStats(KVConnectorStats):
    """Counts since the last ones, as vLLM carries them from its scheduler to where they are shown."""

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> "ReuseStats":
        return ReuseStats(data=dict(Counter(self.data) + Counter(other.data)))

    def reduce(self) -> dict[str, int | float]:
        return {name.replace("_", " "): count for name, count in self.data.items()}

    def is_empty(self) -> bool:
        return not any(self.data.values())


class ReuseMetrics(KVConnectorPromMetrics):
    """The same as counters, `ragkv:reused_tokens_total` and so on, for each of vLLM's engines."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters: dict[str, Any] = {
            name: self._counter_cls(name=f"ragkv:{name}", documentation=text, labelnames=labelnames)
            for name, text in COUNTERS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, count in transfer_stats_data.items():
            self._counters[name].labels(*self.per_engine_labelvalues[engine_idx]).inc(count)
