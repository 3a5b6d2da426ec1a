"""The tenants of a server: each has a pipeline, uploads and limits of its own. Endpoints depend on `CurrentTenant`."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from fastapi import Depends, Request

from ragkv.background import RESTORE_EVENTS
from ragkv.config import MAIN, Config, TenantConfig
from ragkv.index.uploads import Uploads
from ragkv.server.limits import Concurrency, Limits
from ragkv.server.metrics import Metrics, Observed

if TYPE_CHECKING:
    from ragkv.pipeline import Pipeline


class Tenant:
    """A tenant's pipeline, and the same pipeline observed: within the tenant's limits, and counted."""

    def __init__(self, pipeline: "Pipeline", uploads: Path, limits: Limits, metrics: Metrics) -> None:
        self.pipeline, self.limits = pipeline, limits
        self.observed = Observed(pipeline, metrics, limits)
        self.uploads = Uploads(uploads, pipeline.indexer.ingest_documents)
        metrics.budget.labels(pipeline.tenant).set(pipeline.defaults.budget)
        pipeline.canary.on_drift = lambda d: metrics.drifted(pipeline.tenant, d, pipeline.defaults.budget)


class Tenants:
    """All tenants by name, `MAIN` among them. Lives in one event loop."""

    def __init__(self, config: Config, pipelines: Mapping[str, "Pipeline"], uploads: Mapping[str, Path]) -> None:
        """uploads: by tenant, the folder where uploads are kept until they are indexed."""
        self.config, concurrency = config, Concurrency(config.server.max_requests)
        self.metrics = Metrics(self._counters, self._gauges)
        self.metrics.ready.set_function(lambda: self.main.pipeline.is_ready)
        self._tenants = {
            name: Tenant(
                pipeline, uploads[name], Limits(config.tenants.get(name, TenantConfig()), concurrency), self.metrics
            )
            for name, pipeline in pipelines.items()
        }

    @property
    def main(self) -> Tenant:
        return self._tenants[MAIN]

    def __getitem__(self, name: str) -> Tenant:
        return self._tenants[name]

    def start(self) -> None:
        """Continue with uploads that an earlier process has left."""
        for tenant in self._tenants.values():
            tenant.uploads.start()

    async def close(self) -> None:
        """Stop indexing uploads; the pipelines stay open."""
        for tenant in self._tenants.values():
            await tenant.uploads.close()

    def _gauges(self) -> dict[str, int]:
        waiting = sum(tenant.uploads.num_waiting for tenant in self._tenants.values())
        return {**self.main.pipeline.gauges, "waiting_uploads": waiting}

    def _counters(self) -> dict[str, int]:
        """Return the counters of the engine, which all share, plus those of each pipeline."""
        counters = Counter(self.main.pipeline.counters)
        for name, tenant in self._tenants.items():
            if name != MAIN:
                counters.update({event: tenant.pipeline.counters[event] for event in RESTORE_EVENTS})
        return dict(counters)


async def _tenants(request: Request) -> Tenants:
    tenants: Tenants = request.app.state.tenants
    return tenants


AllTenants = Annotated[Tenants, Depends(_tenants)]


async def _tenant(request: Request, tenants: AllTenants) -> Tenant:
    return tenants[request.scope["tenant"]]  # as the gate found out


CurrentTenant = Annotated[Tenant, Depends(_tenant)]
