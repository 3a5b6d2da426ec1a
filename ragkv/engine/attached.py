"""What a worker of plain vLLM tells the scheduler's side before the first request."""

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata


@dataclass
class Attached(KVConnectorHandshakeMetadata):
    """Whether the worker has attached to its model. problem: why its KV can't be fused, None if it can."""

    problem: str | None
