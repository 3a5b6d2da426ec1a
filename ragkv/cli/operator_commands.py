"""The commands for the KV of documents: where it is, near or far, pinned, encoded anew, cleared. They start no model.

A server may run meanwhile. What its worker has in memory is asked for and changed by its HTTP interface.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Annotated

import typer

from ragkv.cli import operator_output, output
from ragkv.cli.home_commands import open_store, opened_tier, show
from ragkv.cli.options import AsJson
from ragkv.cli.output import err
from ragkv.config import Config
from ragkv.errors import ConfigError, RagKVError, StoreError

if TYPE_CHECKING:
    from ragkv.operations.selection import Chosen
    from ragkv.store.disk_store import DiskStore

Documents = Annotated[
    list[str] | None,
    typer.Argument(help="Document ids, or files and folders that were given to `ragkv index`.", show_default=False),
]
OfTenant = Annotated[
    str | None, typer.Option("--tenant", help="Whose documents; without names all of the tenant's. [default: main]")
]
All = Annotated[bool, typer.Option("--all", help="All documents of all tenants.")]


def lookup(config: Config, documents: Documents = None, tenant: OfTenant = None, as_json: AsJson = False) -> None:
    """Show where documents' KV is and how it is used: by default all documents of all tenants.

    What a running server has in memory is shown by its /v1/store/documents.
    """
    from ragkv.home import Home
    from ragkv.operations.lookup import pages
    from ragkv.operations.selection import Selection

    selection = Selection(tuple(documents or ()), tenant, on_disk=True)
    with open_store(config) as store:
        found = [each for page in pages(Home(config.home), store, selection, lambda: None) for each in page]
    show(found, as_json, operator_output.print_lookup)


def pin(
    config: Config, documents: Documents = None, tenant: OfTenant = None, all: All = False, as_json: AsJson = False
) -> None:
    """Never evict documents' KV. Refused if `store.disk_gib` can't hold all that is pinned then."""
    from ragkv.operations import changes

    with _chosen(config, documents, tenant, all) as (store, chosen):
        pinning = changes.pin(store, chosen, config.store.disk_bytes)
    show(pinning, as_json, lambda done: operator_output.print_pinning("pinned", done))


def unpin(
    config: Config, documents: Documents = None, tenant: OfTenant = None, all: All = False, as_json: AsJson = False
) -> None:
    """Let documents' KV be evicted again, but for chunks that other pinned documents share."""
    from ragkv.operations import changes

    with _chosen(config, documents, tenant, all) as (store, chosen):
        pinning = changes.unpin(store, chosen, config.store.disk_bytes)
    show(pinning, as_json, lambda done: operator_output.print_pinning("unpinned", done))


def warm(
    config: Config, documents: Documents = None, tenant: OfTenant = None, all: All = False, as_json: AsJson = False
) -> None:
    """Bring documents' KV into the system's page cache, before they are asked about.

    A running server's POST /v1/store/warm brings it into the server's own memory.
    """
    from ragkv.operations import changes

    with _chosen(config, documents, tenant, all) as (store, chosen):
        total = sum(store.admin.sizes(store.control.keys_of(chosen.chunk_hashes)).values())
        with output.byte_bar("Warming KV", total) as advance:
            warming = changes.warm(store, chosen, advance)
    show(warming, as_json, operator_output.print_warming)


def demote(
    config: Config, documents: Documents = None, tenant: OfTenant = None, all: All = False, as_json: AsJson = False
) -> None:
    """Drop documents' KV from the system's page cache; on disk it stays.

    A running server's POST /v1/store/demote drops it from the server's own memory too.
    """
    from ragkv.operations import changes

    with _chosen(config, documents, tenant, all) as (store, chosen):
        demotion = changes.demote(store, chosen)
    show(demotion, as_json, operator_output.print_demotion)


def recode(
    config: Config,
    codec: Annotated[str, typer.Option(help="Codec to store it with; it must make it smaller.")],
    documents: Documents = None,
    tenant: OfTenant = None,
    all: Annotated[bool, typer.Option("--all", help="All KV of the store.")] = False,
    as_json: AsJson = False,
) -> None:
    """Encode stored KV with a smaller codec. Interrupted, run it again: what has the codec is passed over.

    New KV is stored with `store.codec`. Exits with status 1 if some was damaged, or nothing could get smaller.
    """
    from ragkv.home import Home
    from ragkv.operations import changes
    from ragkv.store.control import codec_named

    codec_named(codec)  # reports a bad one before anything is looked for
    with _chosen(config, documents, tenant, all) as (store, chosen):
        keys = changes.keys_to_recode(store, None if all else chosen)
        pair_of = changes.pairs(Home(config.home), config.store)
        total = sum(store.admin.sizes(keys).values())
        try:
            with output.byte_bar(f"Encoding as {codec}", total) as advance:
                recoding = changes.recode(store, keys, pair_of, codec, advance)
        except KeyboardInterrupt:
            err.print("interrupted; run it again to continue")
            raise
    show(recoding, as_json, operator_output.print_recoding)
    num_done = recoding.num_recoded + recoding.num_joined + recoding.num_same
    if recoding.problems or (recoding.num_no_smaller and not num_done):
        raise typer.Exit(1)


def clear(
    config: Config,
    documents: Documents = None,
    tenant: OfTenant = None,
    all: Annotated[bool, typer.Option("--all", help="All KV of the store, after a question.")] = False,
    model: Annotated[
        str | None,
        typer.Option(help="KV of a model: the first characters of its fingerprint; `other`: of all but the home's."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be cleared.")] = False,
    local: Annotated[
        bool, typer.Option("--local", help="Only on this machine: store.remote keeps it, and it is fetched again.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Ask no question.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete KV. Documents stay indexed, and their KV is made again once a question misses it.

    `ragkv store delete` deletes documents. What is in `store.remote` is deleted there too.
    """
    from ragkv.home import Home
    from ragkv.operations import changes

    if model is not None:
        if documents or tenant is not None or all:
            raise ConfigError("--model clears a model's KV of all documents; leave out documents, --tenant and --all")
        with open_store(config) as store, nullcontext() if local else opened_tier(config, store) as tier:
            clearing = changes.clear_model(Home(config.home), store, tier, model, dry_run=dry_run)
    else:
        with (
            _chosen(config, documents, tenant, all) as (store, chosen),
            nullcontext() if local else opened_tier(config, store) as tier,
        ):
            if all and not dry_run and not yes:
                size = operator_output.size(store.admin.gauges()["disk_bytes"])
                remote = "" if tier is None else f", and of these documents in {tier.remote.url}"
                _ask(f"Clear all KV of {config.home}, {size}{remote}? [y/N]")
            clearing = (changes.clear_all if all else changes.clear)(store, tier, chosen, dry_run=dry_run)
    show(clearing, as_json, operator_output.print_clearing)


def health(config: Config, as_json: AsJson = False) -> None:
    """Show whether KV can be read and stored, and what it takes. Exits with status 1 if it can't.

    A running server's /v1/store/health also knows what answers found damaged.
    """
    from ragkv.home import Home
    from ragkv.operations.health import examine, unusable

    home, disk_bytes = Home(config.home), config.store.disk_bytes
    try:
        with open_store(config) as store:
            found = examine(home, store, disk_bytes)
    except StoreError as error:
        found = unusable(home, disk_bytes, str(error))
    show(found, as_json, operator_output.print_health)
    if not found.is_well:
        raise typer.Exit(1)


def _ask(question: str) -> None:
    """Ask on stderr, so that stdout has the result alone. Raises ConfigError unless the answer is yes."""
    err.print(question, end=" ", markup=False, highlight=False, soft_wrap=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise ConfigError("nothing was cleared; answer y, or give --yes where nobody can answer")


@contextmanager
def _chosen(
    config: Config, documents: list[str] | None, tenant: str | None, all: bool
) -> Iterator[tuple["DiskStore", "Chosen"]]:
    """Open the store, and find the documents that a command is about. Raises ConfigError unless it names some."""
    from ragkv.home import Home
    from ragkv.operations.selection import Selection, choose

    if all == bool(documents or tenant is not None):
        raise ConfigError("say which documents: their names, a --tenant, or --all alone")
    selection: Selection = Selection(tuple(documents or ()), tenant, on_disk=True)
    with open_store(config) as store:
        try:
            chosen = choose(Home(config.home), selection)
        except RagKVError as error:
            raise type(error)(f"{error}\nnothing was changed") from error
        yield store, chosen
