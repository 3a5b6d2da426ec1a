"""Whose request it is: each tenant has a pipeline, uploads and limits of its own."""

from collections.abc import Mapping
from dataclasses import dataclass

from starlette.requests import Request

from ragkv.config import MAIN, Config
from ragkv.server.limits import Limits
from ragkv.server.wire import Pipeline
from ragkv.uploads import Uploads


@dataclass(frozen=True)
class Tenant:
    pipeline: Pipeline
    uploads: Uploads
    limits: Limits


class Tenants:
    """By name; `MAIN` is there always."""

    def __init__(self, config: Config, tenants: Mapping[str, Tenant]) -> None:
        self.config, self._tenants = config, dict(tenants)

    @property
    def main(self) -> Tenant:
        return self._tenants[MAIN]

    def of(self, request: Request) -> Tenant:
        """Whose key the request had, as the gate found out."""
        return self._tenants[request.scope["tenant"]]

    def all(self) -> Mapping[str, Tenant]:
        return self._tenants
